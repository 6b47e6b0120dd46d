"""Recognise RMSNorm: x * rsqrt(mean(x^2) + eps) * w."""

from __future__ import annotations

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary
from ..ops.fused import RMSNorm
from ..ops.generic import Reduce
from .match import binary, either_order, is_vector, last_axis, producer, scalar, unary
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """The product with the weight is the pattern's root; the weight may be one side or the other."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if not isinstance(node.op, Binary) or node.op.kind != "mul" or node.outputs[0].type.dtype != DType.F32:
        return None
    for normalised, weight in either_order(node.outputs[0], "mul"):
        found = match_normalised(s.graph, normalised)
        if found is None or not is_vector(weight, normalised.type.shape[-1]):
            continue
        if normalised.type.shape != node.outputs[0].type.shape:
            continue
        x, eps = found
        return [s.emit(RMSNorm(eps, DType.F32), x, s.view(weight, weight.type.shape[-1:]))]
    return None


def match_normalised(graph: Graph, value: Value) -> tuple[Value, float] | None:
    """(x, eps), if ``value`` is x * rsqrt(mean(x^2 over the last axis) + eps), or the same as a division by sqrt."""
    for x, inverse in either_order(value, "mul"):
        eps = _match_variance(graph, unary(inverse, "rsqrt"), x)
        if eps is not None:
            return x, eps
    divided = binary(value, "div")
    if divided is not None:
        eps = _match_variance(graph, unary(divided[1], "sqrt"), divided[0])
        if eps is not None:
            return divided[0], eps
    return None


def _match_variance(graph: Graph, variance: Value | None, x: Value) -> float | None:
    """eps, if ``variance`` is mean(x^2) + eps over x's last axis."""
    if variance is None:
        return None
    for mean, addend in either_order(variance, "add"):
        eps, node = scalar(graph, addend), producer(mean, Reduce)
        if eps is None or node is None:
            continue
        op = node.op
        assert isinstance(op, Reduce)
        over_last = op.kind == "mean" and len(op.axes) == 1 and op.keepdims and last_axis(x, op.axes[0])
        if over_last and unary(node.inputs[0], "square") is x:
            return eps
    return None
