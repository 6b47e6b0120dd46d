"""What each aten op means in pelton ops: one small handler per op, in the table ``HANDLERS``.

A handler gets the importer, the exported node, and the node's arguments with names resolved:
graph values, constant tensors, numbers, "T" for the token count, lists of these. It returns graph values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..runtime.errors import GraphError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_type import Dim
from .graph import Value
from .importer import Importer, Operand
from .ops.elementwise import Binary, Unary, Where
from .ops.fused import Embedding
from .ops.generic import Attention, Concat, Expand, Gather, Linear, MatMul, Reduce, Reshape, Slice, Softmax, Transpose

Handler = Callable[..., Any]

_END = 1 << 62  # slices to the end are written with the largest 64-bit integer


# -- elementwise --------------------------------------------------------------------------------------


def _unary(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, x: Operand) -> Value:
        return ctx.emit(Unary(kind), _as_result(ctx, node, x))

    return handle


def _as_result(ctx: Importer, node: fx.Node, x: Operand) -> Value:
    """An operand in the dtype that torch promotes the result to."""
    return ctx.cast(x, ctx.dtype(node.meta["val"].dtype))


def _binary(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, a: Operand, b: Operand, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = ctx.emit(Binary("mul"), _as_result(ctx, node, b), ctx.value(alpha, ctx.dtype(node.meta["val"].dtype)))
        for keep, other in ((a, b), (b, a)):
            if isinstance(keep, Value) and _is_neutral(kind, other, right=keep is a) and _same_type(ctx, node, keep):
                return keep
        return ctx.emit(Binary(kind), _as_result(ctx, node, a), _as_result(ctx, node, b))

    return handle


def _is_neutral(kind: str, x: Operand, *, right: bool) -> bool:
    """Whether combining with the number ``x`` changes nothing (times 1, plus 0)."""
    if isinstance(x, torch.Tensor) and x.ndim == 0:
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    if kind in ("mul", "div"):
        return x == 1 and (kind == "mul" or right)
    return kind in ("add", "sub") and x == 0 and (kind == "add" or right)


def _same_type(ctx: Importer, node: fx.Node, x: Value) -> bool:
    return x.type.shape == ctx.dims(node) and x.type.dtype == ctx.dtype(node.meta["val"].dtype)


def _rsub(ctx: Importer, node: fx.Node, a: Operand, b: Operand, alpha: Any = 1) -> Value:
    result: Value = _binary("sub")(ctx, node, b, a, alpha=alpha)
    return result


def _div(ctx: Importer, node: fx.Node, a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        raise GraphError(f"rounding_mode {rounding_mode}")
    result: Value = _binary("div")(ctx, node, a, b)
    return result


def _compare(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> Value:
        metas = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:2]]
        common = ctx.dtype(torch.result_type(*metas))
        return ctx.emit(Binary(kind), ctx.cast(a, common), ctx.cast(b, common))

    return handle


def _pow(ctx: Importer, node: fx.Node, x: Operand, exponent: Operand) -> Value:
    """Small constant exponents become products and roots, whose rounding every target shares."""
    if isinstance(exponent, torch.Tensor) and exponent.ndim == 0:
        exponent = exponent.item()
    if not isinstance(exponent, int | float):
        return ctx.emit(Binary("pow"), _as_result(ctx, node, x), _as_result(ctx, node, exponent))
    x = _as_result(ctx, node, x)
    roots = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in roots:
        return ctx.emit(Unary(roots[exponent]), x)
    if exponent == 3:
        return ctx.emit(Binary("mul"), ctx.emit(Unary("square"), x), x)
    if exponent == 1:
        return x
    return ctx.emit(Binary("pow"), x, ctx.value(exponent, x.type.dtype))


def _gelu(ctx: Importer, node: fx.Node, x: Value, *, approximate: str = "none") -> Value:
    return ctx.emit(Unary("gelu_tanh" if approximate == "tanh" else "gelu_erf"), x)


def _clamp(
    ctx: Importer, node: fx.Node, x: Operand, low: Operand = None, high: Operand = None, **names: Operand
) -> Value:
    low, high = names.get("min", low), names.get("max", high)
    x = _as_result(ctx, node, x)
    for kind, bound in (("max", low), ("min", high)):
        if bound is not None:
            x = ctx.emit(Binary(kind), x, _as_result(ctx, node, bound))
    return x


def _where(ctx: Importer, node: fx.Node, condition: Value, a: Operand, b: Operand) -> Value:
    return ctx.emit(Where(), condition, _as_result(ctx, node, a), _as_result(ctx, node, b))


def _masked_fill(ctx: Importer, node: fx.Node, x: Operand, mask: Value, fill: Operand) -> Value:
    return ctx.emit(Where(), mask, _as_result(ctx, node, fill), _as_result(ctx, node, x))


def _to(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    """Any conversion: torch recorded the dtype it ends in."""
    return _as_result(ctx, node, x)


def _identity(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    return x


def _dropout(ctx: Importer, node: fx.Node, x: Value, p: float = 0.5, train: bool = False) -> Value:
    if train and p > 0:
        raise GraphError("dropout is active")
    return x


def _full(ctx: Importer, node: fx.Node, *_: Operand, fill: Any = None, **__: Operand) -> Value:
    """A tensor of one value whose shape has T: a broadcast scalar."""
    dtype = ctx.dtype(node.meta["val"].dtype)
    return _expand_to(ctx, ctx.value(fill, dtype), ctx.dims(node))


def _full_like(ctx: Importer, node: fx.Node, like: Operand, fill: Any, **_: Operand) -> Value:
    return _full(ctx, node, fill=fill)


# -- shapes -------------------------------------------------------------------------------------------


def _reshape(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    """Any op that keeps the elements in order; torch recorded the new shape."""
    shape = ctx.dims(node)
    if x.type.shape == shape:
        return x
    if ctx.is_weight(x):
        return ctx.weight_view(x, shape=_constant_shape(shape))
    return ctx.emit(Reshape(shape), x)


def _constant_shape(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    if any(isinstance(dim, str) for dim in shape):
        raise GraphError(f"a constant shape is needed, not {shape}")
    return tuple(int(dim) for dim in shape)


def _expand_to(ctx: Importer, x: Value, shape: tuple[Dim, ...]) -> Value:
    return x if x.type.shape == shape else ctx.emit(Expand(shape), x)


def _expand(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    return _expand_to(ctx, x, ctx.dims(node))


def _transpose_axes(ctx: Importer, x: Value, axes: tuple[int, ...]) -> Value:
    axes = tuple(axis % x.type.rank for axis in axes)
    if axes == tuple(range(x.type.rank)):
        return x
    if ctx.is_weight(x):
        return ctx.weight_view(x, axes=axes)
    return ctx.emit(Transpose(axes), x)


def _transpose(ctx: Importer, node: fx.Node, x: Value, first: int = 0, second: int = 1) -> Value:
    axes = list(range(x.type.rank))
    if axes:
        axes[first], axes[second] = axes[second], axes[first]
    return _transpose_axes(ctx, x, tuple(axes))


def _t(ctx: Importer, node: fx.Node, x: Value) -> Value:
    return _transpose_axes(ctx, x, tuple(reversed(range(x.type.rank))))


def _permute(ctx: Importer, node: fx.Node, x: Value, axes: list[int]) -> Value:
    return _transpose_axes(ctx, x, tuple(axes))


def _slice(
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


def _select(ctx: Importer, node: fx.Node, x: Value, axis: int, index: int) -> Value:
    axis %= x.type.rank
    dim = x.type.shape[axis]
    if isinstance(dim, str):
        raise GraphError("it picks one of the step's tokens, which are rows of many sequences")
    index = index + dim if index < 0 else index
    part = x if dim == 1 else ctx.emit(Slice(axis, index, index + 1), x)
    return ctx.emit(Reshape(part.type.shape[:axis] + part.type.shape[axis + 1 :]), part)


def _split(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **names: Operand) -> list[Value]:
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


def _unbind(ctx: Importer, node: fx.Node, x: Value, axis: int = 0) -> list[Value]:
    return [_select(ctx, node, x, axis, index) for index in range(len(node.meta["val"]))]


def _cat(ctx: Importer, node: fx.Node, parts: list[Operand], axis: int = 0) -> Value:
    values = [_as_result(ctx, node, part) for part in parts]
    return values[0] if len(values) == 1 else ctx.emit(Concat(axis % values[0].type.rank), *values)


def _stack(ctx: Importer, node: fx.Node, parts: list[Operand], axis: int = 0) -> Value:
    shape = list(ctx.dims(node))
    axis %= len(shape)
    shape[axis] = 1
    values = [ctx.emit(Reshape(tuple(shape)), _as_result(ctx, node, part)) for part in parts]
    return ctx.emit(Concat(axis), *values)


def _index(ctx: Importer, node: fx.Node, data: Operand, indices: list[Operand]) -> Value:
    """x[:, i]: one index tensor on one axis."""
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        raise GraphError(f"indexing by {len(used)} tensors at once")
    axis, index = used[0]
    index = ctx.value(index)
    if index.type.dtype != DType.I32:
        raise GraphError(f"indexing by {index.type.dtype.value}")
    return ctx.emit(Gather(axis), data, index)


def _index_select(ctx: Importer, node: fx.Node, data: Operand, axis: int, index: Operand) -> Value:
    return ctx.emit(Gather(axis % ctx.value(data).type.rank), data, index)


def _embedding(ctx: Importer, node: fx.Node, table: Operand, ids: Value, *_: Operand, **__: Operand) -> Value:
    return ctx.emit(Embedding(dtype=DType.F32), ids, table)


# -- reductions and products --------------------------------------------------------------------------


def _reduce(kind: str) -> Handler:
    def handle(
        ctx: Importer, node: fx.Node, x: Value, axes: Any = None, keepdims: bool = False, **names: Operand
    ) -> Value:
        axes = names.get("dim", axes)
        rank = x.type.rank
        listed = [axes] if isinstance(axes, int) else list(range(rank)) if not axes else list(axes)
        normal = tuple(sorted(axis % rank for axis in listed))
        if any(isinstance(x.type.shape[axis], str) for axis in normal):
            raise GraphError("it reduces over the tokens of a step, which are rows of many sequences")
        return ctx.emit(Reduce(kind, normal, bool(names.get("keepdim", keepdims))), _as_result(ctx, node, x))

    return handle


def _softmax(ctx: Importer, node: fx.Node, x: Value, axis: int, *_: Operand, **__: Operand) -> Value:
    axis %= x.type.rank
    if isinstance(x.type.shape[axis], str):
        raise GraphError("it normalises over the tokens of a step, which are rows of many sequences")
    return ctx.emit(Softmax(axis), _as_result(ctx, node, x))


def _layer_norm(
    ctx: Importer,
    node: fx.Node,
    x: Value,
    shape: list[int],
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    axes = tuple(range(x.type.rank - len(shape), x.type.rank))
    centred = ctx.emit(Binary("sub"), x, ctx.emit(Reduce("mean", axes, True), x))
    return _scaled_by_rms(ctx, centred, axes, eps, weight, bias)


def _rms_norm(
    ctx: Importer, node: fx.Node, x: Value, shape: list[int], weight: Operand = None, eps: float | None = None
) -> Value:
    axes = tuple(range(x.type.rank - len(shape), x.type.rank))
    return _scaled_by_rms(ctx, x, axes, torch.finfo(torch.float32).eps if eps is None else eps, weight, None)


def _scaled_by_rms(ctx: Importer, x: Value, axes: tuple[int, ...], eps: float, weight: Operand, bias: Operand) -> Value:
    """x / sqrt(mean(x^2) + eps) [* weight] [+ bias]."""
    mean = ctx.emit(Reduce("mean", axes, True), ctx.emit(Unary("square"), x))
    y = ctx.emit(Binary("mul"), x, ctx.emit(Unary("rsqrt"), ctx.emit(Binary("add"), mean, eps)))
    y = y if weight is None else ctx.emit(Binary("mul"), y, weight)
    return y if bias is None else ctx.emit(Binary("add"), y, bias)


def _linear(ctx: Importer, node: fx.Node, x: Value, weight: Operand, bias: Operand = None) -> Value:
    operands = [x, weight] if bias is None else [x, weight, bias]
    return ctx.emit(Linear(bias=bias is not None), *operands)


def _matmul(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> Value:
    """A weight on the right is a linear; an outer product (contraction over 1) is a broadcast product."""
    a, b = ctx.value(a), ctx.value(b)
    if b.type.rank == 2 and ctx.is_weight(b):
        return ctx.emit(Linear(), a, ctx.weight_view(b, axes=(1, 0)))
    if a.type.rank >= 2 and b.type.rank >= 2 and a.type.shape[-1] == 1 and b.type.shape[-2] == 1:
        return ctx.emit(Binary("mul"), a, b)
    if a.type.rank < 2 or b.type.rank < 2:
        raise GraphError("a product with a vector")
    if isinstance(a.type.shape[-1], str):
        raise GraphError("it contracts over the tokens of a step, which are rows of many sequences")
    return ctx.emit(MatMul(), a, b)


def _addmm(
    ctx: Importer, node: fx.Node, bias: Operand, a: Value, b: Operand, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    if beta != 1 or alpha != 1:
        raise GraphError(f"alpha {alpha}, beta {beta}")
    b = ctx.value(b)
    if ctx.is_weight(b) and ctx.is_weight(bias) and bias.type.rank == 1:
        return ctx.emit(Linear(bias=True), a, ctx.weight_view(b, axes=(1, 0)), bias)
    return ctx.emit(Binary("add"), _matmul(ctx, node, a, b), bias)


def _attention(
    ctx: Importer, node: fx.Node, q: Value, k: Value, v: Value, scale: float, window: int, softcap: float
) -> Value:
    layer = len(ctx.graph.states)
    width = None if window < 0 else window
    ctx.add_state(layer, int(k.type.shape[1]), int(k.type.shape[3]), width)
    cap = None if softcap == 0 else softcap
    return ctx.emit(Attention(layer=layer, mask="causal", window=width, scale=scale, softcap=cap), q, k, v)


def _arange(ctx: Importer, node: fx.Node, *_: Operand, **__: Operand) -> Value:
    raise GraphError("the model counts the tokens of a step itself instead of using position_ids")


def _softplus(ctx: Importer, node: fx.Node, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    """log(1 + exp(x)), x itself where x is large."""
    if beta != 1:
        raise GraphError(f"softplus with beta {beta}")
    soft = ctx.emit(Unary("log"), ctx.emit(Binary("add"), ctx.emit(Unary("exp"), x), 1.0))
    return ctx.emit(Where(), ctx.emit(Binary("gt"), x, float(threshold)), x, soft)


_UNARY = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos", "tanh", "erf", "sigmoid")
_SHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
_SAME = ("contiguous", "clone", "alias", "detach", "lift_fresh_copy", "detach_")

HANDLERS: dict[str, Handler] = {
    **{name: _unary(name) for name in (*_UNARY, "silu", "relu", "floor")},
    **{name: _reshape for name in _SHAPES},
    **{name: _identity for name in _SAME},
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_not": _unary("not"),
    "bitwise_not": _unary("not"),
    "add": _binary("add"),
    "sub": _binary("sub"),
    "rsub": _rsub,
    "mul": _binary("mul"),
    "div": _div,
    "maximum": _binary("max"),
    "minimum": _binary("min"),
    "logical_and": _binary("and"),
    "logical_or": _binary("or"),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "__and__": _binary("and"),
    "__or__": _binary("or"),
    "pow": _pow,
    "gelu": _gelu,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "softplus": _softplus,
    "where": _where,
    "masked_fill": _masked_fill,
    "to": _to,
    "_to_copy": _to,
    "type_as": _to,
    "dropout": _dropout,
    "full": lambda ctx, node, size, fill, **k: _full(ctx, node, fill=fill),
    "zeros": lambda ctx, node, *a, **k: _full(ctx, node, fill=0),
    "ones": lambda ctx, node, *a, **k: _full(ctx, node, fill=1),
    "zeros_like": lambda ctx, node, *a, **k: _full(ctx, node, fill=0),
    "ones_like": lambda ctx, node, *a, **k: _full(ctx, node, fill=1),
    "new_zeros": lambda ctx, node, *a, **k: _full(ctx, node, fill=0),
    "new_ones": lambda ctx, node, *a, **k: _full(ctx, node, fill=1),
    "full_like": _full_like,
    "arange": _arange,
    "expand": _expand,
    "expand_as": _expand,
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "slice": _slice,
    "narrow": lambda ctx, node, x, axis, start, length: _slice(ctx, node, x, axis, start, start + length),
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
    "index": _index,
    "index_select": _index_select,
    "embedding": _embedding,
    "mean": _reduce("mean"),
    "sum": _reduce("sum"),
    "amax": _reduce("max"),
    "amin": _reduce("min"),
    "softmax": _softmax,
    "_softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "addmm": _addmm,
    "attention": _attention,
}
