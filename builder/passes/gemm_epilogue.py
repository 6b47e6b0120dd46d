"""Work on a GEMM's result that nobody else reads is done before the result is stored.

In the order that the op fixes: bias, activation, soft cap, scale, residual.
"""

from __future__ import annotations

from dataclasses import replace

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary, Unary
from ..ops.fused import Gemm
from ..ops.gemm import ACTIVATIONS
from .match import binary, either_order, is_vector, producer, scalar, unary
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """One sweep takes in whole chains, because a fused GEMM is again a GEMM for the next node."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if not isinstance(node.op, Unary | Binary) or node.outputs[0].type.dtype != DType.F32:
        return None
    for rule in (_activation, _soft_cap, _bias, _scale, _residual):
        fused = rule(s, node)
        if fused is not None:
            return [fused]
    return None


def _gemm(s: Sweep, value: Value) -> tuple[Node, Gemm] | None:
    """The GEMM that makes ``value`` for one reader only; what is fused into it keeps its origin."""
    node = producer(value, Gemm)
    if node is None or not isinstance(node.op, Gemm) or not s.used_once(value) or node.op.residual:
        return None
    s.origin = node.origin
    return node, node.op


def _activation(s: Sweep, node: Node) -> Value | None:
    if not isinstance(node.op, Unary) or node.op.kind not in ACTIVATIONS:
        return None
    found = _gemm(s, node.inputs[0])
    if found is None:
        return None
    gemm, op = found
    if op.activation != "none" or op.gated or op.softcap is not None or op.scale != 1.0:
        return None
    return s.emit(replace(op, activation=node.op.kind), *gemm.inputs)


def _soft_cap(s: Sweep, node: Node) -> Value | None:
    """cap * tanh(y / cap), the division possibly written as a product with the exact reciprocal."""
    for turned, factor in either_order(node.outputs[0], "mul"):
        cap, inner = scalar(s.graph, factor), unary(turned, "tanh")
        if cap is None or inner is None or not s.used_once(turned) or not s.used_once(inner):
            continue
        divided = binary(inner, "div")
        if divided is None or scalar(s.graph, divided[1]) != cap:
            continue
        found = _gemm(s, divided[0])
        if found is not None and found[1].softcap is None and found[1].scale == 1.0:
            gemm, op = found
            return s.emit(replace(op, softcap=cap), *gemm.inputs)
    return None


def _bias(s: Sweep, node: Node) -> Value | None:
    """y + vector, when y is still the bare product."""
    for value, vector in either_order(node.outputs[0], "add"):
        found = _gemm(s, value)
        if found is None or not is_vector(vector, value.type.shape[-1]) or vector.type.dtype != DType.F32:
            continue
        gemm, op = found
        if op.bias or op.gated or op.activation != "none" or op.softcap is not None or op.scale != 1.0:
            continue
        at = 2 + (op.prologue != "none")
        bias = s.view(vector, vector.type.shape[-1:])
        return s.emit(replace(op, bias=True), *gemm.inputs[:at], bias, *gemm.inputs[at:])
    return None


def _scale(s: Sweep, node: Node) -> Value | None:
    for value, factor in either_order(node.outputs[0], "mul"):
        number, found = scalar(s.graph, factor), _gemm(s, value)
        if number is None or found is None or node.outputs[0].type != value.type:
            continue
        gemm, op = found
        if op.scale == 1.0:
            return s.emit(replace(op, scale=number), *gemm.inputs)
    return None


def _residual(s: Sweep, node: Node) -> Value | None:
    for value, other in either_order(node.outputs[0], "add"):
        found = _gemm(s, value)
        if found is None or other.type != value.type or other is value:
            continue
        gemm, op = found
        return s.emit(replace(op, residual=True), *gemm.inputs, other)
    return None
