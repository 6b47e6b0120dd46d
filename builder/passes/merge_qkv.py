"""Merge the q, k and v projections of a layer into one linear: one GEMM reads the input once."""

from __future__ import annotations

from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_expr import Stack
from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.fused import KVWrite, PagedAttention, RMSNorm, Rope
from ..ops.generic import Linear, Reshape, Slice
from .match import producer
from .names import merged_name, module_name
from .rewriting import Sweep, derived_weight, sweep

_BETWEEN: tuple[type[Op], ...] = (Reshape, RMSNorm, Rope)  # what may stand between a projection and attention


def apply(graph: Graph) -> None:
    """Linears that feed one layer's q, k and v from the same input become slices of one linear."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    groups: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.op, PagedAttention):
            parts = _projections(node)
            if parts is not None and _mergeable(graph, parts):
                groups[min(parts, key=order.__getitem__)] = parts
    merged: dict[Node, list[Value]] = {}

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        if node in groups:
            parts = groups[node]
            merged.update(zip(parts, ([v] for v in _merge(s, node.inputs[0], parts)), strict=True))
        return merged.get(node)

    sweep(graph, visit)


def _projections(attention: Node) -> list[Node] | None:
    """The linears behind q, k and v, in this order."""
    write = producer(attention.inputs[1], KVWrite)
    if write is None:
        return None
    found = []
    for value in (attention.inputs[0], *write.inputs):
        while value.node is not None and isinstance(value.node.op, _BETWEEN):
            value = value.node.inputs[0]
        node = producer(value, Linear)
        if node is None:
            return None
        found.append(node)
    return found


def _mergeable(graph: Graph, parts: list[Node]) -> bool:
    """Three different linears of one input, with weights of their own, all with or all without bias."""
    first = parts[0]
    return len(set(parts)) == len(parts) and all(
        part.inputs[0] is first.inputs[0]
        and part.op == first.op
        and all(v in graph.weights for v in part.inputs[1:])
        and part.inputs[1].type.dtype == first.inputs[1].type.dtype
        for part in parts
    )


def _merge(s: Sweep, x: Value, parts: list[Node]) -> list[Value]:
    """One linear over the stacked weights, and a slice of its output for each part."""
    op = parts[0].op
    weights = [_stacked(s.graph, [part.inputs[i] for part in parts]) for i in range(1, len(parts[0].inputs))]
    s.origin = module_name(weights[0].name)
    joined = s.emit(op, x, *weights)
    slices, offset = [], 0
    for part in parts:
        size = part.outputs[0].type.shape[-1]
        assert isinstance(size, int)
        slices.append(s.emit(Slice(joined.type.rank - 1, offset, offset + size), joined))
        offset += size
    return slices


def _stacked(graph: Graph, values: list[Value]) -> Value:
    expr = Stack(tuple(graph.weights[v] for v in values))
    rows = sum(d for d in (v.type.shape[0] for v in values) if isinstance(d, int))
    type_ = TensorType(values[0].type.dtype, (rows, *values[0].type.shape[1:]))
    suffix = ".bias" if type_.rank == 1 else ".weight"
    return derived_weight(graph, merged_name([v.name for v in values]) + suffix, type_, expr)
