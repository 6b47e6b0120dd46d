"""GEMM kernels: against the op's meaning, and bit for bit over row counts and workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pelton.builder.kernels import NoKernelError
from pelton.builder.ops.base import StepContext
from pelton.builder.ops.fused import Gemm
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TensorType

from .harness import (
    BF16,
    F16,
    F32,
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

    def operands(self, rows: slice) -> list[np.ndarray]:
        x, w, *rest = self.arrays
        return [x[rows], w, *(a[rows] if a.ndim == 2 else a for a in rest)]

    def run(self, sku: str, rows: slice, workers: int = 1) -> np.ndarray:
        operands = [np.ascontiguousarray(a) for a in self.operands(rows)]
        operands[1] = self.packed
        return compiled(self.call, sku)(*operands, step=Inputs(operands[0].shape[0]), workers=workers)[0]

    def reference(self, rows: slice) -> np.ndarray:
        context = StepContext.__new__(StepContext)
        return self.op.reference(context, *self.operands(rows))[0]


CASES = {
    "plain_f32": Case(48, 64, 67, F32, F32, F32),
    "odd_f32": Case(37, 35, 67, F32, F32, F32, bias=True, residual=True),
    "norm_f32": Case(80, 100, 67, F32, F32, F32, prologue="rms_norm", eps=1e-5, activation="silu", gated=True),
    "direct_bf16": Case(64, 96, 67, BF16, BF16, F32, residual=True),
    "odd_bf16": Case(50, 77, 67, F32, BF16, BF16, bias=True, activation="gelu_tanh"),
    "gated_bf16": Case(72, 130, 67, F32, BF16, BF16, prologue="rms_norm", eps=1e-6, activation="silu", gated=True),
    "gated_bias_f16": Case(40, 61, 67, F32, F16, F16, bias=True, activation="gelu_erf", gated=True),
    "head_f16": Case(129, 64, 67, F16, F16, F32, softcap=30.0, scale=0.5),
    "cast_bf16": Case(33, 256, 67, F16, BF16, F32, activation="relu"),
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


def test_more_workers_than_panels() -> None:
    case = CASES["direct_bf16"]
    sku = host_skus()[-1]
    assert bits(case.run(sku, slice(0, 1), workers=9)) == bits(case.run(sku, slice(0, 1)))


def test_refuses_rows_layout() -> None:
    op = Gemm(16, F32, F32)
    call = make_call(op, TensorType(F32, ("T", 8)), TensorType(F32, (16, 8)), outputs=[TensorType(F32, ("T", 16))])
    with pytest.raises(NoKernelError, match="panel16"):
        compiled(call, "x86-64-v3")
