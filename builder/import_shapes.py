"""Handlers of aten ops that move, select or make elements (see import_aten.py for what a handler is)."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..runtime.errors import GraphError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_type import Dim
from .graph import Value
from .import_elementwise import as_result
from .importer import Importer, Operand
from .ops.fused import Embedding
from .ops.generic import Concat, Expand, Gather, Reshape, Slice, Transpose

_END = 1 << 62  # slices to the end are written with the largest 64-bit integer


def reshape(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    """Any op that keeps the elements in order; torch recorded the new shape."""
    shape = ctx.dims(node)
    if x.type.shape == shape:
        return x
    if x.kind == "weight":
        return ctx.weights.reshaped(x, constant_shape(shape))
    return ctx.emit(Reshape(shape), x)


def constant_shape(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    if any(isinstance(dim, str) for dim in shape):
        raise GraphError(f"a constant shape is needed, not {shape}")
    return tuple(int(dim) for dim in shape)


def expand_to(ctx: Importer, x: Value, shape: tuple[Dim, ...]) -> Value:
    return x if x.type.shape == shape else ctx.emit(Expand(shape), x)


def expand(ctx: Importer, node: fx.Node, x: Operand, *_: Operand, **__: Operand) -> Value:
    return expand_to(ctx, ctx.value(x), ctx.dims(node))


def transpose_axes(ctx: Importer, x: Value, axes: tuple[int, ...]) -> Value:
    axes = tuple(axis % x.type.rank for axis in axes)
    if axes == tuple(range(x.type.rank)):
        return x
    if x.kind == "weight":
        return ctx.weights.permuted(x, axes)
    return ctx.emit(Transpose(axes), x)


def transpose(ctx: Importer, node: fx.Node, x: Value, first: int = 0, second: int = 1) -> Value:
    axes = list(range(x.type.rank))
    if axes:
        axes[first], axes[second] = axes[second], axes[first]
    return transpose_axes(ctx, x, tuple(axes))


def t(ctx: Importer, node: fx.Node, x: Value) -> Value:
    return transpose_axes(ctx, x, tuple(reversed(range(x.type.rank))))


def permute(ctx: Importer, node: fx.Node, x: Value, axes: list[int]) -> Value:
    return transpose_axes(ctx, x, tuple(axes))


def cut(
    ctx: Importer, node: fx.Node, x: Value, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    axis %= x.type.rank
    dim = x.type.shape[axis]
    start = 0 if start is None else start
    if start == 0 and step == 1 and (stop is None or stop == dim or (isinstance(stop, int) and stop > _END)):
        return x
    if isinstance(dim, str):
        raise GraphError(f"it cuts the tokens of a step ({start}:{stop}:{step}), which are rows of many sequences")
    start, stop, _ = slice(start, stop, step).indices(dim)
    return ctx.emit(Slice(axis, start, max(start, stop), step), x)


def select(ctx: Importer, node: fx.Node, x: Value, axis: int, index: int) -> Value:
    axis %= x.type.rank
    dim = x.type.shape[axis]
    if isinstance(dim, str):
        raise GraphError("it picks one of the step's tokens, which are rows of many sequences")
    index = index + dim if index < 0 else index
    part = x if dim == 1 else ctx.emit(Slice(axis, index, index + 1), x)
    return ctx.emit(Reshape(part.type.shape[:axis] + part.type.shape[axis + 1 :]), part)


def split(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **names: Operand) -> list[Value]:
    """split, chunk and the like: torch recorded each part's size."""
    arguments = [arg for arg in node.args[2:] if isinstance(arg, int)]
    axis = int(names.get("dim", arguments[0] if arguments else 0)) % x.type.rank
    parts: list[Value] = []
    position = 0
    for val in node.meta["val"]:
        size = ctx.dim(val.shape[axis])
        if isinstance(size, str) or isinstance(x.type.shape[axis], str):
            raise GraphError("it splits the tokens of a step, which are rows of many sequences")
        parts.append(ctx.emit(Slice(axis, position, position + size), x))
        position += size
    return parts


def unbind(ctx: Importer, node: fx.Node, x: Value, axis: int = 0) -> list[Value]:
    return [select(ctx, node, x, axis, index) for index in range(len(node.meta["val"]))]


def cat(ctx: Importer, node: fx.Node, parts: list[Operand], axis: int = 0) -> Value:
    values = [as_result(ctx, node, part) for part in parts]
    return values[0] if len(values) == 1 else ctx.emit(Concat(axis % values[0].type.rank), *values)


def stack(ctx: Importer, node: fx.Node, parts: list[Operand], axis: int = 0) -> Value:
    shape = list(ctx.dims(node))
    axis %= len(shape)
    shape[axis] = 1
    values = [ctx.emit(Reshape(tuple(shape)), as_result(ctx, node, part)) for part in parts]
    return ctx.emit(Concat(axis), *values)


def index(ctx: Importer, node: fx.Node, data: Operand, indices: list[Operand]) -> Value:
    """x[:, i]: one index tensor on one axis."""
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        raise GraphError(f"indexing by {len(used)} tensors at once")
    axis, index = used[0]
    index = ctx.value(index)
    if index.type.dtype != DType.I32:
        raise GraphError(f"indexing by {index.type.dtype.value}")
    return ctx.emit(Gather(axis), data, index)


def index_select(ctx: Importer, node: fx.Node, data: Operand, axis: int, index: Operand) -> Value:
    return ctx.emit(Gather(axis % ctx.value(data).type.rank), data, index)


def embedding(ctx: Importer, node: fx.Node, table: Operand, ids: Value, *_: Operand, **__: Operand) -> Value:
    return ctx.emit(Embedding(dtype=DType.F32), ids, table)


def full(ctx: Importer, node: fx.Node, *_: Operand, fill: Any = None, **__: Operand) -> Value:
    """A tensor of one value whose shape has T: a broadcast scalar."""
    dtype = ctx.dtype(node.meta["val"].dtype)
    return expand_to(ctx, ctx.value(fill, dtype), ctx.dims(node))


def full_like(ctx: Importer, node: fx.Node, like: Operand, fill: Any, **_: Operand) -> Value:
    return full(ctx, node, fill=fill)


def arange(ctx: Importer, node: fx.Node, *_: Operand, **__: Operand) -> Value:
    raise GraphError("the model counts the tokens of a step itself instead of using position_ids")
