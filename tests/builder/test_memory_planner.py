"""The planner by brute force over bytes and phases, and the checker against plans with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.builder.memory_checker import memory_problems, require_sound_memory
from pelton.builder.memory_planner import ALIGNMENT, Lifetime, plan_memory
from pelton.runtime.errors import BuildError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import Buffer, Launch, Operand, Plan, Ranges
from tests.builder.tiny_engines import tiny_engine

LIFETIMES = st.lists(
    st.builds(
        lambda nbytes, first, length: Lifetime("b", nbytes, first, first + length),
        st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 1024])),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=14,
)


@given(LIFETIMES)
def test_no_byte_has_two_owners(lifetimes: list[Lifetime]) -> None:
    offsets, size = plan_memory(lifetimes)
    for phase in range(20):
        owner: dict[int, int] = {}
        for index, life in enumerate(lifetimes):
            if life.first <= phase <= life.last:
                for byte in range(offsets[index], offsets[index] + life.nbytes):
                    assert owner.setdefault(byte, index) == index
                    assert byte < size
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert size % ALIGNMENT == 0


@given(LIFETIMES)
def test_size_lies_between_the_peak_and_no_reuse(lifetimes: list[Lifetime]) -> None:
    _, size = plan_memory(lifetimes)
    peak = max((sum(x.nbytes for x in lifetimes if x.first <= p <= x.last) for p in range(20)), default=0)
    assert peak <= size <= sum(-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in lifetimes)


@given(LIFETIMES)
def test_same_input_same_plan(lifetimes: list[Lifetime]) -> None:
    assert plan_memory(lifetimes) == plan_memory(list(lifetimes))


def test_a_chain_needs_two_buffers() -> None:
    chain = [Lifetime(str(i), 640, i, i + 1) for i in range(20)]
    assert plan_memory(chain)[1] == 2 * 640


def test_gaps_are_filled() -> None:
    lives = [Lifetime("big", 1024, 0, 0), Lifetime("a", 256, 0, 3), Lifetime("b", 512, 1, 2), Lifetime("c", 512, 1, 2)]
    offsets, size = plan_memory(lives)
    assert size == 1024 + 256
    assert {offsets[2], offsets[3]} == {0, 512}


# the checker

RANGES = Ranges(
    max_batch_size=1,
    max_num_tokens=4,
    max_seq_len=16,
    opt_num_tokens=1,
    max_logits_rows=4,
    logits_chunk=2,
    tokens_per_block=16,
    max_logprobs=0,
)


def plan_of(buffers: list[tuple[int, int]], launches: list[Launch], tail_start: int) -> Plan:
    """A plan with buffers (offset, bytes) b0, b1, ... and these launches."""
    return Plan(
        ranges=RANGES,
        kv_groups=(),
        states=(),
        weights=(),
        buffers=tuple(
            Buffer(name=f"b{i}", dtype=DType.U8, shape=(n,), offset=o, nbytes=n) for i, (o, n) in enumerate(buffers)
        ),
        arena_bytes=max((o + n for o, n in buffers), default=0),
        kernels=(),
        launches=tuple(launches),
        tail_start=tail_start,
        vocab_size=1,
    )


def run(inputs: list[int], outputs: list[int], scratch: int = -1, barrier: bool = True, state: int = -1) -> Launch:
    return Launch(
        kernel=0,
        inputs=tuple(Operand("buffer", i) for i in inputs),
        outputs=tuple(Operand("buffer", i) for i in outputs),
        states=() if state < 0 else (Operand("state", state),),
        scratch=scratch,
        barrier=barrier,
    )


SOUND = plan_of(
    [(0, 64), (64, 64), (128, 64), (64, 64)],
    [run([], [0]), run([0], [1]), run([0], [2], scratch=3), run([0, 2], [3]), run([3], [])],
    3,
)


def test_a_sound_plan_has_no_problems() -> None:
    assert memory_problems(SOUND) == []
    require_sound_memory(SOUND)


UNSOUND: dict[str, tuple[Plan, str]] = {
    "overwritten while needed": (
        plan_of([(0, 64), (0, 64), (64, 64)], [run([], [0]), run([], [1]), run([0, 1], [2])], 3),
        "reads buffer b0",
    ),
    "read before written": (plan_of([(0, 64)], [run([0], [])], 1), "never written"),
    "result over operand": (plan_of([(0, 64), (32, 64)], [run([], [0]), run([0], [1])], 2), "which overlap"),
    "two results on each other": (plan_of([(0, 64), (0, 64)], [run([], [0, 1])], 1), "which overlap"),
    "scratch over operand": (plan_of([(0, 64), (0, 64)], [run([], [0]), run([0], [], scratch=1)], 2), "which overlap"),
    "scratch over a live value": (
        plan_of([(0, 64), (0, 64)], [run([], [0]), run([], [], scratch=1), run([0], [])], 3),
        "reads buffer b0",
    ),
    "read in the phase of its write": (
        plan_of([(0, 64)], [run([], [0], barrier=False), run([0], [])], 2),
        "reads buffer b0",
    ),
    "a parallel launch overwrites": (
        plan_of([(0, 64), (0, 64)], [run([], [0]), run([0], [], barrier=False), run([], [1])], 3),
        "at once",
    ),
    "the second turn of the tail misses its input": (
        plan_of([(0, 64), (0, 64)], [run([], [0]), run([0], []), run([], [1])], 1),
        "reads buffer b0",
    ),
    "states shared without a barrier": (
        plan_of([], [run([], [], barrier=False, state=0), run([], [], state=0)], 2),
        "shares a state",
    ),
    "no barrier before the tail": (
        plan_of([], [run([], [], barrier=False), run([], [])], 1),
        "must end with a barrier",
    ),
    "no barrier at the end": (plan_of([], [run([], []), run([], [], barrier=False)], 2), "must end with a barrier"),
    "off the grid": (plan_of([(32, 64)], [run([], [0])], 1), "misaligned"),
    "too small": (
        msgspec.structs.replace(
            SOUND, buffers=(msgspec.structs.replace(SOUND.buffers[0], nbytes=8), *SOUND.buffers[1:])
        ),
        "needs 64",
    ),
    "outside the arena": (msgspec.structs.replace(SOUND, arena_bytes=128), "leaves the arena"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_plans_are_found(case: str) -> None:
    plan, message = UNSOUND[case]
    assert any(message in problem for problem in memory_problems(plan)), memory_problems(plan)
    with pytest.raises(BuildError, match="unsound"):
        require_sound_memory(plan)


def moved(change: Callable[[int], int], index: int) -> Plan:
    plan = tiny_engine("llama", num_hidden_layers=1).lowered.plan
    buffers = list(plan.buffers)
    buffers[index] = msgspec.structs.replace(buffers[index], offset=change(buffers[index].offset))
    return msgspec.structs.replace(plan, buffers=tuple(buffers))


def test_real_plans_notice_a_moved_buffer() -> None:
    """Put any buffer over any other that is alive at the same time, and the checker says so."""
    plan = tiny_engine("llama", num_hidden_layers=1).lowered.plan
    assert memory_problems(plan) == []
    found = 0
    for index in range(len(plan.buffers)):
        for other in plan.buffers:
            if other is not plan.buffers[index]:
                found += bool(memory_problems(moved(lambda _, o=other.offset: o, index)))  # type: ignore[misc]
    assert found > len(plan.buffers)
    deeper = tiny_engine("llama", num_hidden_layers=4).lowered.plan  # layers use the same memory in turns
    assert deeper.arena_bytes < sum(b.nbytes for b in deeper.buffers) / 3
