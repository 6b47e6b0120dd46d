"""A request's tokens do not depend on mates, chunks, preemption, forks or steps in flight."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.inflight_batcher import CapacityPolicy, ChunkPolicy, SamplingParams, SchedulerConfig, Sequence, StepLoop

from .helpers import add, make_loop, run

#: Which tokens are banned depends on the token before.
BAD_WORDS = [[3], *([a, b] for a in range(0, 300, 2) for b in range(a % 16, 300, 16))]
WINDOWS: list[tuple[int | None, ...]] = [(None,), (20,), (None, 7)]


def workload(seed: int, count: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts and parameters of many kinds."""
    rng = random.Random(seed)
    items = []
    for i in range(count):
        prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 2, 15, 16, 17, 31, 33, 60, 100])))
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 3]),
            seed=1000 * i,
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.choice([0, 1, 2, 16, 40]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            bad_words=rng.choice([None, None, BAD_WORDS]),
            ignore_eos=rng.random() < 0.5,
        )
        if params.max_tokens and rng.random() < 0.3:
            params = replace(params, min_tokens=rng.randrange(params.max_tokens + 1))
        items.append((prompt, params))
    return items


def results(items, blocks, depth=1, config=None, **plan):
    loop = make_loop(blocks, config=config, depth=depth, **plan)
    requests = [add(loop, str(i), *item) for i, item in enumerate(items)]
    run(loop)
    return [summary(request) for request in requests], loop


def summary(request):
    values = [seq.values for seq in request.sequences]
    return [(v.token_ids, v.text, v.logprobs, v.finish_reason, v.stop_reason) for v in values], request.prompt_logprobs


@cache
def alone(seed: int, count: int, windows: tuple[int | None, ...]):
    """Each request by itself, its prompt in one step."""
    plan = {"max_tokens": 256, "rows": 256, "windows": windows}
    return [results([item], 200, **plan)[0][0] for item in workload(seed, count)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(chunk: int, windows: tuple[int | None, ...]) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk)
    got, _ = results(workload(1, 12), 100, config=config, windows=windows)
    assert got == alone(1, 12, windows)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight(depth: int, windows: tuple[int | None, ...]) -> None:
    got, _ = results(workload(2, 12), 100, depth=depth, windows=windows)
    assert got == alone(2, 12, windows)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_in_a_tight_pool(depth: int, windows: tuple[int | None, ...]) -> None:
    config = SchedulerConfig(capacity_policy=CapacityPolicy.MAX_UTILIZATION, max_chunk_tokens=16)
    kinds = [{}, {"repetition_penalty": 1.2}, {"n": 2}, {"min_tokens": 30}, {"bad_words": BAD_WORDS}]
    items = [
        (tuple(range(i, i + 20 + i)), SamplingParams(seed=i, max_tokens=60, logprobs=0, **kinds[i % 5]))
        for i in range(10)
    ]
    expected = [results([item], 200, windows=windows)[0][0] for item in items]
    got, loop = results(items, 8, depth=depth, config=config, windows=windows)
    assert got == expected
    assert loop.scheduler.num_preemptions > 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 3),
    blocks=st.integers(9, 60),
    policy=st.sampled_from(CapacityPolicy),
    chunking=st.sampled_from(ChunkPolicy),
    chunk=st.integers(1, 40),
    tokens=st.integers(1, 40),
    batch=st.integers(1, 8),
    rows=st.integers(1, 12),
    depth=st.integers(1, 3),
    windows=st.sampled_from(WINDOWS),
)
def test_any_limits(seed, blocks, policy, chunking, chunk, tokens, batch, rows, depth, windows) -> None:
    config = SchedulerConfig(
        capacity_policy=policy,
        chunk_policy=chunking,
        max_chunk_tokens=min(chunk, tokens),
        max_num_tokens=tokens,
        max_batch_size=batch,
    )
    got, _ = results(workload(seed, 6), blocks, depth=depth, config=config, rows=rows, windows=windows)
    assert got == alone(seed, 6, windows)


def watch_preemptions(loop: StepLoop) -> list[str]:
    """A list that the ids of requests go to when one of their sequences has to give way."""
    seen: list[str] = []
    preempt = loop.scheduler._preempt

    def watched(seq: Sequence) -> None:
        seen.append(seq.request.request_id)
        preempt(seq)

    loop.scheduler._preempt = watched  # type: ignore[method-assign]
    return seen


def test_a_prompt_in_a_window_takes_blocks_from_decodes_already_planned() -> None:
    """Decodes are planned first; a prompt of higher rank then needs their blocks in the same step."""
    low = [([i] * 8, SamplingParams(max_tokens=40, seed=i, ignore_eos=True)) for i in range(3)]
    high = (list(range(100, 170)), SamplingParams(max_tokens=4, seed=9, ignore_eos=True))
    plan = {"windows": (40,), "block": 4}
    expected = [results([item], 99, **plan)[0][0] for item in [*low, high]]
    config = SchedulerConfig(capacity_policy=CapacityPolicy.MAX_UTILIZATION, max_chunk_tokens=4)
    loop = make_loop(20, config=config, **plan)
    preempted = watch_preemptions(loop)
    requests = [add(loop, str(i), *item) for i, item in enumerate(low)]
    loop.step()
    requests.append(add(loop, "high", *high, priority=1.0))
    run(loop)
    assert [summary(request) for request in requests] == expected
    assert loop.scheduler.num_preemptions == len(preempted) > 0
    assert "high" not in preempted


def test_a_sequence_may_start_and_give_way_in_the_same_step() -> None:
    big = (list(range(100, 170)), SamplingParams(max_tokens=4, seed=9, ignore_eos=True))
    small = ([7, 8, 9], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    plan = {"windows": (38,), "block": 4}
    expected = [results([item], 99, **plan)[0][0] for item in (big, small)]
    config = SchedulerConfig(capacity_policy=CapacityPolicy.MAX_UTILIZATION, max_chunk_tokens=4)
    loop = make_loop(11, config=config, **plan)
    requests = [add(loop, "big", *big)]
    while loop.scheduler.kv.groups[0].pool.num_free > 1:
        loop.step()
    preempted = watch_preemptions(loop)
    requests.append(add(loop, "small", *small))
    loop.step()
    assert preempted == ["small"]
    run(loop)
    assert [summary(request) for request in requests] == expected
