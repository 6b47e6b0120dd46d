"""One spelling for each meaning: views and casts that do nothing go, powers and products get their names.

Later patterns then need to know one form only. Every rule is exact, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import Dim
from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.elementwise import Binary, Cast, Unary, Where, broadcast_shapes
from ..ops.generic import Concat, Expand, MatMul, Reshape, Slice, Transpose
from .match import producer, scalar, unary
from .rewriting import Sweep, moves_nothing, until_stable


def apply(graph: Graph) -> None:
    """Rewrite until nothing changes."""
    until_stable(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    rule = _RULES.get(type(node.op))
    new = rule(s, node) if rule is not None else None
    return None if new is None else [new]


def _reshape(s: Sweep, node: Node) -> Value | None:
    assert isinstance(node.op, Reshape)
    x = node.inputs[0]
    if x.type.shape == node.op.shape:
        return x
    return s.view(x, node.op.shape) if producer(x, Reshape) else None


def _transpose(s: Sweep, node: Node) -> Value | None:
    assert isinstance(node.op, Transpose)
    x, axes = node.inputs[0], node.op.axes
    if producer(x, Transpose) or moves_nothing(x.type.shape, axes):
        return s.transpose(x, axes)
    return _transposed_product(s, x, axes)


def _transposed_product(s: Sweep, x: Value, axes: tuple[int, ...]) -> Value | None:
    """transpose(a op b) where a and b only need new views, e.g. an outer product made by matmul."""
    node = producer(x, Binary)
    if node is None:
        return None
    views = [transposed_view(v, axes) for v in node.inputs]
    if any(v is None for v in views):
        return None
    pairs = zip(node.inputs, views, strict=True)
    return s.emit(node.op, *(s.view(v, shape) for v, shape in pairs if shape is not None))


def transposed_view(value: Value, axes: tuple[int, ...]) -> tuple[Dim, ...] | None:
    """The shape that is ``value`` (broadcast to len(axes) dims) transposed, if no element has to move."""
    shape = (1,) * (len(axes) - value.type.rank) + value.type.shape
    moved = tuple(shape[a] for a in axes)
    if moved == shape or value.type.shape.count(1) == value.type.rank:
        return value.type.shape
    return moved if moves_nothing(shape, axes) else None


def _expand(s: Sweep, node: Node) -> Value | None:
    assert isinstance(node.op, Expand)
    x, shape = node.inputs[0], node.op.shape
    if [d for d in x.type.shape if d != 1] == [d for d in shape if d != 1]:
        return s.view(x, shape)
    return None


def _cast(s: Sweep, node: Node) -> Value | None:
    x = node.inputs[0]
    assert isinstance(node.op, Cast)
    if x.type.dtype == node.op.dtype:
        return x
    inner = producer(x, Cast)
    if inner is not None and _exact(inner.inputs[0].type.dtype, x.type.dtype):
        return s.emit(node.op, inner.inputs[0])
    return None


def _exact(narrow: DType, wide: DType) -> bool:
    """Whether each value of ``narrow`` exists in ``wide``."""
    return (narrow, wide) in {(DType.I32, DType.I64), (DType.F16, DType.F32), (DType.BF16, DType.F32)}


def _slice(s: Sweep, node: Node) -> Value | None:
    op, x = node.op, node.inputs[0]
    assert isinstance(op, Slice)
    axis = op.axis % x.type.rank
    if op.step == 1 and (op.start, op.stop) == (0, x.type.shape[axis]):
        return x
    inner = producer(x, Slice)
    if inner is not None and isinstance(inner.op, Slice) and inner.op.axis % x.type.rank == axis and inner.op.step == 1:
        start = inner.op.start
        return s.emit(Slice(axis, start + op.start, start + op.stop, op.step), inner.inputs[0])
    joined = producer(x, Concat)
    if joined is not None and isinstance(joined.op, Concat) and joined.op.axis % x.type.rank == axis and op.step == 1:
        offset = 0
        for part in joined.inputs:
            size = part.type.shape[axis]
            assert isinstance(size, int)
            if (op.start, op.stop) == (offset, offset + size):
                return part
            offset += size
    return None


def _matmul(s: Sweep, node: Node) -> Value | None:
    """An outer product is a broadcast product; numpy's sum of one term is that term."""
    a, b = node.inputs
    return s.emit(Binary("mul"), a, b) if a.type.shape[-1] == 1 else None


def _binary(s: Sweep, node: Node) -> Value | None:
    assert isinstance(node.op, Binary)
    kind, (a, b) = node.op.kind, node.inputs
    number = scalar(s.graph, b)
    same_shape = node.outputs[0].type.shape == a.type.shape
    if number is not None and same_shape and a.type.dtype == DType.F32:
        if number == 1.0 and kind in ("mul", "div", "pow"):
            return a
        named = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(number)
        if kind == "pow" and named is not None:
            return s.emit(Unary(named), a)
    if kind == "mul" and scalar(s.graph, a) == 1.0 and b.type.shape == node.outputs[0].type.shape:
        return b
    if kind == "div" and scalar(s.graph, a) == 1.0 and b.type.shape == node.outputs[0].type.shape:
        return s.emit(Unary("reciprocal"), b)
    if kind == "mul" and a is b:
        return s.emit(Unary("square"), a)
    if kind == "mul" and (unary(b, "sigmoid") is a or unary(a, "sigmoid") is b):
        return s.emit(Unary("silu"), a if unary(b, "sigmoid") is a else b)
    return _unexpanded(s, node)


def _unexpanded(s: Sweep, node: Node) -> Value | None:
    """Elementwise ops broadcast by themselves: an expand in front of one is dropped if the result keeps its shape."""
    inputs = list(node.inputs)
    for index, value in enumerate(inputs):
        expanded = producer(value, Expand)
        if expanded is None:
            continue
        trial = [*inputs[:index], expanded.inputs[0], *inputs[index + 1 :]]
        if broadcast_shapes(*(v.type.shape for v in trial)) == node.outputs[0].type.shape:
            inputs = trial
    return s.emit(node.op, *inputs) if inputs != node.inputs else None


def _unary(s: Sweep, node: Node) -> Value | None:
    assert isinstance(node.op, Unary)
    kind, x = node.op.kind, node.inputs[0]
    if kind == "neg" and (inner := unary(x, "neg")) is not None:
        return inner
    if kind == "reciprocal" and (inner := unary(x, "sqrt")) is not None:
        return s.emit(Unary("rsqrt"), inner)
    return None


def _concat(s: Sweep, node: Node) -> Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


_RULES: dict[type[Op], Callable[[Sweep, Node], Value | None]] = {
    Binary: _binary,
    Cast: _cast,
    Concat: _concat,
    Expand: _expand,
    MatMul: _matmul,
    Reshape: _reshape,
    Slice: _slice,
    Transpose: _transpose,
    Unary: _unary,
    Where: _unexpanded,
}
