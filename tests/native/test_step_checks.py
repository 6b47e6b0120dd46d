"""A step that does not fit is a DriverError that names field and element; nothing has run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.errors import DriverError
from pelton.runtime.step import StepInputs

from .tiny import TARGET, TinyEngine, make_sampling, make_step


@pytest.fixture(scope="module")
def driver(code):
    engine = TinyEngine(code, ["log_a log"], ["tail w"])
    made = CpuDriver(engine, TARGET, threads=1)
    made.allocate((16, 16), 4)
    made.engine = engine  # type: ignore[attr-defined]
    yield made
    made.close()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def table(**cells: int) -> np.ndarray:
    """Block table of two sequences of 40 tokens, with cells s<sequence>b<block> exchanged."""
    made = np.array([[0, 1, 2, -1], [3, 4, 5, -1]], np.int32)
    for name, value in cells.items():
        made[int(name[1]), int(name[3])] = value
    return made


def refused(driver: Any, step: StepInputs, message: str) -> None:
    before = driver.engine.read(driver, "log")[0]
    with pytest.raises(DriverError, match=message):
        driver.execute(step)
    assert driver.engine.read(driver, "log")[0] == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": i32(0, 1, 10)}, r"token_ids\[2\] is 10; allowed: \[-1, 10\)"),
        ({"token_ids": i32(-2, 1, 2)}, r"token_ids\[0\] is -2"),
        ({"positions": i32(0, 1, 3)}, r"positions\[2\] is 3; allowed: consecutive"),
        ({"positions": i32(62, 63, 64)}, r"positions\[2\] is 64; allowed: \[0, 64\)"),
        ({"positions": i32(-1, 0, 1)}, r"positions\[0\] is -1"),
        ({"positions": i32(0, 1)}, r"positions has 2 elements; expected 3"),
        ({"query_start": i32(0, 2)}, r"query_start\[1\] is 2; allowed: the number of tokens, 3"),
        ({"query_start": i32(1, 3)}, r"query_start\[0\] is 1"),
        ({"query_start": i32(0, 1, 3)}, r"query_start has 3 elements; expected 2"),
        ({"seq_slots": i32(4)}, r"seq_slots\[0\] is 4; allowed: \[0, 4\)"),
        ({"seq_slots": i32(-1)}, r"seq_slots\[0\] is -1"),
        ({"seq_slots": i32()}, "0 sequences"),
        ({"logits_rows": i32(3)}, r"logits_rows\[0\] is 3; allowed: \[0, 3\)"),
        ({"logits_rows": i32(-1)}, r"logits_rows\[0\] is -1"),
        ({"row_seq": i32(1)}, r"row_seq\[0\] is 1; allowed: the row's sequence, 0"),
        ({"row_seq": i32(0, 0)}, "row_seq has 2 elements"),
        ({"block_tables": ()}, "block_tables has 0 elements; expected 2"),
        ({"block_tables": (np.zeros((1, 3), np.int32),) * 2}, r"table \[1, 3\]; expected \[1, 4\]"),
        (
            {"block_tables": (np.zeros((1, 4), np.int64),) * 2},
            "block_tables has element format 'l'; expected 2 of int32",
        ),
        ({"block_tables": (np.zeros(4, np.int32),) * 2}, "block_tables has 1 dimensions; expected 2 of int32"),
        ({"token_ids": np.arange(3, dtype=np.int64)}, "token_ids has element format 'l'; expected 1 of int32"),
        ({"token_ids": np.arange(6, dtype=np.int32)[::2]}, "token_ids: expected a C-contiguous array"),
        ({"token_ids": [1, 2, 3]}, "token_ids: expected a C-contiguous array, not .*list"),
        ({"token_ids": f32(0, 1, 2)}, "token_ids has element format 'f'"),
    ],
)
def test_one_sequence(driver, changes, message):
    refused(driver, replace(make_step((3,)), **changes), message)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (make_step((33,)), r"33 tokens; this engine takes 1 to 32 \(rebuild it with --max-num-tokens\)"),
        (make_step((1,) * 5), "5 sequences; this engine takes 1 to 4 .*--max-batch-size"),
        (make_step((20,), rows=range(9)), "9 logits rows; this engine takes 0 to 8 .*--max-logits-rows"),
        (make_step((2, 2), query_start=i32(0, 0, 4)), r"query_start\[1\] is 0; allowed: ascending"),
        (make_step((2, 2), query_start=i32(0, 9, 4)), r"query_start\[1\] is 9; allowed: ascending"),
        (make_step((2, 2), seq_slots=i32(1, 1)), r"seq_slots\[1\] is 1; allowed: a slot that no other"),
    ],
)
def test_whole_step(driver, step, message):
    refused(driver, step, message)


@pytest.mark.parametrize(
    ("full", "sliding", "message"),
    [
        (table(s0b0=-1), table(), r"block_tables\[0\]\[0\]\[0\] is -1; allowed: \[0, 16\)"),
        (table(s1b2=16), table(), r"block_tables\[0\]\[1\]\[2\] is 16"),
        (table(s1b2=-2), table(), r"block_tables\[0\]\[1\]\[2\] is -2"),
        (table(s1b2=2), table(), r"block_tables\[0\]\[1\]\[2\] is 2; allowed: a block that nobody else writes"),
        (table(), table(s0b1=-1), r"block_tables\[1\]\[0\]\[1\] is -1; allowed: \[0, 16\)"),
        (table(), table(s0b0=-2), r"block_tables\[1\]\[0\]\[0\] is -2; allowed: \[-1, 16\)"),
    ],
)
def test_block_tables(driver, full, sliding, message):
    # 12 tokens from position 28 on: blocks 1 and 2 are written, the window of 8 reaches back to position 21.
    refused(driver, make_step((12, 12), start=28, block_tables=(full, sliding)), message)


def test_blocks_before_the_window_may_be_gone_and_later_ones_anything(driver):
    sliding = table(s0b0=-1, s1b0=-1, s0b3=99)
    driver.execute(
        make_step((12, 12), start=28, block_tables=(table(s1b0=0), sliding))
    )  # block 0 is shared, and only read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": f32(-1)}, r"sampling.temperature\[0\] is -1.0+; allowed: 0 or more"),
        ({"temperature": f32(np.nan)}, r"temperature\[0\] is -?nan"),
        ({"temperature": f32(np.inf)}, r"temperature\[0\] is inf"),
        ({"temperature": f32(1, 1)}, "sampling.temperature has 2 elements; expected 1"),
        ({"top_k": i32(-1)}, r"top_k\[0\] is -1"),
        ({"top_p": f32(1.5)}, r"top_p\[0\] is 1.5"),
        ({"min_p": f32(-0.5)}, r"min_p\[0\] is -0.5"),
        ({"repetition_penalty": f32(0)}, r"repetition_penalty\[0\] is 0"),
        ({"presence_penalty": f32(np.nan)}, r"presence_penalty\[0\] is -?nan"),
        ({"frequency_penalty": f32(np.inf)}, r"frequency_penalty\[0\] is inf"),
        ({"seed": np.zeros(1, np.int64)}, "sampling.seed has element format 'l'; expected 1 of uint64"),
        ({"num_logprobs": i32(3)}, r"num_logprobs\[0\] is 3; allowed: \[-1, 3\)"),
        ({"prompt_len": i32(-1)}, r"prompt_len\[0\] is -1"),
        ({"forced": i32(10)}, r"forced\[0\] is 10; allowed: \[-1, 10\)"),
        ({"bias_start": i32(0)}, "bias_start has 1 elements; expected 2"),
        ({"bias_start": i32(0, 1)}, r"bias_start\[1\] is 1; allowed: ascending, up to"),
        ({"bias_start": i32(1, 0)}, r"bias_start\[0\] is 1"),
        ({"bias_ids": i32(3), "bias_values": f32(1)}, r"bias_start\[1\] is 0; allowed: the number of bias ids, 1"),
        ({"bias_start": i32(0, 1), "bias_ids": i32(10), "bias_values": f32(1)}, r"bias_ids\[0\] is 10"),
        ({"bias_start": i32(0, 1), "bias_ids": i32(1), "bias_values": f32()}, "bias_values has 0 elements; expected 1"),
        ({"bias_start": i32(0, 1), "bias_ids": i32(1), "bias_values": f32(np.nan)}, r"bias_values\[0\] is -?nan"),
        ({"mask": np.zeros((1, 2), np.uint32)}, r"sampling.mask is \[1, 2\]; expected \[1, 1\]"),
        ({"mask": np.zeros((1, 1), np.int32)}, "sampling.mask has element format 'i'; expected 2 of uint32"),
    ],
)
def test_sampling(driver, changes, message):
    refused(driver, make_step((3,), sampling=make_sampling(1, **changes)), message)


def test_read_only_inputs_are_taken(driver):
    step = make_step((3,))
    step.token_ids.flags.writeable = False
    assert driver.execute(step).result().tokens.tolist() == [3]


FIELDS = ("token_ids", "positions", "query_start", "seq_slots", "logits_rows", "row_seq")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    field=st.sampled_from((*FIELDS, "table0", "table1")),
    where=st.integers(0, 1000),
    value=st.one_of(st.integers(-3, 70), st.sampled_from([-(2**31), 2**31 - 1, 2**30])),
)
def test_any_single_wrong_index_is_caught_or_harmless(driver, lengths, field, where, value):
    """One element exchanged: either the error names its field, or the value was a legal one."""
    step = make_step(lengths)
    legal = {"token_ids": range(-1, 10), "seq_slots": range(4), "logits_rows": range(step.num_tokens)}
    if field.startswith("table"):
        target = step.block_tables[int(field[-1])].reshape(-1)
        used = where % target.size % 4 == 0  # fewer than 16 tokens: one block a sequence
        allowed = range(16) if used else range(-(2**31), 2**31)
        name = "block_tables"
    else:
        target, name = getattr(step, field), field
        allowed = legal.get(field, range(int(target[where % target.size]), int(target[where % target.size]) + 1))
    target[where % target.size] = value
    if field == "positions" and 1 in lengths:
        allowed = range(64)  # a sequence of one token may be anywhere
    try:
        driver.execute(step)
    except DriverError as error:
        assert name in str(error) or "row_seq" in str(error)
    else:
        assert value in allowed
