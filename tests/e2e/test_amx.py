"""A whole engine whose GEMMs run on emulated AMX tiles, under the native driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton import LLM, SamplingParams
from pelton.builder.target import CPU_SKUS
from pelton.inflight_batcher import SchedulerConfig
from pelton.runtime.drivers.cpu.host import host_features
from pelton.runtime.format.container import EngineFile
from tests.kernels.amx import EMULATED_AMX, HAS_TILES, TRAPPED_AMX, tile_instructions

PLAIN = "x86-64-v4+vnni+bf16"
IDS = [(37 * i + 11) % 300 for i in range(75)]
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=8, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def skus() -> Iterator[None]:
    """Targets that only tests may name."""
    if not set(CPU_SKUS[PLAIN].features) <= host_features():
        pytest.skip("this CPU has no avx512_bf16")
    with pytest.MonkeyPatch.context() as patch:
        for sku in (EMULATED_AMX, TRAPPED_AMX):
            patch.setitem(CPU_SKUS, sku.name, sku)
        yield


@pytest.fixture(scope="module")
def build(tiny: Callable[..., Path], engines: Callable[..., Path]) -> Callable[[str], Path]:
    """build(SKU): a tiny model with dims that are no multiples of a tile's."""
    checkpoint = tiny("llama", kv_heads=2, hidden_size=104, intermediate_size=200, head_dim=26)
    return lambda sku: engines(checkpoint, dtype="bfloat16", target=(sku,), max_batch_size=67)


@pytest.fixture(scope="module")
def alone(build: Callable[[str], Path]) -> Any:
    with LLM(build(EMULATED_AMX.name), threads=1) as llm:
        return run(llm, [IDS])


def run(llm: Any, prompts: list[list[int]]) -> Any:
    """Tokens and logprobs of the first prompt, exact; the others are its mates."""
    mates = SamplingParams(temperature=1.0, seed=99, max_tokens=5, ignore_eos=True)
    params = [PARAMS] + [mates] * (len(prompts) - 1)
    choice = llm.generate([{"prompt_token_ids": p} for p in prompts], params)[0].outputs[0]
    return choice.token_ids, [sorted((t, e.logprob) for t, e in step.items()) for step in choice.logprobs]


def test_its_gemms_are_the_amx_ones(build: Callable[[str], Path]) -> None:
    for sku in (EMULATED_AMX.name, "sapphirerapids"):
        engine = EngineFile.open(build(sku), verify_weights="off")
        try:
            kernels = {kernel.kernel for kernel in engine.plan(f"cpu:{sku}").kernels}
        finally:
            engine.close()
        assert {name for name in kernels if "gemm" in name} == {"cpu.gemm.amx_bf16"}


def test_close_to_the_dot_product_on_vectors(build: Callable[[str], Path]) -> None:
    """Same weights, another order of sums: KL of the next token's distribution."""
    distributions = []
    for sku in (PLAIN, EMULATED_AMX.name):
        with LLM(build(sku)) as llm:
            logits = llm.logits(IDS).astype(np.float64)
            logits -= logits.max(axis=-1, keepdims=True)
            distributions.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    plain, amx = distributions
    assert not np.array_equal(plain, amx), "the same code ran twice"
    assert float((np.exp(plain) * (plain - amx)).sum(axis=-1).max()) < 1e-3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mates", [1, 3, 16, 40])
def test_mates_change_no_bit(build: Callable[[str], Path], alone: Any, mates: int, threads: int) -> None:
    prompts = [IDS] + [IDS[i : i + 1 + (5 * i) % 23] for i in range(1, mates + 1)]
    with LLM(build(EMULATED_AMX.name), threads=threads) as llm:
        assert run(llm, prompts) == alone


@pytest.mark.parametrize("chunk", [1, 7, 33, 64])
def test_chunks_change_no_bit(build: Callable[[str], Path], alone: Any, chunk: int) -> None:
    with LLM(build(EMULATED_AMX.name), threads=2, scheduler=SchedulerConfig(max_num_tokens=chunk)) as llm:
        assert run(llm, [IDS]) == alone


def test_the_instructions_themselves(build: Callable[[str], Path], alone: Any) -> None:
    """The engine's real tile instructions; where trapped, by a signal handler. (Workers but 0 block signals.)"""
    with tile_instructions() as library, LLM(build(TRAPPED_AMX.name), threads=1) as llm:
        before = library.amx_trap_count()
        assert run(llm, [IDS]) == alone
        assert HAS_TILES or library.amx_trap_count() > before
