"""Weight expressions: meaning, streaming, layouts, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.errors import BuildError, CheckpointError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_source import DictSource
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.format.weight_eval import (
    evaluate,
    evaluate_chunks,
    expr_type,
    pack,
    simplify,
    unpack,
)
from pelton.runtime.format.weight_expr import (
    AddScalar,
    CastTo,
    Interleave,
    Pack,
    Permute,
    Reshaped,
    Source,
    Stack,
    WeightExpr,
)

from .expressions import FLOATS, expressions, random_source, rows_expressions

SOURCE = random_source()


def f32(name: str, *shape: int) -> Source:
    return Source(name, shape, DType.F32)


def small_source(**arrays: Any) -> DictSource:
    return DictSource({name: np.asarray(value) for name, value in arrays.items()})


@settings(deadline=None, max_examples=300)
@given(expressions(), st.integers(1, 400))
def test_chunks_are_the_bytes_of_the_whole(expr: WeightExpr, chunk_bytes: int) -> None:
    whole = evaluate(expr, SOURCE)
    type_ = expr_type(expr)
    assert whole.shape == type_.storage_shape()
    assert whole.dtype == type_.dtype.numpy
    chunks = [np.array(chunk) for chunk in evaluate_chunks(expr, SOURCE, chunk_bytes)]
    assert all(chunk.dtype == whole.dtype for chunk in chunks)
    assert b"".join(chunk.tobytes() for chunk in chunks) == whole.tobytes()


@settings(deadline=None, max_examples=200)
@given(rows_expressions())
def test_simplify_keeps_type_and_value(expr: WeightExpr) -> None:
    simple = simplify(expr)
    assert expr_type(simple) == expr_type(expr)
    assert evaluate(simple, SOURCE).tobytes() == evaluate(expr, SOURCE).tobytes()
    assert simplify(simple) == simple


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 70), st.integers(0, 20), st.sampled_from(FLOATS), st.sampled_from(("rows", "panel16")))
def test_unpack_undoes_pack(n: int, k: int, dtype: DType, layout: str) -> None:
    logical = np.arange(n * k, dtype=np.float32).reshape(n, k).astype(dtype.numpy)
    type_ = TensorType(dtype, (n, k), layout)
    storage = pack(logical, layout)
    assert storage.shape == type_.storage_shape()
    assert storage.flags.c_contiguous
    assert unpack(storage, type_).tobytes() == logical.tobytes()
    assert unpack(storage.reshape(-1), type_).shape == (n, k)


def test_panel_places_each_element_as_documented() -> None:
    n, k = 37, 7
    w = np.arange(1, n * k + 1, dtype=np.float32).reshape(n, k)
    wide = pack(w, "panel16")
    half = pack(w.astype(np.float16), "panel16")
    for i in range(48):
        for j in range(8):
            expected = w[i, j] if i < n and j < k else 0.0
            assert half[i // 16, j // 2, i % 16, j % 2] == np.float16(expected)
            if j < k:
                assert wide[i // 16, j, i % 16] == expected


def test_interleave_takes_turns_and_pads() -> None:
    source = small_source(a=np.float32([[1], [2], [3]]), b=np.float32([[4], [5], [6]]))
    merged = evaluate(Interleave((f32("a", 3, 1), f32("b", 3, 1)), 2), source)
    assert merged.ravel().tolist() == [1, 2, 4, 5, 3, 0, 6, 0]


def test_add_scalar_computes_in_fp32() -> None:
    source = small_source(w=np.asarray([1e-3], DType.BF16.numpy))
    expr = AddScalar(Source("w", (1,), DType.BF16), 1.0)
    result = evaluate(expr, source)
    assert result.dtype == np.float32
    assert result[0] == np.float32(source.read("w")[0]) + np.float32(1)


def test_cast_rounds_to_nearest_even() -> None:
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    out = evaluate(CastTo(f32("w", 3), DType.BF16), small_source(w=values))
    assert out.astype(np.float32).tolist() == [1.0, 1 + 2**-6, -1.0]


def test_float16_overflow_is_an_error_and_infinity_is_not() -> None:
    expr = CastTo(f32("w", 1), DType.F16)
    for dtype in (np.float32, DType.BF16.numpy):
        source = small_source(w=np.asarray([70000.0], dtype))
        with pytest.raises(BuildError, match="does not fit float16"):
            evaluate(CastTo(Source("w", (1,), DType.from_numpy(np.dtype(dtype))), DType.F16), source)
    with pytest.raises(BuildError, match="cannot make a weight from w: .*--dtype bfloat16"):
        list(evaluate_chunks(expr, small_source(w=np.float32([70000.0]))))
    assert np.isinf(evaluate(expr, small_source(w=np.float32([np.inf])))[0])


def test_lossless_round_trip_reads_the_source_directly() -> None:
    leaf = Source("w", (4, 2), DType.BF16)
    assert simplify(CastTo(CastTo(leaf, DType.F32), DType.BF16)) == leaf
    lossy = CastTo(CastTo(f32("w", 4), DType.BF16), DType.F32)
    assert simplify(lossy) == lossy


def test_tied_weights_are_one_expression() -> None:
    leaf = Source("embed", (8, 2), DType.BF16)
    detour = CastTo(CastTo(leaf, DType.F32), DType.BF16)
    assert simplify(detour) == simplify(leaf) != simplify(CastTo(leaf, DType.F16))


class CountingSource(DictSource):
    """Remembers the largest row range asked for, and what was released."""

    def __init__(self, **arrays: Any) -> None:
        super().__init__(arrays)
        self.most_rows = 0
        self.whole: list[str] = []
        self.released: list[str] = []

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return super().read(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        self.most_rows = max(self.most_rows, stop - start)
        return super().read_rows(name, start, stop)

    def release(self, name: str) -> None:
        self.released.append(name)


def test_streaming_reads_few_rows_at_a_time() -> None:
    q, k = np.zeros((320, 64), np.float32), np.zeros((160, 64), np.float32)
    source = CountingSource(q=q, k=k)
    stacked = Stack((f32("q", 320, 64), f32("k", 160, 64)))
    gate = Interleave((f32("q", 320, 64), f32("q", 320, 64)), 16)
    for inner in (stacked, gate, Reshaped(Reshaped(stacked, (64, 480)), (480, 64))):
        expr = Pack(CastTo(inner, DType.BF16), "panel16")
        chunks = list(evaluate_chunks(expr, source, chunk_bytes=32 * 64 * 2))
        assert max(chunk.nbytes for chunk in chunks) <= 32 * 64 * 2
    assert source.most_rows <= 32
    assert set(source.released) == {"q", "k"}


def test_source_that_changed_is_refused() -> None:
    source = small_source(w=np.zeros((2, 3), np.float32))
    for expr in (f32("w", 3, 2), Source("w", (2, 3), DType.F16)):
        for run in (lambda e: evaluate(e, source), lambda e: list(evaluate_chunks(e, source))):
            with pytest.raises(CheckpointError, match="'w' is f32"):
                run(expr)
    with pytest.raises(CheckpointError, match="'x' is not in the source, which has: w"):
        list(evaluate_chunks(f32("x", 1), source))


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (Permute(f32("w", 2, 3), (0, 0)), "not an order"),
        (Reshaped(f32("w", 2, 3), (4,)), "cannot reshape"),
        (Stack(()), "cannot stack"),
        (Stack((f32("w", 2, 3), f32("v", 2, 4))), "cannot stack"),
        (Stack((f32("w"),)), "cannot stack"),
        (Interleave((f32("w", 2, 3), f32("v", 3, 3)), 16), "cannot interleave"),
        (Interleave((f32("w", 2, 3),), 0), "turns of 0"),
        (Pack(f32("w", 2), "panel16"), "takes a float matrix"),
        (Pack(Source("w", (2, 2), DType.I8), "panel16"), "takes a float matrix"),
        (Pack(f32("w", 2, 2), "panel99"), "unknown weight layout"),
        (CastTo(Pack(f32("w", 2, 2), "panel16"), DType.F16), "outermost"),
        (AddScalar(Source("w", (2,), DType.I32), 1.0), "float weight"),
        (Source("w", (-1,), DType.F32), "no storable type"),
        (CastTo(f32("w"), DType.TOKEN), "token"),
    ],
)
def test_impossible_expressions_are_refused(expr: WeightExpr, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        expr_type(expr)


def test_unpack_refuses_a_wrong_size() -> None:
    with pytest.raises(BuildError, match="does not hold"):
        unpack(np.zeros(5, np.float32), TensorType(DType.F32, (2, 3)))
