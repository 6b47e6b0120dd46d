"""Block tables, pool sizing, logit rules, packing: each by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType, FunctionType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pelton.inflight_batcher
from pelton.inflight_batcher import BlockPool, CapacityPolicy, ChunkPolicy, SamplingParams, SchedulerConfig, StepLoop
from pelton.inflight_batcher.bias import LogitRules
from pelton.inflight_batcher.kv_cache import KVCache
from pelton.inflight_batcher.kv_sizing import num_kv_blocks
from pelton.runtime.errors import PeltonError, RequestError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import StateSpec
from pelton.runtime.memory import available_memory
from pelton.runtime.step import FROM_HISTORY, StepInputs

from .fake_driver import FakeDriver, make_plan
from .helpers import add, make_loop, results_of, run


def test_pool_finds_its_own_damage() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.check_integrity([block])
    with pytest.raises(PeltonError, match="block 0 has 0 holders but 1 references"):
        pool.check_integrity([])
    pool.release(block)
    with pytest.raises(PeltonError, match="released more often"):
        pool.release(block)
    with pytest.raises(PeltonError, match="is free and cannot be shared"):
        pool.share(block)
    pool._free.append(block)
    with pytest.raises(PeltonError, match="free twice"):
        pool.check_integrity([])


def cache(windows: tuple[int | None, ...], blocks: int = 20, max_chunk: int = 8) -> KVCache:
    plan = make_plan(block=4, windows=windows, max_seq_len=80)
    return KVCache(plan.kv_groups, [blocks] * len(windows), 4, plan.ranges, max_chunk)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 100])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_peak_of_a_window_is_reached_and_never_passed(window: int, chunk: int) -> None:
    kv = cache((window,), max_chunk=chunk)
    (peak,), most = kv.peak(80), 0
    for start in range(0, 81 - chunk, chunk):
        assert kv.reserve(0, start, start + chunk, 80)
        most = max(most, len(kv.groups[0].blocks(0)))
        assert kv.groups[0].first[0] * 4 <= max(0, start - window + 1)
    assert peak - 1 <= most <= peak  # offsets against the block grid may never meet the worst case
    kv.release(0)
    kv.check_integrity([])


@given(
    windows=st.sampled_from([(1,), (3,), (4,), (9,), (None, 5), (6, 13)]),
    prompt=st.integers(1, 40),
    chunk=st.integers(1, 8),
    blocks=st.integers(3, 20),
)
def test_room_never_hides_work(windows: tuple[int | None, ...], prompt: int, chunk: int, blocks: int) -> None:
    """A prompt in chunks, then decodes: the tables are those of a cache that looks at every step."""
    fast, slow = cache(windows, blocks), cache(windows, blocks)
    start, known = 0, prompt
    while known <= 80:
        end = min(start + chunk, known)
        slow.room = [0] * 4
        fits = fast.reserve(0, start, end, known)
        assert fits == slow.reserve(0, start, end, known)
        for one, other in zip(fast.groups, slow.groups, strict=True):
            assert np.array_equal(one.table, other.table)
        if not fits:
            return
        start = end
        known += end == known


@pytest.mark.parametrize("windows", [(None,), (10,), (None, 10)])
def test_most_steps_of_a_window_need_no_planning(windows: tuple[int | None, ...]) -> None:
    """A block is taken or given back every 16 tokens; in between decodes are planned at once."""
    loop = make_loop(windows=windows)
    seq = add(loop, "a", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)).sequences[0]
    idle = 0
    while loop.has_work:
        idle += seq.slot >= 0 and seq.num_tokens <= loop.scheduler.kv.room[seq.slot]
        loop.step()
    assert idle > 80


def test_reserve_is_all_or_nothing_over_groups() -> None:
    plan = make_plan(block=4, windows=(None, None), max_seq_len=80)
    kv = KVCache(plan.kv_groups, [5, 2], 4, plan.ranges, 8)
    assert not kv.reserve(0, 0, 12, 12)
    assert [group.pool.num_free for group in kv.groups] == [5, 2]
    assert kv.reserve(0, 0, 8, 8)
    assert [group.pool.num_free for group in kv.groups] == [3, 0]
    kv.check_integrity([0])
    with pytest.raises(PeltonError, match="slot 0 is idle but holds blocks"):
        kv.check_integrity([])


@pytest.mark.parametrize("tokens", [8, 9, 11, 12])
def test_fork_shares_full_blocks_and_copies_the_last(tokens: int) -> None:
    kv = cache((None, 5))
    assert kv.reserve(0, 0, 14, 14)
    copies = kv.fork(0, 1, tokens)
    donor, child = kv.groups[0].blocks(0), kv.groups[0].blocks(1)
    full = tokens // 4
    assert child[:full] == donor[:full]
    assert [(c.group, c.source) for c in copies] == ([] if tokens % 4 == 0 else [(0, donor[full]), (1, full)])
    assert all(kv.groups[c.group].pool._refs[c.target] == 1 for c in copies)
    assert kv.groups[1].first[1] == (tokens - 4) // 4
    kv.check_integrity([0, 1])
    kv.release(0)
    kv.release(1)
    kv.check_integrity([])


def test_fork_needs_what_the_window_still_sees() -> None:
    kv = cache((5,))
    assert kv.reserve(0, 0, 12, 12)
    assert kv.can_fork(0, 11)
    assert not kv.can_fork(0, 13)  # not stored yet
    kv.groups[0].trim(0, 16)
    assert not kv.can_fork(0, 11)  # position 7 is gone


# --- sizing -------------------------------------------------------------------------------------------------------


def sizes(**options: int) -> tuple[int, ...]:
    driver = FakeDriver(make_plan(windows=(None, 32), max_tokens=32))
    config = SchedulerConfig().resolve(driver.plan.ranges)
    return num_kv_blocks(driver, config, **options)


def test_pool_size() -> None:
    # 8 sequences of 256 tokens are 16 blocks each; a window of 32 and chunks of 32 span at most 5.
    assert sizes(available_bytes=1 << 40) == (128, 40)
    assert sizes(max_kv_tokens=100) == (6, 6)
    whole = (128 + 40) * 16384
    assert sizes(available_bytes=whole) == (64, 20)  # half of the memory
    assert sizes(available_bytes=0) == (16, 5)  # one sequence always fits
    assert sizes(kv_cache_bytes=whole // 4) == (32, 10)
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_kv_tokens": 15}, "max_kv_tokens: got 15; allowed: at least one block of 16 tokens"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes: got 1000; allowed: at least 32768"),
        ({"max_kv_tokens": 64, "kv_cache_bytes": 1 << 20}, "give one of them"),
    ],
)
def test_bad_pool_size(options: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizes(**options)


# --- logit rules --------------------------------------------------------------------------------------------------


def test_logit_rules() -> None:
    rules = LogitRules({5: 2.0, 6: 1.0}, [6, 7], 2, [(8,), (1, 2, 3)])
    inf = -np.inf

    def at(count: int, *tokens: int) -> dict[int, float]:
        ids, values = rules.at(count, tokens)
        assert (ids.dtype, values.dtype) == (np.int32, np.float32)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    assert at(0) == {5: 2.0, 6: inf, 7: inf, 8: inf}
    assert at(2, 0, 1) == {5: 2.0, 6: 1.0, 8: inf}
    assert at(2, 1, 2) == {5: 2.0, 6: 1.0, 8: inf, 3: inf}
    assert at(4, 9, 9, 1, 2)[3] == inf
    assert rules.needs_values
    assert not rules.empty
    assert LogitRules({}, [], 3, []).empty
    assert not LogitRules({1: 1.0}, [2], 3, [[4]]).needs_values


# --- steps in flight ----------------------------------------------------------------------------------------------


def test_bad_words_wait_for_values_at_depth_2() -> None:
    params = SamplingParams(max_tokens=12, bad_words=[[97, 98, 99]], ignore_eos=True)
    script = {112: [*b"abcabcabcabc"]}
    got = [results_of([[112]], params, depth=depth, script=script) for depth in (1, 2)]
    assert got[0] == got[1]
    assert b"abc" not in bytes(got[0][0][:12])


def test_parameters_of_a_slot_are_never_stale() -> None:
    """One slot, used in turn by requests of different parameters, at every parity of steps in flight."""
    config = SchedulerConfig(max_batch_size=1)
    prompts = [[i, i + 1] for i in range(8)]
    params = [SamplingParams(max_tokens=3 + i % 3, seed=i, ignore_eos=True) for i in range(8)]
    together = results_of(prompts, params, depth=2, config=config)
    assert together == [results_of([p], [q])[0] for p, q in zip(prompts, params, strict=True)]


def test_a_preempted_sequence_waits_for_its_last_values() -> None:
    loop = make_loop(config=SchedulerConfig(capacity_policy=CapacityPolicy.MAX_UTILIZATION))
    seq = add(loop, "a", [1, 2, 3]).sequences[0]
    loop.scheduler.schedule()
    loop.scheduler._preempt(seq)
    assert not loop.scheduler.schedule().chunks
    seq.in_flight = 0
    seq.values.append(7, last=False)
    chunk = loop.scheduler.schedule().chunks[0]
    assert (chunk.start, chunk.count, seq.known.tolist()) == (0, 4, [1, 2, 3, 7])


def test_decodes_read_the_history_and_prompts_are_explicit() -> None:
    loop = make_loop()
    add(loop, "a", [5, 6], SamplingParams(ignore_eos=True))
    first = loop._arrays.pack(loop.scheduler.schedule())
    assert first.token_ids.tolist() == [5, 6]
    second = loop._arrays.pack(loop.scheduler.schedule())
    assert second.token_ids.tolist() == [FROM_HISTORY]
    assert second.positions.tolist() == [2]


@pytest.mark.parametrize("depth", [1, 2])
def test_arrays_are_found_again_while_the_same_sequences_decode(depth: int) -> None:
    loop = make_loop(depth=depth)
    forever = SamplingParams(ignore_eos=True, max_tokens=60)
    for name, prompt in (("a", [5, 6]), ("b", [7])):
        add(loop, name, prompt, forever)

    def pack() -> tuple[StepInputs, list[int]]:
        inputs = loop._arrays.pack(loop.scheduler.schedule())
        return inputs, inputs.positions.tolist()

    steps = [pack() for _ in range(1 + 3 * depth)]
    decodes = [inputs for inputs, _ in steps[1:]]
    assert len({id(inputs) for inputs in decodes}) == depth
    assert [positions for _, positions in steps[1:]] == [[2 + i, 1 + i] for i in range(3 * depth)]
    loop.abort("a")
    inputs, positions = pack()
    assert positions == [1 + 3 * depth]
    assert all(inputs is not other for other in decodes)
    add(loop, "c", [8, 9], forever)
    assert pack()[1] == [2 + 3 * depth, 0, 1]


@pytest.mark.parametrize("waiting", [0, 1])
def test_arrays_are_found_again_past_a_block_and_with_a_queue(waiting: int) -> None:
    loop = make_loop(max_batch=2, block=16)
    forever = SamplingParams(ignore_eos=True, max_tokens=60)
    for index in range(2 + waiting):
        add(loop, f"{index}", [5] * (1 + 4 * index), forever)
    loop._arrays.pack(loop.scheduler.schedule())
    decodes = [loop._arrays.pack(loop.scheduler.schedule()) for _ in range(40)]
    assert len(loop.scheduler.waiting) == waiting
    assert len({id(inputs) for inputs in decodes}) == 1
    assert decodes[0].positions.tolist() == [40, 44]  # of the last step
    tables = loop.scheduler.kv.groups[0].table
    assert decodes[0].block_tables[0].tolist() == tables[decodes[0].seq_slots].tolist()


def test_aborted_while_in_flight_brings_nothing() -> None:
    loop = make_loop(depth=2)
    request = add(loop, "a", [1, 2], SamplingParams(ignore_eos=True))
    keep = add(loop, "b", [3, 4], SamplingParams(ignore_eos=True))
    assert loop.step() == []
    loop.abort("a")
    loop.abort("unknown")
    assert all(event.request_id == "b" for event in loop.step())
    run(loop)
    assert request.sequences[0].values.token_ids == []
    assert request.sequences[0].values.finish_reason == "abort"
    assert len(keep.sequences[0].values.token_ids) == 16


def test_other_state_than_kv_forbids_sharing() -> None:
    plan = make_plan()
    assert make_loop().scheduler._can_fork
    state = StateSpec(name="conv", kind="slot", dtype=DType.F32, shape=(4,))
    loop = StepLoop(FakeDriver(msgspec.structs.replace(plan, states=(*plan.states, state))), (9,))
    assert not loop.scheduler._can_fork


def test_a_leak_is_found_when_idle() -> None:
    loop = make_loop()
    add(loop, "a", [1], SamplingParams(max_tokens=2, ignore_eos=True))
    loop.step()
    loop.scheduler.kv.groups[0].pool.allocate()
    with pytest.raises(PeltonError, match=r"idle, but blocks \{'group0': 1\}"):
        loop.step()


def test_ids_in_use_are_refused() -> None:
    loop = make_loop()
    add(loop, "a", [1])
    with pytest.raises(PeltonError, match="'a' is in use"):
        add(loop, "a", [2])
    run(loop)
    add(loop, "a", [3])
    run(loop)


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens"])
def test_limits_beyond_the_engine_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"--{name.replace('_', '-')}"):
        make_loop(config=SchedulerConfig(**{name: 100000}))


def test_policies_by_name() -> None:
    """A policy may be given by its value, and then means all that the member means."""
    ranges = make_plan().ranges
    named = SchedulerConfig(capacity_policy="static_batch", chunk_policy="equal_progress")  # type: ignore[arg-type]
    members = SchedulerConfig(capacity_policy=CapacityPolicy.STATIC_BATCH, chunk_policy=ChunkPolicy.EQUAL_PROGRESS)
    assert named.resolve(ranges) == members.resolve(ranges)
    assert named.resolve(ranges).chunk_unit == ranges.tokens_per_block
    for name in ("capacity_policy", "chunk_policy"):
        with pytest.raises(RequestError, match=f"{name}: got 'fair'; allowed: .*, "):
            SchedulerConfig(**{name: "fair"}).resolve(ranges)


def test_serving_imports_no_builder_and_no_torch() -> None:
    code = (
        "import sys, pelton.inflight_batcher\n"
        "banned = ('torch', 'transformers', 'pelton.builder')\n"
        "sys.exit(' '.join(m for m in sys.modules if m.startswith(banned)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_driver_is_told_what_a_decode_step_goes_through() -> None:
    """Every function of pelton that runs in one, and nothing that does not; kernels displace them from the caches."""
    loop = make_loop()
    add(loop, "a", [3, 4], SamplingParams(max_tokens=12, ignore_eos=True))
    for _ in range(4):
        loop.step()
    seen = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(pelton.inflight_batcher.__file__).parent in Path(frame.f_code.co_filename).parents:
            seen.add(frame.f_code)

    sys.setprofile(watch)
    try:
        loop.step()
    finally:
        sys.setprofile(None)
    assert isinstance(loop.driver, FakeDriver)
    told = {item.__code__ for item in loop.driver.near if isinstance(item, FunctionType)}
    assert seen == told
