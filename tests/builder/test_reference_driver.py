"""From checkpoint to logits on the reference target, held against transformers in fp32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pelton.builder.oracle.reference import ReferenceDriver
from pelton.runtime.drivers.base import Driver
from pelton.runtime.errors import DriverError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import decode_plan, encode_plan
from pelton.runtime.step import FROM_HISTORY, StepInputs, greedy_sampling
from tests.builder.feeder import Feeder
from tests.builder.tiny_engines import RANGES, TinyEngine, tiny_engine
from tests.models import FAMILIES, reference_logits

PROMPT = [int(t) for t in np.random.Generator(np.random.PCG64(3)).integers(5, 300, 40)]
MATES = [[int(t) for t in np.random.Generator(np.random.PCG64(n)).integers(5, 300, 17)] for n in (1, 2)]
CASES = [(family, kv) for family in FAMILIES for kv in ((1, 2, "all") if family in ("llama", "qwen3") else (2,))]


def close(actual: np.ndarray, expected: np.ndarray, bound: float = 1e-4) -> None:
    error = np.max(np.abs(actual - expected)) / np.max(np.abs(expected))
    assert error < bound, f"max abs error / max abs logit = {error:.2e}"


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-kv{case[1]}")
def engine(request: pytest.FixtureRequest) -> TinyEngine:
    family, kv_heads = request.param
    return tiny_engine(family, kv_heads=kv_heads)


def alone(engine: TinyEngine, tokens: list[int]) -> np.ndarray:
    return Feeder(engine.driver()).feed((0, tokens))[0]


def test_prefill_matches_transformers(engine: TinyEngine) -> None:
    close(alone(engine, PROMPT), reference_logits(engine.folder, PROMPT, RANGES.max_seq_len))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_give_the_same_bits(engine: TinyEngine, chunk: int) -> None:
    feeder = Feeder(engine.driver())
    parts = [feeder.feed((0, PROMPT[i : i + chunk]))[0] for i in range(0, len(PROMPT), chunk)]
    np.testing.assert_array_equal(np.concatenate(parts), alone(engine, PROMPT))


def test_packed_ragged_batches_give_the_same_bits(engine: TinyEngine) -> None:
    feeder = Feeder(engine.driver())
    got: list[list[np.ndarray]] = [[], [], []]
    schedule = [[(0, 0, 11), (1, 0, 3)], [(2, 0, 17), (0, 11, 12), (1, 3, 17)], [(0, 12, 40)]]
    prompts = [PROMPT, *MATES]
    for parts in schedule:
        results = feeder.feed(*((s, prompts[s][start:stop]) for s, start, stop in parts))
        for (sequence, _, _), logits in zip(parts, results, strict=True):
            got[sequence].append(logits)
    for sequence, tokens in enumerate(prompts):
        np.testing.assert_array_equal(np.concatenate(got[sequence]), alone(engine, tokens))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_16_bit_engines_stay_near(family: str) -> None:
    for precision, bound in ((DType.F16, 1e-2), (DType.BF16, 6e-2)):
        engine = tiny_engine(family, precision, kv_heads=2)
        close(alone(engine, PROMPT), reference_logits(engine.folder, PROMPT), bound)
        feeder = Feeder(engine.driver())
        parts = [feeder.feed((0, PROMPT[i : i + 9]))[0] for i in range(0, len(PROMPT), 9)]
        np.testing.assert_array_equal(np.concatenate(parts), alone(engine, PROMPT))


def test_tied_embeddings_are_one_tensor() -> None:
    engine = tiny_engine("llama", tie_word_embeddings=True)
    tables = [w for w in engine.lowered.plan.weights if w.shape[0] == 300]
    assert [(w.name, w.layout) for w in tables] == [("model.embed_tokens", "panel16")]
    close(alone(engine, PROMPT), reference_logits(engine.folder, PROMPT))


def test_plan_survives_encoding() -> None:
    engine = tiny_engine("qwen3", kv_heads=2)
    plan = decode_plan(encode_plan(engine.lowered.plan))
    assert plan == engine.lowered.plan
    driver = ReferenceDriver(plan, engine.tensors.__getitem__)
    np.testing.assert_array_equal(Feeder(driver).feed((0, PROMPT))[0], alone(engine, PROMPT))


def test_sampled_tokens_come_back_from_history() -> None:
    """A step may be issued before the values of the last one are known."""
    engine = tiny_engine("llama", kv_heads=2)
    known, unknown = Feeder(engine.driver()), Feeder(engine.driver())
    token = int(known.run(known.inputs([(0, PROMPT)])).tokens[-1])
    unknown.feed((0, PROMPT))
    for _ in range(5):
        outputs = known.run(known.inputs([(0, [token])]))
        blind = unknown.run(unknown.inputs([(0, [FROM_HISTORY])]))
        np.testing.assert_array_equal(outputs.logits, blind.logits)
        assert outputs.tokens == blind.tokens
        token = int(outputs.tokens[0])


def test_copied_blocks_continue_as_the_original() -> None:
    engine = tiny_engine("mistral", kv_heads=2)
    feeder = Feeder(engine.driver())
    feeder.feed((0, PROMPT))
    expected = feeder.feed((0, MATES[0]))[0]
    other = Feeder(engine.driver())
    other.feed((0, PROMPT))
    fresh = [other.free.pop() for _ in other.blocks[0]]
    other.driver.copy_blocks(0, other.blocks[0], fresh)
    other.driver.copy_blocks(0, [60], [other.blocks[0][0]])
    other.blocks[0] = fresh
    np.testing.assert_array_equal(other.feed((0, MATES[0]))[0], expected)


def test_block_bytes_and_protocol() -> None:
    driver = tiny_engine("llama", kv_heads=2).driver()
    assert isinstance(driver, Driver)
    assert driver.block_bytes(0) == 2 * (16 * 2 * 2 * 16 * 4)  # layers x (tokens, k and v, heads, head_dim, bytes)
    with pytest.raises(DriverError, match="no KV group 1"):
        driver.block_bytes(1)


def spoil(inputs: StepInputs, **changes: object) -> StepInputs:
    return replace(inputs, **changes)  # type: ignore[arg-type]


I32 = np.int32
BAD_STEPS = {
    "token_ids.*300": {"token_ids": np.array([5, 300, 7], I32)},
    "token_ids is int64": {"token_ids": np.array([5, 6, 7])},
    "positions.*64.*--max-seq-len": {"positions": np.array([62, 63, 64], I32)},
    "one more than": {"positions": np.array([0, 2, 3], I32)},
    "query_start": {"query_start": np.array([0, 2], I32)},
    "seq_slots": {"seq_slots": np.array([8], I32)},
    "logits_rows": {"logits_rows": np.array([0, 1, 3], I32)},
    "row_seq": {"row_seq": np.array([0, 0, 1], I32)},
    r"block_tables\[0\]\[0,0\] is -1": {"block_tables": (np.full((1, 4), -1, I32),)},
    r"block_tables\[0\]\[0,0\] is 64": {"block_tables": (np.full((1, 4), 64, I32),)},
    "0 block tables": {"block_tables": ()},
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_bad_steps_are_refused(message: str) -> None:
    feeder = Feeder(tiny_engine("llama", kv_heads=2).driver())
    inputs = feeder.inputs([(0, [5, 6, 7])])
    with pytest.raises(DriverError, match=message):
        feeder.driver.execute(spoil(inputs, **BAD_STEPS[message]))
    assert feeder.run(inputs).logits is not None  # and nothing was left behind


def test_sizes_beyond_the_ranges_name_the_flag() -> None:
    feeder = Feeder(tiny_engine("llama", kv_heads=2).driver())
    with pytest.raises(DriverError, match="--max-num-tokens"):
        feeder.driver.execute(feeder.inputs([(0, [5] * 49)]))
    with pytest.raises(DriverError, match="--max-batch-size"):
        feeder.driver.execute(feeder.inputs([(n, [5]) for n in range(1, 6)]))
    bad = feeder.inputs([(6, [5])])
    spoiled = replace(bad, sampling=replace(bad.sampling, num_logprobs=np.array([6], I32)))
    with pytest.raises(DriverError, match="--max-logprobs"):
        feeder.driver.execute(spoiled)


BAD_SAMPLING = {
    "sampling.temperature is int32": {"temperature": np.zeros(3, I32)},
    r"sampling.seed is uint64\[2\]": {"seed": np.zeros(2, np.uint64)},
    r"sampling.num_logprobs\[1\] is 6.*--max-logprobs": {"num_logprobs": np.array([0, 6, 0], I32)},
    r"sampling.forced\[2\] is 300": {"forced": np.array([-1, 3, 300], I32)},
    "sampling.bias_start must": {
        "bias_start": np.array([0, 2, 1, 2], I32),
        "bias_ids": np.array([1, 2], I32),
        "bias_values": np.zeros(2, np.float32),
    },
    r"sampling.mask is uint32\[3, 9\]": {"mask": np.zeros((3, 9), np.uint32)},
}


@pytest.mark.parametrize("message", BAD_SAMPLING)
def test_bad_sampling_parameters_are_refused(message: str) -> None:
    feeder = Feeder(tiny_engine("llama", kv_heads=2).driver())
    inputs = feeder.inputs([(0, [5, 6, 7])])
    changes = BAD_SAMPLING[message]
    with pytest.raises(DriverError, match=message):
        feeder.driver.execute(replace(inputs, sampling=replace(inputs.sampling, **changes)))  # type: ignore[arg-type]


def test_order_of_calls_is_checked() -> None:
    driver = tiny_engine("llama", kv_heads=2).driver()
    feeder = Feeder(driver)
    inputs = feeder.inputs([(0, [5])])
    with pytest.raises(DriverError, match="twice"):
        driver.allocate((1,), 1)
    with pytest.raises(DriverError, match="block 64"):
        driver.copy_blocks(0, [64], [0])
    driver.close()
    driver.close()
    with pytest.raises(DriverError, match="closed"):
        driver.execute(inputs)
    with pytest.raises(DriverError, match="allocate"):
        tiny_engine("llama", kv_heads=2).driver().execute(inputs)


def test_tensor_of_the_wrong_type_is_refused() -> None:
    engine = tiny_engine("llama", kv_heads=2)
    driver = ReferenceDriver(engine.lowered.plan, lambda name: engine.tensors[name].astype(np.float64))
    feeder = Feeder(driver)
    with pytest.raises(DriverError, match="the plan wants"):
        feeder.feed((0, [5]))


def test_layers_with_and_without_window() -> None:
    """Two KV groups with block tables of their own; blocks that a window has passed are given back."""
    settings = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "num_hidden_layers": 3}
    engine = tiny_engine("qwen2", kv_heads=2, **settings)
    assert [(g.name, g.window) for g in engine.lowered.plan.kv_groups] == [("full", None), ("window12", 12)]
    assert [s.group for s in engine.lowered.plan.states if s.kind == "paged_kv"] == [0, 1, 1]
    tokens = [*PROMPT, *MATES[0]]
    expected = reference_logits(engine.folder, tokens)
    feeder = Feeder(engine.driver())
    got = []
    for start in range(0, len(tokens), 5):
        inputs = feeder.inputs([(0, tokens[start : start + 5])])
        full, window = (table.copy() for table in inputs.block_tables)
        window[0] = np.where(window[0] >= 0, 63 - window[0], -1)  # other blocks in the other group
        window[0, : max(0, start - 11) // 16] = -1  # a freed block
        got.append(feeder.run(replace(inputs, block_tables=(full, window))).logits)
    close(np.concatenate(got), expected)


def test_many_rows_pass_through_the_tail_in_chunks() -> None:
    """R = 0, fewer rows than a chunk, and rows in any order."""
    engine = tiny_engine("llama", kv_heads=2)
    whole = alone(engine, PROMPT)
    for rows in ([], [39], [5, 3, 3, 39, 0, 8, 7, 6, 1, 2]):
        feeder = Feeder(engine.driver())
        inputs = feeder.inputs([(0, PROMPT)])
        few = replace(
            inputs,
            logits_rows=np.array(rows, np.int32),
            row_seq=np.zeros(len(rows), np.int32),
            sampling=greedy_sampling(len(rows)),
        )
        outputs = feeder.run(few)
        np.testing.assert_array_equal(outputs.logits, whole[rows])
        np.testing.assert_array_equal(outputs.tokens, whole[rows].argmax(-1))
