"""A request's tokens and logprobs, bit for bit: alone, with mates, in chunks, with more threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pelton import LLM, SamplingParams
from pelton.inflight_batcher import SchedulerConfig
from tests.e2e.conftest import ESSAY

PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=12, logprobs=5, ignore_eos=True)


def fingerprint(output: Any) -> tuple[Any, ...]:
    """Token ids and every logprob of the first choice, exact."""
    choice = output.outputs[0]
    return tuple(choice.token_ids), tuple(
        tuple(sorted((token, entry.logprob) for token, entry in step.items())) for step in choice.logprobs
    )


def run(llm: Any, prompts: Sequence[list[int]]) -> list[tuple[Any, ...]]:
    mates = SamplingParams(temperature=1.0, seed=99, max_tokens=9, ignore_eos=True)
    params = [PARAMS] + [mates] * (len(prompts) - 1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [fingerprint(outputs[0])]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, smollm2: Path, engines: Callable[..., Path]) -> Path:
    return engines(smollm2, dtype=request.param, max_batch_size=67)


@pytest.fixture(scope="module")
def ids(engine: Path) -> list[int]:
    with LLM(engine) as llm:
        return list(llm.tokenizer.encode(ESSAY))


@pytest.fixture(scope="module")
def alone(engine: Path, ids: list[int]) -> tuple[Any, ...]:
    with LLM(engine, threads=1) as llm:
        return run(llm, [ids[:130]])[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mates", [1, 2, 3, 7, 16, 31, 66])
def test_mates(engine: Path, ids: list[int], alone: tuple[Any, ...], mates: int, threads: int) -> None:
    prompts = [ids[:130]] + [ids[3 * i : 3 * i + 1 + (5 * i) % 23] for i in range(1, mates + 1)]
    with LLM(engine, threads=threads) as llm:
        assert run(llm, prompts)[0] == alone


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks(engine: Path, ids: list[int], alone: tuple[Any, ...], chunk: int, threads: int) -> None:
    with LLM(engine, threads=threads, scheduler=SchedulerConfig(max_num_tokens=chunk)) as llm:
        assert run(llm, [ids[:130]])[0] == alone
