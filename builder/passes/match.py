"""Small questions that patterns ask about a value. Each looks only at the value's producer."""

from __future__ import annotations

from ...runtime.format.tensor_type import Dim
from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.elementwise import Binary, Cast, Unary
from ..ops.generic import Concat, Reshape, Slice


def producer(value: Value, kind: type[Op]) -> Node | None:
    """The node that makes ``value`` if its op is a ``kind``."""
    return value.node if value.node is not None and isinstance(value.node.op, kind) else None


def unary(value: Value, kind: str) -> Value | None:
    """x, if ``value`` is kind(x)."""
    node = value.node
    if node is not None and isinstance(node.op, Unary) and node.op.kind == kind:
        return node.inputs[0]
    return None


def binary(value: Value, kind: str) -> tuple[Value, Value] | None:
    """(a, b), if ``value`` is kind(a, b)."""
    node = value.node
    if node is not None and isinstance(node.op, Binary) and node.op.kind == kind:
        return node.inputs[0], node.inputs[1]
    return None


def either_order(value: Value, kind: str) -> list[tuple[Value, Value]]:
    """Both orders of the operands, if ``value`` is the commutative kind(a, b); else nothing."""
    pair = binary(value, kind)
    return [] if pair is None else [pair, (pair[1], pair[0])]


def scalar(graph: Graph, value: Value) -> float | None:
    """The number, if ``value`` is a constant of one element."""
    data = graph.constants.get(value)
    return float(data.reshape(())) if data is not None and data.size == 1 else None


def times_scalar(graph: Graph, value: Value) -> tuple[Value, float]:
    """(x, s) with value = x * s; (value, 1.0) otherwise."""
    for x, factor in either_order(value, "mul"):
        number = scalar(graph, factor)
        if number is not None:
            return x, number
    return value, 1.0


def through_views(value: Value) -> Value:
    """The value below any reshapes and casts that change nothing."""
    while value.node is not None and (
        isinstance(value.node.op, Reshape)
        or (isinstance(value.node.op, Cast) and value.node.inputs[0].type.dtype == value.type.dtype)
    ):
        value = value.node.inputs[0]
    return value


def below_views(value: Value) -> Value:
    """The value below reshapes that keep the last axis."""
    while (
        value.node is not None
        and isinstance(value.node.op, Reshape)
        and value.node.inputs[0].type.shape[-1:] == value.type.shape[-1:]
    ):
        value = value.node.inputs[0]
    return value


def last_axis(value: Value, axis: int) -> bool:
    return axis % value.type.rank == value.type.rank - 1


def slice_of(value: Value) -> tuple[Value, int, int] | None:
    """(x, start, stop), if ``value`` is a slice with step 1 of x's last axis."""
    node = producer(value, Slice)
    if node is None:
        return None
    op = node.op
    assert isinstance(op, Slice)
    if op.step != 1 or not last_axis(value, op.axis):
        return None
    return node.inputs[0], op.start, op.stop


def concat_of(value: Value) -> list[Value] | None:
    """The parts, if ``value`` concatenates along its last axis."""
    node = producer(value, Concat)
    if node is None:
        return None
    assert isinstance(node.op, Concat)
    return node.inputs if last_axis(value, node.op.axis) else None


def is_vector(value: Value, size: Dim) -> bool:
    """Whether ``value`` is a weight or constant with ``size`` elements, all along its last axis."""
    shape = value.type.shape
    return value.kind in ("weight", "constant") and shape[-1:] == (size,) and all(d == 1 for d in shape[:-1])
