"""Tactics: which ones are offered, what they are timed on, and how timings decide."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.builder.kernels import KernelCall, KernelRegistry
from pelton.builder.ops.fused import Gemm, PagedAttention
from pelton.builder.tactics import NOISE, Tunable, Workload, fastest, label, tactic_of, variants_of, workloads
from pelton.builder.target import CPU_SKUS, Target
from pelton.plugins import KERNELS
from pelton.plugins.attention.cpu import AttentionTactic
from pelton.plugins.gemm.tactics import TILE_DEPTH, AmxTactic, GemmTactic
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import Ranges
from pelton.runtime.format.tensor_type import TOKEN_TYPE, TensorType

RANGES = Ranges(
    max_batch_size=8,
    max_num_tokens=100,
    max_seq_len=64,
    opt_num_tokens=8,
    max_logits_rows=8,
    logits_chunk=4,
    tokens_per_block=16,
    max_logprobs=0,
)
KINDS = (DType.BF16, DType.F16, DType.F32)


def gemm_call(n: int, k: int, compute: DType = DType.BF16, rows: str = "T", **ranges: int) -> KernelCall:
    op = Gemm(n, compute, DType.F32)
    x, w = TensorType(DType.F32, (rows, k)), TensorType(compute, (n, k), "panel16")
    return KernelCall(op, (x, w), op.infer(x, w), (), msgspec.structs.replace(RANGES, **ranges))


def attention_call(heads: int, kv_heads: int, dim: int = 64, **ranges: int) -> KernelCall:
    kind = DType.BF16
    op = PagedAttention("", heads, kv_heads, dim, 0.125, None, None, kind, kind, kind)
    q = TensorType(kind, ("T", heads, dim))
    return KernelCall(op, (q, TOKEN_TYPE), op.infer(q, TOKEN_TYPE), ("kv",), msgspec.structs.replace(RANGES, **ranges))


# --- candidates ----------------------------------------------------------------------------------------------------


@given(k=st.integers(1, 60000), kind=st.sampled_from(KINDS), bits=st.sampled_from((256, 512)), widened=st.booleans())
def test_gemm_candidates_fit_registers_and_caches(k: int, kind: DType, bits: int, widened: bool) -> None:
    candidates = GemmTactic.candidates(k, kind, bits, 2048, widened=widened)
    assert candidates[0] == GemmTactic.choose(k, kind, bits, widened=widened)
    assert len(set(candidates)) == len(candidates) > 3
    each, registers, l2 = (1, 32, 1 << 20) if bits == 512 else (2, 16, 512 << 10)
    for tactic in candidates:
        m, p = tactic.tile_rows, tactic.tile_panels
        # Sums and a panel's operands; the row's value may come from memory.
        assert (m * p + p) * each <= registers
        assert 2 * p * tactic.block_steps * 64 <= l2 * 3 // 4
        assert tactic.block_steps >= 1
        assert p == 1 or p % 2 == 0  # gate and up panels stay together


@given(heads=st.integers(1, 80), bits=st.sampled_from((256, 512)), widened=st.booleans())
def test_attention_candidates_fit_registers(heads: int, bits: int, widened: bool) -> None:
    candidates = AttentionTactic.candidates(heads, bits, widened=widened)
    assert candidates[0] == AttentionTactic.choose(heads, bits, widened=widened)
    assert len(set(candidates)) == len(candidates) > 2
    each, registers = (1, 32) if bits == 512 else (2, 16)
    for tactic in candidates:
        rows, panels = max(tactic.block_rows, tactic.head_rows), tactic.block_panels
        assert (rows * panels + panels) * each <= registers
        assert 1 <= tactic.tile_heads <= heads
        assert 1 <= tactic.tile_queries * tactic.tile_heads <= 64


@given(k=st.integers(1, 60000))
def test_candidates_on_tiles_fit_l2(k: int) -> None:
    candidates = AmxTactic.candidates(k, 2048)
    assert candidates[0] == AmxTactic.choose(k)
    assert len(set(candidates)) == len(candidates) > 2
    for tactic in candidates:
        assert tactic.block_steps >= 1
        # In L2 (2 MiB): a block of k of the rows, their sums, and two pairs of panels.
        sums = tactic.batch_pairs * tactic.super_rows * 128 if tactic.block_steps < -(-k // TILE_DEPTH) else 0
        assert tactic.super_rows * tactic.block_steps * 64 <= 2 << 20
        assert sums <= 1 << 20
        assert 4 * tactic.block_steps * 1024 <= 256 << 10
    model = candidates[0]
    assert model.super_rows * model.block_steps * 64 <= 1 << 20
    steps = -(-k // TILE_DEPTH)
    blocks = -(-steps // model.block_steps)
    assert blocks * model.block_steps - steps < blocks, "blocks are not about equal"


def test_super_rows_are_varied_only_where_there_are_so_many() -> None:
    few = GemmTactic.candidates(64, DType.BF16, 512, 128)
    assert {t.super_rows for t in few} == {256}
    assert {t.super_rows for t in GemmTactic.candidates(64, DType.BF16, 512, 200)} == {256, 128}


@pytest.mark.parametrize("sku", CPU_SKUS)
@pytest.mark.parametrize("call", [gemm_call(48, 64), attention_call(9, 3)], ids=["gemm", "attention"])
def test_variants_are_the_kernel_with_other_tactics(sku: str, call: KernelCall) -> None:
    target = Target("cpu", CPU_SKUS[sku])
    kernel = KernelRegistry(KERNELS).select(call, target)
    variants = variants_of(kernel, call, target)
    assert {v.name for v in variants} == {kernel.name}
    labels = [label(tactic_of(v, call, target)) for v in variants]
    assert len(set(labels)) == len(labels)
    assert tactic_of(kernel, call, target) == asdict(variants[0].tactic)
    # A variant is settled: it has no variants but itself, and as first choice emits what the plain kernel does.
    assert all(variants_of(v, call, target) == (v,) for v in variants)
    assert variants[0].emit(call, target, "f") == kernel.emit(call, target, "f")
    assert len({v.emit(call, target, "f") for v in variants}) == len(variants)


def test_other_kernels_have_no_tactic() -> None:
    untuned = [k for k in KERNELS if not isinstance(k, Tunable)]
    assert untuned
    assert all(variants_of(k, gemm_call(16, 16), Target("reference")) == () for k in untuned)


# --- workloads -----------------------------------------------------------------------------------------------------


def test_workloads_of_a_gemm() -> None:
    assert workloads(gemm_call(16, 16)) == (Workload((8,)), Workload((64, 36)))
    assert workloads(gemm_call(16, 16, opt_num_tokens=100)) == (Workload((64, 36)),)
    assert workloads(gemm_call(16, 16, rows="C")) == (Workload((4,)),)


def test_workloads_of_attention() -> None:
    assert workloads(attention_call(4, 2)) == (Workload((1,) * 8, 63), Workload((64, 36)))
    long: dict[str, Any] = {"max_seq_len": 1 << 20, "opt_num_tokens": 8}
    assert workloads(attention_call(4, 2, **long))[0] == Workload((1,) * 8, 1023)
    # 256 MiB of keys and values are the most, at least one block a sequence.
    many: dict[str, Any] = {"max_batch_size": 4096, "max_num_tokens": 4096, "opt_num_tokens": 4096}
    (decode, _) = workloads(attention_call(64, 64, 128, max_seq_len=4096, **many))
    assert decode == Workload((1,) * 4096, 15)


def test_workloads_read_well() -> None:
    texts = [str(Workload((2048,))), str(Workload((1, 1), 9)), str(Workload((1,), 9))]
    assert texts == ["2048 tokens", "2 tokens of 2 sequences after 9", "1 tokens after 9"]


# --- choosing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ([[1.0]], 0),
        ([[1.0], [1.0]], 0),
        ([[1.0], [1 - NOISE]], 0),
        ([[1.0], [0.97]], 1),
        ([[1.0], [0.97], [0.96]], 2),
        ([[1.0], [0.9], [0.9]], 1),
        ([[1.0, 10.0], [0.9, 10.5]], 1),  # the mean of shares counts, not the sum of seconds
        ([[1.0, 10.0], [0.9, 11.2]], 0),
    ],
)
def test_fastest(seconds: list[list[float]], best: int) -> None:
    assert fastest(seconds) == best


@given(st.lists(st.lists(st.floats(1e-7, 10.0), min_size=2, max_size=2), min_size=1, max_size=9))
def test_the_model_is_left_only_for_something_clearly_faster(seconds: list[list[float]]) -> None:
    best = fastest(seconds)
    if best:
        share = (seconds[best][0] / seconds[0][0] * seconds[best][1] / seconds[0][1]) ** 0.5
        assert share < 1 - NOISE + 1e-9
