"""Evaluate weight expressions: whole (``evaluate``) or as a stream of bounded chunks (``evaluate_chunks``).

The two are written apart, so that tests can hold one against the other. Both work on any
TensorSource, at build time and at refit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np

from ..errors import BuildError, CheckpointError
from .dtypes import DType
from .packed12 import fits_packed12
from .panels import UNIT_ROWS, pack, pack_type, unpack
from .tensor_source import TensorSource
from .tensor_type import TensorType, layout_problem
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
from .weight_rows import cast, compile_rows

Array = np.ndarray[Any, Any]
T = TypeVar("T")

CHUNK_BYTES = 8 << 20

__all__ = ["evaluate", "evaluate_chunks", "expr_type", "fits", "pack", "simplify", "sources", "unpack"]


def expr_type(expr: WeightExpr) -> TensorType:
    """The type an expression evaluates to. Raises BuildError where shapes or types do not fit.

    AddScalar computes in fp32 and its result is f32; rounding it is an explicit CastTo.
    """
    match expr:
        case Source(name=name, shape=shape, dtype=dtype):
            if any(d < 0 for d in shape) or dtype is DType.TOKEN:
                raise BuildError(f"weight source {name!r} has no storable type: {dtype.value}{list(shape)}")
            return TensorType(dtype, shape)
        case CastTo(x=x, dtype=dtype):
            if dtype is DType.TOKEN:
                raise BuildError("a weight cannot be cast to a token edge")
            return TensorType(dtype, _rows_type(x, "CastTo").shape)
        case Permute(x=x, axes=axes):
            inner = _rows_type(x, "Permute")
            if sorted(axes) != list(range(inner.rank)):
                raise BuildError(f"Permute axes {list(axes)} are not an order of the {inner.rank} axes of {inner}")
            return TensorType(inner.dtype, tuple(_dims(inner)[a] for a in axes))
        case Reshaped(x=x, shape=shape):
            inner = _rows_type(x, "Reshaped")
            if any(d < 0 for d in shape) or prod(shape) != prod(_dims(inner)):
                raise BuildError(f"cannot reshape a weight of type {inner} to {list(shape)}")
            return TensorType(inner.dtype, shape)
        case Stack(parts=parts):
            return _stack_type(parts)
        case Interleave(parts=parts, rows=rows):
            return _interleave_type(parts, rows)
        case AddScalar(x=x):
            inner = _rows_type(x, "AddScalar")
            if not inner.dtype.is_float:
                raise BuildError(f"AddScalar needs a float weight, not {inner}")
            return TensorType(DType.F32, inner.shape)
        case Pack(x=x, layout=layout):
            return pack_type(_rows_type(x, "Pack"), layout)


def evaluate(expr: WeightExpr, source: TensorSource) -> Array:
    """The storage array of a weight (shape ``TensorType.storage_shape``), possibly a view of the source.

    Raises CheckpointError if the source lacks a tensor or has it in another shape or type, BuildError if the
    expression has no type or a value does not fit the target type (float16 overflow).
    """
    expr_type(expr)
    return _evaluate(expr, source)


def _evaluate(expr: WeightExpr, source: TensorSource) -> Array:
    """``evaluate`` of an expression whose type has been checked."""
    match expr:
        case Source(name=name):
            _check_source(expr, source)
            return source.read(name)
        case CastTo(x=x, dtype=dtype):
            return cast(_evaluate(x, source), dtype)
        case Permute(x=x, axes=axes):
            return np.asarray(_evaluate(x, source).transpose(axes), order="C")
        case Reshaped(x=x, shape=shape):
            return _evaluate(x, source).reshape(shape)
        case Stack(parts=parts):
            return np.concatenate([_evaluate(part, source) for part in parts])
        case Interleave(parts=parts, rows=rows):
            return _interleave([_evaluate(part, source) for part in parts], rows)
        case AddScalar(x=x, value=value):
            return np.asarray(cast(_evaluate(x, source), DType.F32) + np.float32(value))
        case Pack(x=x, layout=layout):
            return pack(_evaluate(x, source), layout)


def _interleave(arrays: list[Array], rows: int) -> Array:
    """Rows of equally shaped arrays in turns (see Interleave)."""
    count, *rest = arrays[0].shape
    turns = -(-count // rows)
    out = np.zeros((turns, len(arrays), rows, *rest), arrays[0].dtype)
    for turn in range(turns):
        for p, array in enumerate(arrays):
            block = array[turn * rows : (turn + 1) * rows]
            out[turn, p, : len(block)] = block
    return out.reshape((turns * len(arrays) * rows, *rest))


def evaluate_chunks(expr: WeightExpr, source: TensorSource, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Array]:
    """The bytes of ``evaluate(expr, source)`` as consecutive contiguous arrays of about ``chunk_bytes``.

    Reads only row ranges of the source, so memory is bounded by a few chunks (or by one row, or one
    panel of 16 or 32 rows, where that is more). A Permute that moves axis 0 reads its whole tensor (a view where
    the source maps files). An array is valid until the next one is asked for. The source's pages are
    released at the end. Raises as ``evaluate``.
    """
    expr = simplify(expr)
    layout = expr_type(expr).layout
    rows = expr.x if isinstance(expr, Pack) else expr
    return _each_chunk(rows, source, partial(pack, layout=layout), UNIT_ROWS[layout], chunk_bytes)


def fits(expr: WeightExpr, source: TensorSource, layout: str) -> bool:
    """Whether ``Pack(expr, layout)`` of a row-major expression can be evaluated: packed12 does not take all values.

    Reads the source as ``evaluate_chunks`` does, packs nothing, and stops where the answer is no. Raises as
    ``evaluate`` of ``expr``.
    """
    if layout != "packed12":
        return True
    type_ = _rows_type(expr, "Pack")
    if layout_problem(TensorType(type_.dtype, type_.shape, layout)):
        return False
    with closing(_each_chunk(simplify(expr), source, fits_packed12, UNIT_ROWS[layout], CHUNK_BYTES)) as chunks:
        return all(chunks)


def _each_chunk(
    expr: WeightExpr, source: TensorSource, use: Callable[[Array], T], unit: int, chunk_bytes: int
) -> Generator[T, None, None]:
    """``use`` of consecutive row ranges (multiples of ``unit`` rows) of a simplified row-major expression."""
    type_ = expr_type(expr)
    check_sources(expr, source)
    rows = compile_rows(expr, source)
    names = list(dict.fromkeys(leaf.name for leaf in sources(expr)))
    try:
        if not rows.shape:
            yield use(rows.read(0, 1))
            return
        count = rows.shape[0]
        unit_bytes = max(1, unit * prod(rows.shape[1:]) * type_.dtype.itemsize)
        step = unit * max(1, chunk_bytes // unit_bytes)
        for start in range(0, count, step):
            yield use(rows.read(start, min(count, start + step)))
    except BuildError as error:
        # Of the same type: a caller may have another layout for what overflows this one.
        raise type(error)(f"cannot make a weight from {', '.join(names)}: {error}") from error
    finally:
        for name in names:
            source.release(name)


def check_sources(expr: WeightExpr, source: TensorSource) -> None:
    """Raise CheckpointError unless ``source`` has every tensor of ``expr`` in the shape and type planned for."""
    for leaf in sources(expr):
        _check_source(leaf, source)


def sources(expr: WeightExpr) -> list[Source]:
    """All Source leaves, in order of use (with repeats)."""
    match expr:
        case Source():
            return [expr]
        case Stack(parts=parts) | Interleave(parts=parts):
            return [leaf for part in parts for leaf in sources(part)]
        case CastTo(x=x) | Permute(x=x) | Reshaped(x=x) | AddScalar(x=x) | Pack(x=x):
            return sources(x)


def simplify(expr: WeightExpr) -> WeightExpr:
    """An expression of equal value with fewer steps: no-op casts and views dropped, permutes joined and moved
    below elementwise steps, where they are free views of the source."""
    match expr:
        case Source():
            return expr
        case CastTo(x=x, dtype=dtype):
            x = simplify(x)
            if isinstance(x, CastTo) and _widens(expr_type(x.x).dtype, x.dtype):
                x = x.x
            return x if expr_type(x).dtype is dtype else CastTo(x, dtype)
        case Permute(x=x, axes=axes):
            return _simplify_permute(simplify(x), axes)
        case Reshaped(x=x, shape=shape):
            x = simplify(x)
            x = x.x if isinstance(x, Reshaped) else x
            return x if expr_type(x).shape == shape else Reshaped(x, shape)
        case Stack(parts=parts):
            return simplify(parts[0]) if len(parts) == 1 else Stack(tuple(map(simplify, parts)))
        case Interleave(parts=parts, rows=rows):
            return Interleave(tuple(map(simplify, parts)), rows)
        case AddScalar(x=x, value=value):
            return AddScalar(simplify(x), value)
        case Pack(x=x, layout=layout):
            return simplify(x) if layout == "rows" else Pack(simplify(x), layout)


def _simplify_permute(x: WeightExpr, axes: tuple[int, ...]) -> WeightExpr:
    """Permute of a simplified expression."""
    if axes == tuple(range(len(axes))):
        return x
    match x:
        case CastTo(x=inner, dtype=dtype):
            return CastTo(_simplify_permute(inner, axes), dtype)
        case AddScalar(x=inner, value=value):
            return AddScalar(_simplify_permute(inner, axes), value)
        case Permute(x=inner, axes=first):
            return _simplify_permute(inner, tuple(first[a] for a in axes))
        case _:
            return Permute(x, axes)


def _widens(narrow: DType, wide: DType) -> bool:
    """Whether every value of ``narrow`` is exact in ``wide``."""
    return narrow is wide or (wide is DType.F32 and narrow.is_float)


def _rows_type(expr: WeightExpr, user: str) -> TensorType:
    """The type of an operand, which must be row-major: Pack is the last step of an expression."""
    type_ = expr_type(expr)
    if type_.layout != "rows":
        raise BuildError(f"{user} cannot work on a packed weight ({type_}); Pack must be the outermost step")
    return type_


def _dims(type_: TensorType) -> tuple[int, ...]:
    return type_.max_shape({})


def _stack_type(parts: tuple[WeightExpr, ...]) -> TensorType:
    types = [_rows_type(part, "Stack") for part in parts]
    if not types or any(not t.rank or t.dtype != types[0].dtype or t.shape[1:] != types[0].shape[1:] for t in types):
        raise BuildError(f"cannot stack weights of types {', '.join(map(str, types)) or '(none)'} along axis 0")
    return TensorType(types[0].dtype, (sum(_dims(t)[0] for t in types), *types[0].shape[1:]))


def _interleave_type(parts: tuple[WeightExpr, ...], rows: int) -> TensorType:
    types = [_rows_type(part, "Interleave") for part in parts]
    if not types or rows < 1 or any(not t.rank or t != types[0] for t in types):
        raise BuildError(f"cannot interleave {', '.join(map(str, types)) or '(no parts)'} in turns of {rows} rows")
    turns = -(-_dims(types[0])[0] // rows)
    return TensorType(types[0].dtype, (turns * len(parts) * rows, *types[0].shape[1:]))


def _check_source(leaf: Source, source: TensorSource) -> None:
    """The source must have the tensor exactly as the expression was built for."""
    info = source.info(leaf.name)
    if info.shape != leaf.shape or info.dtype != leaf.dtype:
        raise CheckpointError(
            f"tensor {leaf.name!r} is {info.dtype.value}{list(info.shape)} in the source, but the weights were"
            f" planned for {leaf.dtype.value}{list(leaf.shape)}; use the checkpoint this was built from, or rebuild"
        )
