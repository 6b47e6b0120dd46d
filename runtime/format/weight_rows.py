"""Row ranges of a weight expression: what ``evaluate_chunks`` reads a chunk at a time.

``compile_rows`` turns an expression into a small tree of readers; each one asks its operands only for the
rows it needs. Expressions are checked (``expr_type``) and simplified before they come here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ..errors import BuildError
from .dtypes import DType
from .tensor_source import TensorSource
from .weight_expr import (
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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RowReader:
    """A tensor of this shape whose rows ``start:stop`` can be had. Of a scalar, any range is the scalar."""

    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[int, int], Array]

    def whole(self) -> Array:
        return self.read(0, self.shape[0] if self.shape else 1)


def compile_rows(expr: WeightExpr, source: TensorSource) -> RowReader:
    """The reader of a row-major expression."""
    match expr:
        case Source(name=name, shape=shape, dtype=dtype):
            if not shape:
                return RowReader(shape, dtype, lambda start, stop: source.read(name))
            return RowReader(shape, dtype, lambda start, stop: source.read_rows(name, start, stop))
        case CastTo(x=x, dtype=dtype):
            inner = compile_rows(x, source)
            return RowReader(inner.shape, dtype, lambda start, stop: cast(inner.read(start, stop), dtype))
        case AddScalar(x=x, value=value):
            inner, addend = compile_rows(x, source), np.float32(value)
            return RowReader(
                inner.shape,
                DType.F32,
                lambda start, stop: np.asarray(cast(inner.read(start, stop), DType.F32) + addend),
            )
        case Permute(x=x, axes=axes):
            return _permute(x, axes, source)
        case Reshaped(x=x, shape=shape):
            return _reshape(compile_rows(x, source), shape)
        case Stack(parts=parts):
            return _stack([compile_rows(part, source) for part in parts])
        case Interleave(parts=parts, rows=rows):
            return _interleave([compile_rows(part, source) for part in parts], rows)
        case Pack():
            raise BuildError("Pack must be the outermost step of a weight expression")


def cast(array: Array, dtype: DType) -> Array:
    """Round to nearest even. Raises BuildError if a finite value overflows float16."""
    if array.dtype == dtype.numpy:
        return array
    if dtype is not DType.F16:
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            return array.astype(dtype.numpy)
    # From float32, because the bfloat16 type does not report overflow.
    wide = array.astype(np.float32) if array.dtype == DType.BF16.numpy else array
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return wide.astype(np.float16)
    except FloatingPointError:
        worst = float(np.max(np.abs(wide[np.isfinite(wide)])))
        raise BuildError(f"a weight of magnitude {worst:g} does not fit float16; build with --dtype bfloat16") from None


def _permute(x: WeightExpr, axes: tuple[int, ...], source: TensorSource) -> RowReader:
    inner = compile_rows(x, source)
    shape = tuple(inner.shape[a] for a in axes)
    if axes and axes[0] == 0:
        return RowReader(shape, inner.dtype, lambda start, stop: inner.read(start, stop).transpose(axes))

    @cache
    def whole() -> Array:
        array = source.read(x.name) if isinstance(x, Source) else inner.whole()
        return array.transpose(axes)

    return RowReader(shape, inner.dtype, lambda start, stop: whole()[start:stop])


def _reshape(inner: RowReader, shape: tuple[int, ...]) -> RowReader:
    size = prod(shape)
    row = prod(shape[1:])
    inner_row = prod(inner.shape[1:])

    def read(start: int, stop: int) -> Array:
        wanted = (stop - start, *shape[1:]) if shape else ()
        if not inner.shape or not size:
            return inner.whole().reshape(wanted)
        first, last = (start * row, stop * row) if shape else (0, 1)
        begin, end = first // inner_row, -(-last // inner_row)
        flat = inner.read(begin, end).reshape(-1)
        return flat[first - begin * inner_row : last - begin * inner_row].reshape(wanted)

    return RowReader(shape, inner.dtype, read)


def _stack(parts: list[RowReader]) -> RowReader:
    starts = np.cumsum([0, *(part.shape[0] for part in parts)]).tolist()

    def read(start: int, stop: int) -> Array:
        found = []
        for part, base in zip(parts, starts, strict=False):
            low, high = max(start - base, 0), min(stop - base, part.shape[0])
            if low < high:
                found.append(part.read(low, high))
        if not found:
            return parts[0].read(0, 0)
        return found[0] if len(found) == 1 else np.concatenate(found)

    return RowReader((starts[-1], *parts[0].shape[1:]), parts[0].dtype, read)


def _interleave(parts: list[RowReader], rows: int) -> RowReader:
    count, tail = parts[0].shape[0], parts[0].shape[1:]
    dtype = parts[0].dtype
    cycle = rows * len(parts)  # result rows that one turn of all parts makes

    def read(start: int, stop: int) -> Array:
        first, last = start // cycle, -(-stop // cycle)
        out = np.zeros((last - first, len(parts), rows, *tail), dtype.numpy)
        low, high = first * rows, min(count, last * rows)
        turns, rest = divmod(high - low, rows)
        for p, part in enumerate(parts):
            block = part.read(low, high)
            out[:turns, p] = block[: turns * rows].reshape(turns, rows, *tail)
            if rest:
                out[turns, p, :rest] = block[turns * rows :]
        return out.reshape((last - first) * cycle, *tail)[start - first * cycle : stop - first * cycle]

    return RowReader((-(-count // rows) * cycle, *tail), dtype, read)
