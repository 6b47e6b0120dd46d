"""Recognise rotary position embedding: the cos/sin table, its application, and partial rotation.

The library's form is x * C + rotate_half(x) * S with C = cos(concat(a, a)) * scale and a = positions * inv_freq.
The table then holds each angle once, and the halves of x are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary, Cast
from ..ops.fused import Rope, RopeTable
from ..ops.generic import Concat, Reshape
from .match import below_views, concat_of, either_order, is_vector, slice_of, times_scalar, unary
from .rewriting import Sweep, sweep


@dataclass(frozen=True)
class _Table:
    """What a cos or sin factor is made from."""

    kind: str  # "cos" | "sin"
    inv_freq: Value
    scale: float


def apply(graph: Graph) -> None:
    """Rotations become rope nodes; the table's node is made at its first use and then shared by all layers."""
    tables: dict[tuple[Value, float], list[Value]] = {}

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        if isinstance(node.op, Binary) and node.op.kind == "add":
            return _rotation(s, node, tables)
        if isinstance(node.op, Concat):
            return _partial(s, node)
        return None

    sweep(graph, visit)


def _rotation(s: Sweep, node: Node, tables: dict[tuple[Value, float], list[Value]]) -> list[Value] | None:
    """add(mul(x, C), mul(rotate_half(x), S)) -> rope(x, cos, sin)."""
    for first, second in either_order(node.outputs[0], "add"):
        for x, cos_factor in either_order(first, "mul"):
            cos = _match_table(s.graph, cos_factor)
            if cos is None or cos.kind != "cos" or x.type.rank not in (2, 3) or x.type.dtype != DType.F32:
                continue
            for turned, sin_factor in either_order(second, "mul"):
                sin = _match_table(s.graph, sin_factor)
                if sin != _Table("sin", cos.inv_freq, cos.scale) or not _is_rotate_half(turned, x):
                    continue
                tokens, dim = x.type.shape[0], x.type.shape[-1]
                # A single head has lost its axis.
                places = ((tokens, 1, dim), (1, dim)) if x.type.rank == 3 else ((tokens, dim), (1, dim))
                if cos_factor.type.shape not in places or sin_factor.type.shape not in places or dim != _dim(cos):
                    continue
                table = tables.get((cos.inv_freq, cos.scale))
                if table is None:
                    table = _make_table(s, cos)
                    tables[cos.inv_freq, cos.scale] = table
                heads = x.type.shape[1] if x.type.rank == 3 else 1
                rotated = s.emit(Rope(_dim(cos)), s.view(x, (tokens, heads, dim)), *table)
                return [s.view(rotated, x.type.shape)]
    return None


def _make_table(s: Sweep, table: _Table) -> list[Value]:
    """The table's node, at the very front: it depends on positions only, so it can overlap with other work there."""
    origin, s.origin = s.origin, "rope"
    late, s.nodes = s.nodes, []
    inv_freq = s.view(table.inv_freq, (table.inv_freq.type.shape[-1],))
    made = s.emit_all(RopeTable(table.scale), [s.graph.inputs[1], inv_freq])
    s.nodes += late
    s.origin = origin
    return made


def _dim(table: _Table) -> int:
    half = table.inv_freq.type.shape[-1]
    assert isinstance(half, int)
    return 2 * half


def _is_rotate_half(value: Value, x: Value) -> bool:
    """concat(-x[half:], x[:half]) on the last axis."""
    parts = concat_of(value)
    if parts is None or len(parts) != 2:
        return False
    negated = unary(parts[0], "neg")
    dim = x.type.shape[-1]
    if negated is None or not isinstance(dim, int):
        return False
    return slice_of(negated) == (x, dim // 2, dim) and slice_of(parts[1]) == (x, 0, dim // 2)


def _match_table(graph: Graph, value: Value) -> _Table | None:
    """Read a factor of the rotation back to positions and inv_freq, through views and scaling."""
    value, outer = times_scalar(graph, below_views(value))
    value, inner = below_views(value), 1.0
    parts = concat_of(value)
    if parts is not None:  # concat(cos(a), cos(a))
        if len(parts) != 2 or parts[0] is not parts[1]:
            return None
        value, inner = times_scalar(graph, below_views(parts[0]))
    for kind in ("cos", "sin"):
        angle = unary(value, kind)
        if angle is None:
            continue
        inv_freq = _match_angle(graph, angle, repeated=parts is None)
        return None if inv_freq is None else _Table(kind, inv_freq, outer * inner)
    return None


def _match_angle(graph: Graph, angle: Value, repeated: bool) -> Value | None:
    """inv_freq, if ``angle`` is positions * inv_freq (each twice, side by side, when ``repeated``)."""
    angle = below_views(angle)
    if repeated:
        parts = concat_of(angle)
        if parts is None or len(parts) != 2 or parts[0] is not parts[1]:
            return None
        angle = below_views(parts[0])
    for positions, inv_freq in either_order(angle, "mul"):
        half = angle.type.shape[-1]
        if is_vector(inv_freq, half) and positions.type.shape[-1:] == (1,) and _is_positions(graph, positions):
            return inv_freq
    return None


def _is_positions(graph: Graph, value: Value) -> bool:
    """The step's positions, as fp32, in any view (they are one-dimensional, so every view is in order)."""
    while value.node is not None and isinstance(value.node.op, Reshape | Cast):
        if isinstance(value.node.op, Cast) and value.node.op.dtype not in (DType.F32, DType.I64, DType.I32):
            return False
        value = value.node.inputs[0]
    return value is graph.inputs[1]


def _partial(s: Sweep, node: Node) -> list[Value] | None:
    """concat(rope(x[:R]), x[R:]) -> rope of the first R features of x."""
    parts = concat_of(node.outputs[0])
    if parts is None or len(parts) != 2 or parts[0].node is None or not isinstance(parts[0].node.op, Rope):
        return None
    rotated = parts[0].node
    head, tail = slice_of(rotated.inputs[0]), slice_of(parts[1])
    if head is None or tail is None or head[0] is not tail[0]:
        return None
    x = head[0]
    if (head[1], tail[1], tail[2]) != (0, head[2], x.type.shape[-1]):
        return None
    return [s.emit(rotated.op, x, *rotated.inputs[1:])]
