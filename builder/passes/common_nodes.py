"""Equal work is done once: nodes with the same op on the same operands, and equal constants and weights."""

from __future__ import annotations

from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_eval import simplify
from ...runtime.format.weight_expr import WeightExpr
from ..graph import Graph, Node, Value
from ..ops.base import Op
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """Later duplicates read the first one's results. Ops that see or change state are left alone."""
    same = _shared_sources(graph)
    seen: dict[tuple[Op, tuple[Value, ...]], list[Value]] = {}

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        node.inputs = [same.get(v, v) for v in node.inputs]
        if node.op.has_effect or node.op.is_sequence_op:
            return None
        key = (node.op, tuple(node.inputs))
        first = seen.setdefault(key, node.outputs)
        return None if first is node.outputs else first

    sweep(graph, visit)


def _shared_sources(graph: Graph) -> dict[Value, Value]:
    """Weights and constants that equal an earlier one -> that earlier one."""
    same: dict[Value, Value] = {}
    constants: dict[tuple[TensorType, bytes], Value] = {}
    for value, data in graph.constants.items():
        first = constants.setdefault((value.type, data.tobytes()), value)
        if first is not value:
            same[value] = first
    weights: dict[tuple[TensorType, WeightExpr], Value] = {}
    for value, expr in graph.weights.items():
        first = weights.setdefault((value.type, simplify(expr)), value)
        if first is not value:
            same[value] = first
    return same
