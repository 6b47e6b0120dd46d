"""GEMM kernels: against the op's meaning, and bit for bit over row counts and workers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from pelton.builder.kernels import NoKernelError
from pelton.builder.ops.base import StepContext
from pelton.builder.ops.fused import Gemm
from pelton.plugins.gemm.cpu import AmxTactic, CpuGemm, GemmTactic
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.panels import pack
from pelton.runtime.format.tensor_type import TensorType

from .harness import (
    BEST_OF_VECTORS,
    BF16,
    F16,
    F32,
    GuardedArrays,
    Inputs,
    bits,
    compiled,
    host_skus,
    make_call,
    pack_panel16,
    random_array,
    relative_error,
    sku_params,
)

TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1e-2}


class Case:
    """A gemm with random operands for up to ``rows`` rows."""

    def __init__(self, n: int, k: int, rows: int, x: DType, compute: DType, out: DType, **fields: Any) -> None:
        rng = np.random.default_rng(n * 7 + k)
        gated = bool(fields.get("gated"))
        stored_n = -(-n // 16) * 32 if gated else n
        self.op = Gemm(n, compute, out, **fields)
        weight = random_array(rng, (stored_n, k), compute, k**-0.5)
        self.arrays = [random_array(rng, (rows, k), x), weight]
        types = [TensorType(x, ("T", k)), TensorType(compute, (stored_n, k), "panel16")]
        for flag, shape in (("prologue", (k,)), ("bias", (stored_n,)), ("residual", ("T", n))):
            if fields.get(flag, "none") not in ("none", False):
                self.arrays.append(random_array(rng, tuple(rows if d == "T" else d for d in shape), F32))
                types.append(TensorType(F32, shape))
        self.call = make_call(self.op, *types)
        self.packed = pack_panel16(weight)

    def in_packed12(self) -> Case:
        """The same on a weight of 12 bits an element."""
        other = copy.copy(self)
        x, w, *rest = self.call.inputs
        other.call = dataclasses.replace(self.call, inputs=(x, dataclasses.replace(w, layout="packed12"), *rest))
        other.packed = pack(self.arrays[1], "packed12")
        return other

    def with_odd_values(self, count: int) -> Case:
        """``count`` weights of any size at all, in places that a few outputs and one block of k have most of."""
        rng = np.random.default_rng(count)
        n, k = self.arrays[1].shape
        for i in range(count):
            row = rng.integers(n) if i % 2 else rng.choice([0, n - 1])
            column = rng.integers(k) if i % 3 else rng.choice([0, k - 1, rng.integers(8, 16)])
            self.arrays[1][row, column] = rng.standard_normal() * 10.0 ** rng.integers(-44, 3)
        self.packed = pack_panel16(self.arrays[1])
        return self

    def operands(self, rows: slice) -> list[np.ndarray]:
        x, w, *rest = self.arrays
        return [x[rows], w, *(a[rows] if a.ndim == 2 else a for a in rest)]

    def run(self, sku: str, rows: slice, workers: int = 1, tactic: GemmTactic | AmxTactic | None = None) -> np.ndarray:
        operands = [np.ascontiguousarray(a) for a in self.operands(rows)]
        operands[1] = self.packed
        kernel = None
        if tactic is not None:
            chosen = compiled(self.call, sku).kernel
            assert isinstance(chosen, CpuGemm)
            kernel = dataclasses.replace(chosen, tactic=tactic)
        run = compiled(self.call, sku, kernel)
        return run(*operands, step=Inputs(operands[0].shape[0]), workers=workers)[0]

    def reference(self, rows: slice) -> np.ndarray:
        context = StepContext.__new__(StepContext)
        return self.op.reference(context, *self.operands(rows))[0]


CASES = {
    "plain_f32": Case(48, 64, 67, F32, F32, F32),
    "odd_f32": Case(37, 35, 67, F32, F32, F32, bias=True, residual=True),
    "norm_f32": Case(80, 100, 67, F32, F32, F32, prologue="rms_norm", eps=1e-5, activation="silu", gated=True),
    "direct_bf16": Case(64, 96, 67, BF16, BF16, F32, residual=True),
    "crowded_bf16": Case(48, 1024, 67, BF16, BF16, F32),  # rows a multiple of 2 KiB apart
    "odd_bf16": Case(50, 77, 67, F32, BF16, BF16, bias=True, activation="gelu_tanh"),
    "gated_bf16": Case(72, 130, 67, F32, BF16, BF16, prologue="rms_norm", eps=1e-6, activation="silu", gated=True),
    "gated_bias_f16": Case(40, 61, 67, F32, F16, F16, bias=True, activation="gelu_erf", gated=True),
    "head_f16": Case(129, 64, 67, F16, F16, F32, softcap=30.0, scale=0.5),
    "cast_bf16": Case(33, 256, 67, F16, BF16, F32, activation="relu"),
    "long_f32": Case(32768, 24, 67, F32, F32, F32, bias=True),  # outputs go past the caches
    "long_bf16": Case(32784, 40, 67, F32, BF16, F32, softcap=30.0),
}


@pytest.mark.parametrize(("name", "sku"), [p for n, c in CASES.items() for p in sku_params(c.op.compute, n)])
def test_matches_reference_and_never_depends_on_rows_or_workers(name: str, sku: str) -> None:
    case = CASES[name]
    whole = case.run(sku, slice(0, 67))
    assert relative_error(whole, case.reference(slice(0, 67))) < TOLERANCE[case.op.compute]
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 66):
        start = 67 - rows
        assert bits(case.run(sku, slice(start, 67), workers=1 + rows % 3)) == bits(whole[start:]), rows
    for workers in (2, 3):
        assert bits(case.run(sku, slice(0, 67), workers=workers)) == bits(whole)


@pytest.mark.parametrize("name", ["odd_f32", "gated_bf16", "odd_bf16", "gated_bias_f16"])
@pytest.mark.parametrize(
    "tactic",
    [GemmTactic(6, 4, 16, 1000), GemmTactic(4, 2, 8, 5), GemmTactic(3, 1, 9, 1), GemmTactic(8, 4, 256, 33)],
    ids=lambda t: f"{t.tile_rows}x{t.tile_panels}-{t.super_rows}-{t.block_steps}",
)
def test_never_depends_on_the_tactic(name: str, tactic: GemmTactic) -> None:
    case, sku = CASES[name], BEST_OF_VECTORS
    whole = case.run(sku, slice(0, 67))
    for rows, workers in ((67, 1), (67, 3), (9, 2), (20, 2), (5, 1)):
        assert bits(case.run(sku, slice(0, rows), workers, tactic)) == bits(whole[:rows]), (rows, workers)


@pytest.mark.parametrize(("name", "sku"), [*sku_params(BF16, "gated_bf16"), *sku_params(F32, "odd_f32")[:1]])
def test_every_candidate_gives_the_same_bits(name: str, sku: str) -> None:
    case = CASES[name]
    chosen = compiled(case.call, sku)
    assert isinstance(chosen.kernel, CpuGemm)
    whole = case.run(sku, slice(0, 67))
    for variant in chosen.kernel.variants(case.call, chosen.target):
        for rows in (1, 5, 9, 13, 16, 17, 24, 67):
            assert bits(case.run(sku, slice(0, rows), 2, variant.tactic)) == bits(whole[:rows]), (variant, rows)


def full_list() -> Case:
    """As many exceptions in one half of a panel as its list holds (15), and the table full of other bytes."""
    case = Case(32, 480, 67, BF16, BF16, F32)
    weight = np.where(case.arrays[1] > 0, np.float32(1), np.float32(-1.5))
    for i in range(14):
        weight[16:, 7 * i : 7 * i + 2] = 2.0 ** (4 * i + 4)
    for i in range(15):
        weight[i, 450 + i] = 2.0 ** (-4 * i - 4)
    case.arrays[1] = weight.astype(BF16.numpy)
    case.packed = pack_panel16(case.arrays[1])
    return case


PACKED_CASES = {
    "residual": Case(64, 96, 67, BF16, BF16, F32, residual=True).with_odd_values(5),
    "half_a_panel": Case(50, 136, 67, F32, BF16, BF16, bias=True, activation="gelu_tanh").with_odd_values(12),
    "gated": Case(
        72, 128, 67, F32, BF16, BF16, prologue="rms_norm", eps=1e-6, activation="silu", gated=True
    ).with_odd_values(20),
    "crowded": Case(48, 1024, 67, BF16, BF16, F32).with_odd_values(60),
    "no_exceptions": Case(40, 64, 67, BF16, BF16, F32),
    "blocks_of_k": Case(176, 3208, 67, BF16, BF16, F32, softcap=30.0).with_odd_values(300),
    "full_list": full_list(),
    "one_block": Case(17, 8, 67, BF16, BF16, F32),
    "long": Case(32784, 16, 67, BF16, BF16, F32),
}


@pytest.mark.parametrize(("name", "sku"), [p for name in PACKED_CASES for p in sku_params(BF16, name)])
def test_packed_weights_give_the_same_bits(name: str, sku: str) -> None:
    """Of any count of rows, by any number of workers, under any tactic: what panel16 gives."""
    case = PACKED_CASES[name]
    packed = case.in_packed12()
    whole = case.run(sku, slice(0, 67))
    tactics: list[GemmTactic | AmxTactic | None] = [None]
    if sku == "sapphirerapids":
        tactics += [AmxTactic(32, 2, 2), AmxTactic(64, 1, 3)]
    elif name in ("half_a_panel", "gated", "blocks_of_k"):
        tactics += [
            GemmTactic(6, 4, 16, 1000),
            GemmTactic(4, 2, 8, 5),
            GemmTactic(3, 3, 9, 6),
            GemmTactic(5, 1, 16, 33),
        ]
    for tactic in tactics:
        for rows in (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 24, 33, 67):
            got = packed.run(sku, slice(0, rows), 1 + rows % 3, tactic)
            assert bits(got) == bits(whole[:rows]), (tactic, rows)


def test_a_full_list_is_full() -> None:
    lists = PACKED_CASES["full_list"].in_packed12().packed.view(np.uint32).reshape(1, -1)[0, 16:48]
    assert [(lists[half * 16 :][:16] != 0xFFFFFFFF).sum() for half in (0, 1)] == [15, 0]


@pytest.mark.parametrize("sku", sku_params(BF16))
def test_a_packed_weight_is_not_read_past_its_end(sku: str) -> None:
    for name, rows in itertools.product(("half_a_panel", "gated", "one_block"), (1, 8, 16, 40)):
        case = PACKED_CASES[name].in_packed12()
        operands = [np.ascontiguousarray(a) for a in case.operands(slice(0, rows))]
        with GuardedArrays() as guarded:
            operands[1] = guarded(case.packed)
            got = compiled(case.call, sku)(*operands, step=Inputs(rows), workers=2)[0]
        assert bits(got) == bits(case.run(sku, slice(0, rows)))


@pytest.mark.parametrize("sku", sku_params(BF16))
def test_a_forged_list_of_exceptions_does_no_harm(sku: str) -> None:
    """Only values change, whatever the list says: its blocks may be out of order or beyond the last."""
    case = PACKED_CASES["crowded"].in_packed12()
    lists = case.packed.view(np.uint32).reshape(len(case.packed), -1)[:, 16 : 16 + 2 * 48]
    for forged in (np.uint32(0xFFFF0000), np.uint32(7 << 15 | 127 << 8), np.arange(96, dtype=np.uint32)[::-1] << 15):
        lists[...] = forged
        for rows in (1, 16, 67):
            assert case.run(sku, slice(0, rows)).shape == (rows, 48)


def test_tactics_fit_the_caches() -> None:
    """The panels in use and those read ahead take at most three quarters of L2, and all blocks are about equal."""
    for vector_bits, l2 in ((512, 1 << 20), (256, 512 << 10)):
        for k in (64, 896, 4864, 14336, 53248):
            for compute in (BF16, F32):
                tactic = GemmTactic.choose(k, compute, vector_bits)
                steps = k * compute.itemsize // 4
                assert 2 * tactic.tile_panels * tactic.block_steps * 64 <= l2 * 3 // 4
                blocks = -(-steps // tactic.block_steps)
                assert blocks * tactic.block_steps - steps < blocks


def test_more_workers_than_panels() -> None:
    case = CASES["direct_bf16"]
    sku = host_skus()[-1]
    assert bits(case.run(sku, slice(0, 1), workers=9)) == bits(case.run(sku, slice(0, 1)))


def test_refuses_rows_layout() -> None:
    op = Gemm(16, F32, F32)
    call = make_call(op, TensorType(F32, ("T", 8)), TensorType(F32, (16, 8)), outputs=[TensorType(F32, ("T", 16))])
    with pytest.raises(NoKernelError, match="panel16"):
        compiled(call, "x86-64-v3")
