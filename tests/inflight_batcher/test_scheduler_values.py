"""The scheduler's right values: what users of TensorRT-LLM's policies count on."""

from __future__ import annotations

import pytest

from pelton.inflight_batcher import CapacityPolicy, ChunkPolicy, SamplingParams, SchedulerConfig
from pelton.inflight_batcher.block_pool import BlockPool
from pelton.inflight_batcher.chunking import chunk_sizes
from pelton.runtime.errors import RequestError

from .helpers import add, make_loop, run

POLICIES = list(CapacityPolicy)
EQUAL, FCFS = ChunkPolicy.EQUAL_PROGRESS, ChunkPolicy.FIRST_COME_FIRST_SERVED


def two_requests(policy: CapacityPolicy, kv_tokens: int, second_priority: float = 0.5):
    loop = make_loop(kv_tokens // 10, config=SchedulerConfig(capacity_policy=policy), block=10)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    requests = [add(loop, "a", range(10), params), add(loop, "b", range(10, 20), params, second_priority)]
    return loop, requests


@pytest.mark.parametrize("policy", POLICIES)
def test_two_that_fit_run_together(policy: CapacityPolicy) -> None:
    loop, requests = two_requests(policy, 200)
    loop.step()
    assert all(len(r.sequences[0].values.token_ids) == 1 for r in requests)
    assert 1 + run(loop) == 80


def test_guaranteed_no_evict_runs_one_after_the_other() -> None:
    loop, requests = two_requests(CapacityPolicy.GUARANTEED_NO_EVICT, 100)
    assert run(loop) == 160
    assert loop.scheduler.num_preemptions == 0
    assert [len(r.sequences[0].values.token_ids) for r in requests] == [80, 80]


@pytest.mark.parametrize("second_priority", [0.5, 0.9])
def test_max_utilization_pauses_the_lower_rank_and_restarts_it(second_priority: float) -> None:
    loop, requests = two_requests(CapacityPolicy.MAX_UTILIZATION, 100, second_priority)
    kept, paused = requests if second_priority == 0.5 else reversed(requests)
    for _ in range(41):
        loop.step()
        assert len(loop.scheduler.running) == 2
    loop.step()
    assert loop.scheduler.running == kept.sequences
    waiting = paused.sequences[0]
    assert loop.scheduler.waiting == [waiting]
    assert waiting.num_tokens == 51
    assert waiting.num_computed == 0
    assert 42 + run(loop) == 119
    assert loop.scheduler.num_preemptions == 1


def test_static_batch_waits_for_the_whole_batch() -> None:
    config = SchedulerConfig(capacity_policy=CapacityPolicy.STATIC_BATCH, max_batch_size=2)
    loop = make_loop(100, config=config, block=10)
    lengths = [80, 40, 80]
    requests = [
        add(loop, str(i), range(10), SamplingParams(max_tokens=n, ignore_eos=True)) for i, n in enumerate(lengths)
    ]
    for _ in range(80):
        assert not requests[2].sequences[0].values.token_ids
        loop.step()
    assert 80 + run(loop) == 160


def test_static_batch_fills_up_even_when_prompts_exceed_a_step() -> None:
    config = SchedulerConfig(capacity_policy=CapacityPolicy.STATIC_BATCH, max_num_tokens=16)
    loop = make_loop(100, config=config)
    for name in "abcd":
        add(loop, name, range(20))
    loop.step()
    assert len(loop.scheduler.running) == 4
    run(loop)


def test_priority_order_is_stable() -> None:
    loop = make_loop()
    priorities = [None, None, 0.6, 0.6, 0.6, 1, 0.3, 0.3, 0.3, 0.6, 1, None]
    for i, priority in enumerate(priorities):
        add(loop, str(i), [i], priority=0.5 if priority is None else priority)
    order = [int(seq.request.request_id) for seq in loop.scheduler.waiting]
    assert order == [5, 10, 2, 3, 4, 9, 0, 1, 11, 6, 7, 8]


def test_chunked_prompt() -> None:
    loop = make_loop(config=SchedulerConfig(max_chunk_tokens=20))
    seq = add(loop, "a", range(50), SamplingParams(max_tokens=40, ignore_eos=True)).sequences[0]
    positions = []
    for _ in range(3):
        loop.step()
        positions.append(seq.num_computed)
    assert positions == [20, 40, 50]
    assert 3 + run(loop) == 42


@pytest.mark.parametrize(
    ("policy", "unit", "capacity", "expected"),
    [
        (EQUAL, 5, 30, [[15, 15], [25, 25]]),
        (FCFS, 5, 30, [[25, 5], [25, 25]]),
        (EQUAL, 5, 15, [[10, 5], [20, 10], [25, 20], [25, 25]]),
        (FCFS, 5, 15, [[15, 0], [25, 5], [25, 20], [25, 25]]),
        (EQUAL, 20, 20, [[20, 0], [25, 0], [25, 20], [25, 25]]),
        (FCFS, 20, 20, [[20, 0], [25, 0], [25, 20], [25, 25]]),
    ],
)
def test_division_of_prompt_tokens(policy: ChunkPolicy, unit: int, capacity: int, expected: list[list[int]]) -> None:
    done, seen = [0, 0], []
    while done != [25, 25]:
        sizes = chunk_sizes([25 - d for d in done], capacity, unit, policy)
        assert sum(sizes) <= capacity
        done = [d + size for d, size in zip(done, sizes, strict=True)]
        seen.append(done)
    assert seen == expected


def test_both_policies_through_the_scheduler() -> None:
    for policy, expected in ((EQUAL, [15, 15]), (FCFS, [25, 5])):
        config = SchedulerConfig(chunk_policy=policy, chunk_unit=5, max_num_tokens=30)
        loop = make_loop(config=config)
        seqs = [add(loop, name, range(25)).sequences[0] for name in "ab"]
        loop.step()
        assert [seq.num_computed for seq in seqs] == expected
        run(loop)


def test_unit_that_never_fits_is_refused() -> None:
    with pytest.raises(RequestError, match="chunk_unit: 20 tokens never fit a step that takes 10"):
        make_loop(config=SchedulerConfig(chunk_unit=20, max_num_tokens=10))


def test_blocks_of_a_prompt_at_position_0() -> None:
    loop = make_loop(8, block=4)
    seq = add(loop, "a", range(9), SamplingParams(max_tokens=3)).sequences[0]
    batch = loop.scheduler.schedule()
    assert loop.scheduler.kv.groups[0].blocks(seq.slot) == [0, 1, 2]
    assert batch.chunks[0].start == 0
    assert batch.num_tokens == 9


def test_the_last_token_is_never_stored() -> None:
    loop = make_loop(2, block=4)
    add(loop, "a", range(4), SamplingParams(max_tokens=5, ignore_eos=True))  # stores 8 = two blocks
    assert run(loop) == 5
    with pytest.raises(RequestError, match="needs 3 KV blocks of group group0, but the pool has 2"):
        add(loop, "b", range(4), SamplingParams(max_tokens=6))


def test_pool_hands_out_lowest_ids_first_and_counts_holders() -> None:
    pool = BlockPool(3)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    pool.share(0)
    pool.release(0)
    pool.check_integrity([0, 1])
    pool.release(0)
    assert [pool.allocate(), pool.allocate()] == [2, 0]
    assert pool.num_free == 0
    assert pool.num_used == 3
