"""A norm that only GEMMs read is done by each GEMM as it loads its input: the normalised rows are never stored."""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph, Node, Value
from ..ops.fused import Gemm, RMSNorm
from .match import producer
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """Gemm(rms_norm(x)) -> Gemm with prologue, where every reader of the norm is such a GEMM."""
    users = graph.users()
    kept = set(graph.outputs)
    fusible = {
        node.outputs[0]
        for node in graph.nodes
        if isinstance(node.op, RMSNorm)
        and node.outputs[0] not in kept
        and all(_takes(user, node.outputs[0]) for user in users.get(node.outputs[0], []))
    }

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        if not isinstance(node.op, Gemm) or node.inputs[0] not in fusible:
            return None
        norm = producer(node.inputs[0], RMSNorm)
        if norm is None or not isinstance(norm.op, RMSNorm):
            return None
        x, weight = norm.inputs
        op = replace(node.op, prologue="rms_norm", eps=norm.op.eps)
        return [s.emit(op, x, node.inputs[1], weight, *node.inputs[2:])]

    sweep(graph, visit)


def _takes(user: Node, value: Value) -> bool:
    """Whether the user is a GEMM that reads the value as its x only, and has no prologue yet."""
    reads_as_x = user.inputs[0] is value and all(v is not value for v in user.inputs[1:])
    return isinstance(user.op, Gemm) and user.op.prologue == "none" and reads_as_x
