"""Norm, rope, KV writes, embedding and row gather: against their meanings, bit for bit over rows and workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pelton.builder.ops.base import Op, StepContext
from pelton.builder.ops.fused import Embedding, GatherRows, KVWrite, QKVRopeWrite, RMSNorm, Rope, RopeTable
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.panels import pack
from pelton.runtime.format.tensor_type import TensorType

from .harness import (
    BF16,
    F16,
    F32,
    RANGES,
    GuardedArrays,
    Inputs,
    bits,
    compiled,
    host_skus,
    make_call,
    pack_kv16,
    pack_panel16,
    random_array,
    relative_error,
    sku_params,
    unpack_kv16,
)

SKUS = pytest.mark.parametrize("sku", sku_params())
I32 = DType.I32


def reference(op: Op, *arrays: np.ndarray, **step: Any) -> tuple[np.ndarray, ...]:
    context = StepContext(SimpleNamespace(**step), {}, {}, RANGES.tokens_per_block)  # type: ignore[arg-type]
    return op.reference(context, *arrays)


@SKUS
@pytest.mark.parametrize(("n", "x", "out"), [(576, F32, F32), (37, F32, BF16), (5, BF16, F32), (130, F16, F16)])
def test_rms_norm(n: int, x: DType, out: DType, sku: str) -> None:
    rng = np.random.default_rng(n)
    data, weight = random_array(rng, (67, n), x, 3.0), random_array(rng, (n,), F32)
    op = RMSNorm(1e-5, out)
    run = compiled(make_call(op, TensorType(x, ("T", n)), TensorType(F32, (n,))), sku)
    (whole,) = run(data, weight, step=Inputs(67))
    assert relative_error(whole, reference(op, data, weight)[0]) < {F32: 1e-6, F16: 1e-3, BF16: 8e-3}[out]
    for rows in (1, 2, 13):
        (part,) = run(np.ascontiguousarray(data[:rows]), weight, step=Inputs(rows), workers=1 + rows % 3)
        assert bits(part) == bits(whole[:rows])


@SKUS
def test_rms_norm_with_residual_is_norm_and_sum(sku: str) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = (random_array(rng, shape, F32, 3.0) for shape in ((17, 37), (37,), (17, 37)))
    type_, vector = TensorType(F32, ("T", 37)), TensorType(F32, (37,))
    norm = compiled(make_call(RMSNorm(1e-5, F32), type_, vector), sku)
    fused = compiled(make_call(RMSNorm(1e-5, F32, residual=True), type_, vector, type_), sku)
    (got,) = fused(x, weight, residual, step=Inputs(17), workers=2)
    assert bits(got) == bits(norm(x, weight, step=Inputs(17))[0] + residual)


@SKUS
def test_rope_table_is_accurate_to_a_million_positions(sku: str) -> None:
    frequency = (10000.0 ** -(np.arange(21) / 21)).astype(np.float32)
    positions = np.concatenate([np.arange(200), np.linspace(200, 1_000_000, 500).astype(np.int64)]).astype(np.int32)
    op = RopeTable(scale=1.0)
    run = compiled(make_call(op, TensorType(I32, ("T",)), TensorType(F32, (21,))), sku)
    cos, sin = run(positions, frequency, step=Inputs(len(positions)), workers=2)
    angle = (positions.astype(np.float32)[:, None] * frequency).astype(np.float64)
    for got, exact in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        ulps = np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))
        assert ulps.max() <= 2.0


@SKUS
def test_rope_table_scale(sku: str) -> None:
    positions, frequency = np.arange(5, dtype=np.int32), np.ones(4, np.float32)
    op = RopeTable(scale=1.25)
    run = compiled(make_call(op, TensorType(I32, ("T",)), TensorType(F32, (4,))), sku)
    for got, want in zip(run(positions, frequency, step=Inputs(5)), reference(op, positions, frequency), strict=True):
        assert relative_error(got, want) < 1e-6


@SKUS
@pytest.mark.parametrize(("dim", "rotary", "interleaved"), [(64, 64, False), (20, 12, False), (18, 10, True)])
def test_rope(dim: int, rotary: int, interleaved: bool, sku: str) -> None:
    rng = np.random.default_rng(dim)
    x = random_array(rng, (9, 3, dim), F32)
    cos, sin = (random_array(rng, (9, rotary // 2), F32) for _ in range(2))
    op = Rope(rotary, interleaved)
    table = TensorType(F32, ("T", rotary // 2))
    run = compiled(make_call(op, TensorType(F32, ("T", 3, dim)), table, table), sku)
    for workers in (1, 2, 3):
        (got,) = run(x, cos, sin, step=Inputs(9), workers=workers)
        assert bits(got) == bits(reference(op, x, cos, sin)[0])


class Pages:
    """Paged state for two sequences, 45 and 30 tokens long, of which the step covers the last ones."""

    def __init__(self, heads: int, dim: int, dtype: DType) -> None:
        size = RANGES.tokens_per_block
        self.before = random_array(np.random.default_rng(1), (5, size, 2, heads, dim), dtype)
        table = np.array([[3, 1, -1], [4, -1, -1]], np.int32)
        positions = np.concatenate([np.arange(20, 45), np.arange(29, 30)])
        self.inputs = Inputs(26, positions, np.array([0, 25, 26]), table)

    def after_reference(self, op: Op, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        state = self.before.copy()
        i = self.inputs
        step: Any = SimpleNamespace(
            query_start=i.query_start, positions=i.positions, num_seqs=2, block_tables=(i.block_table,)
        )
        results = op.reference(StepContext(step, {"": state}, {"": 0}, RANGES.tokens_per_block), *arrays)
        return (state, *results)


@SKUS
@pytest.mark.parametrize(("dim", "dtype"), [(20, F32), (10, F16), (64, BF16)])
def test_kv_write(dim: int, dtype: DType, sku: str) -> None:
    pages = Pages(2, dim, dtype)
    rng = np.random.default_rng(dim)
    k, v = (random_array(rng, (26, 2, dim), F32) for _ in range(2))
    op = KVWrite("", 2, dim, dtype)
    type_ = TensorType(F32, ("T", 2, dim))
    for workers in (1, 3):
        storage = pack_kv16(pages.before)
        compiled(make_call(op, type_, type_, kv=True), sku)(k, v, step=pages.inputs, states=[storage], workers=workers)
        want = pages.after_reference(op, k, v)[0]
        assert bits(unpack_kv16(storage, want)) == bits(want)


@SKUS
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved", "norm", "dtype"),
    [(64, 64, False, False, BF16), (20, 20, False, True, F32), (24, 16, True, True, F16), (18, 10, False, False, BF16)],
)
def test_qkv_rope_write(dim: int, rotary: int, interleaved: bool, norm: bool, dtype: DType, sku: str) -> None:
    pages = Pages(2, dim, dtype)
    rng = np.random.default_rng(dim)
    op = QKVRopeWrite("", 4, 2, dim, rotary, interleaved, norm, 1e-6, dtype, dtype)
    arrays = [random_array(rng, (26, 8 * dim), F32), *(random_array(rng, (26, rotary // 2), F32) for _ in range(2))]
    types = [TensorType(F32, ("T", 8 * dim)), *[TensorType(F32, ("T", rotary // 2))] * 2]
    if norm:
        arrays += [random_array(rng, (dim,), F32) for _ in range(2)]
        types += [TensorType(F32, (dim,))] * 2
    want, want_q, _ = pages.after_reference(op, *arrays)
    results = []
    for workers in (1, 2, 5):
        storage = pack_kv16(pages.before)
        (q,) = compiled(make_call(op, *types, kv=True), sku)(
            *arrays, step=pages.inputs, states=[storage], workers=workers
        )
        results.append(bits(q) + bits(storage))
    assert len(set(results)) == 1
    got = unpack_kv16(storage, want)
    if norm:  # numpy sums squares in another order
        tolerance = {F32: 1e-6, F16: 2e-3, BF16: 1e-2}[dtype]
        assert relative_error(q, want_q) < tolerance
        assert relative_error(got, want) < tolerance
    else:
        assert bits(q) == bits(want_q)
        assert bits(got) == bits(want)


@SKUS
@pytest.mark.parametrize("layout", ["rows", "panel16"])
@pytest.mark.parametrize(
    ("width", "table", "out", "scale"), [(300, F32, F32, 1.0), (37, BF16, F32, 24.0), (33, F16, F16, 1.0)]
)
def test_embedding(layout: str, width: int, table: DType, out: DType, scale: float, sku: str) -> None:
    rng = np.random.default_rng(width)
    rows = random_array(rng, (50, width), table)
    ids = np.array([0, 49, 16, 15, 31, 7], np.int32)
    op = Embedding(out, scale)
    run = compiled(make_call(op, TensorType(I32, ("T",)), TensorType(table, (50, width), layout)), sku)
    stored = pack_panel16(rows) if layout == "panel16" else rows
    for workers in (1, 2, 9):
        (got,) = run(ids, stored, step=Inputs(6), workers=workers)
        assert bits(got) == bits(reference(op, ids, rows)[0])


@SKUS
@pytest.mark.parametrize("width", [8, 640])
def test_embedding_from_a_packed_table(width: int, sku: str) -> None:
    rng = np.random.default_rng(width)
    rows = random_array(rng, (50, width), BF16)
    for row, column in ((0, 0), (0, width - 1), (16, 3), (49, width // 2), (49, width // 2 + 1)):
        rows[row, column] = 10.0 ** rng.integers(-30, 30)
    ids = np.array([0, 49, 16, 15, 31, 7, 48], np.int32)
    op = Embedding(F32, 2.0)
    run = compiled(make_call(op, TensorType(I32, ("T",)), TensorType(BF16, (50, width), "packed12")), sku)
    for workers in (1, 3):
        with GuardedArrays() as guarded:
            (got,) = run(ids, guarded(pack(rows, "packed12")), step=Inputs(len(ids)), workers=workers)
        assert bits(got) == bits(reference(op, ids, rows)[0])


def test_embedding_outside_the_table_is_nan() -> None:
    run = compiled(make_call(Embedding(F32), TensorType(I32, ("T",)), TensorType(F32, (4, 8))), host_skus()[0])
    (got,) = run(np.array([4, -1, 2], np.int32), np.ones((4, 8), np.float32), step=Inputs(3))
    assert np.isnan(got[:2]).all()
    assert (got[2] == 1).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gather_rows(dtype: DType) -> None:
    x = random_array(np.random.default_rng(0), (9, 21), dtype)
    op = GatherRows()
    inputs = Inputs(9, logits_rows=np.array([8, 0, 3, 5, 4]), row_start=1, row_count=3)
    run = compiled(make_call(op, TensorType(dtype, ("T", 21))), host_skus()[0])
    for workers in (1, 2, 5):
        (got,) = run(x, step=inputs, workers=workers)
        assert bits(got) == bits(x[[0, 3, 5]])
