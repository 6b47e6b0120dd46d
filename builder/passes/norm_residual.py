"""A sum with a norm's result that nobody else reads is made before the result is stored (norms after a block)."""

from __future__ import annotations

from dataclasses import replace

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary
from ..ops.fused import RMSNorm
from .match import either_order, producer
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """add(rms_norm(x, w), r) -> rms_norm(x, w, r), with r of the same shape."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if not isinstance(node.op, Binary) or node.outputs[0].type.dtype != DType.F32:
        return None
    for value, other in either_order(node.outputs[0], "add"):
        norm = producer(value, RMSNorm)
        if norm is None or not isinstance(norm.op, RMSNorm) or norm.op.residual or not s.used_once(value):
            continue
        if other.type == value.type and other is not value:
            s.origin = norm.origin
            return [s.emit(replace(norm.op, residual=True), *norm.inputs, other)]
    return None
