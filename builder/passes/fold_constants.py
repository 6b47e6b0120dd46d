"""Work on weights and constants is done at build time: views and casts of weights become weight expressions."""

from __future__ import annotations

import math

import numpy as np

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_expr import AddScalar, CastTo, Permute, Reshaped, WeightExpr
from ...runtime.step import StepInputs, greedy_sampling
from ..graph import Graph, Node, Value
from ..ops.base import StepContext
from ..ops.elementwise import Binary, Cast
from ..ops.generic import Linear, MatMul, Reshape, Transpose
from .match import scalar
from .rewriting import Sweep, derived_weight, sweep, with_settled_names

_LARGEST = 1 << 22  # elements of a constant that folding may make


def apply(graph: Graph) -> None:
    """Fold ops whose operands are all constants, and views, casts and additions on a single weight."""
    with_settled_names(graph, lambda: sweep(graph, _visit))


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if node.op.has_effect or not node.inputs:
        return None
    if isinstance(node.op, Binary) and node.op.kind == "add" and node.inputs[1] in s.graph.weights:
        node.inputs.reverse()  # the weight first
    if all(v.kind == "constant" for v in node.inputs) and _foldable(node):
        results = node.op.reference(_NO_STEP, *(s.graph.constants[v] for v in node.inputs))
        return [s.constant(np.ascontiguousarray(r), v.type) for r, v in zip(results, node.outputs, strict=True)]
    if isinstance(node.op, MatMul):
        return _matmul(s, node)
    expr = _weight_expr(s.graph, node)
    if expr is None:
        return None
    return [derived_weight(s.graph, node.inputs[0].name, node.outputs[0].type, expr)]


def _foldable(node: Node) -> bool:
    """Constants of known, moderate size come out."""
    shapes = [v.type.shape for v in node.outputs]
    if any(isinstance(d, str) for shape in shapes for d in shape):
        return False
    return all(math.prod(d for d in shape if isinstance(d, int)) <= _LARGEST for shape in shapes)


def _weight_expr(graph: Graph, node: Node) -> WeightExpr | None:
    """The expression that is the node's result, if the node works on one weight only."""
    x, op = node.inputs[0], node.op
    known = graph.weights.get(x)
    if known is None or x.type.layout != "rows":
        return None
    match op:
        case Reshape(shape=shape):
            return Reshaped(known, tuple(d for d in shape if isinstance(d, int)))
        case Transpose(axes=axes):
            return Permute(known, axes)
        case Cast(dtype=dtype):
            return CastTo(known, dtype)
        case Binary(kind="add") if x.type.dtype == DType.F32 and node.outputs[0].type.shape == x.type.shape:
            # weights stored as w - 1 (the Gemma norm)
            number = scalar(graph, node.inputs[1])
            return None if number is None else AddScalar(known, number)
    return None


def _matmul(s: Sweep, node: Node) -> list[Value] | None:
    """x @ w with a weight matrix w [K,N] is a linear with w transposed."""
    x, w = node.inputs
    known = s.graph.weights.get(w)
    if known is None or w.type.rank != 2:
        return None
    type_ = TensorType(w.type.dtype, w.type.shape[::-1])
    return [s.emit(Linear(), x, derived_weight(s.graph, w.name, type_, Permute(known, (1, 0))))]


def _empty_step() -> StepInputs:
    none = np.zeros(0, np.int32)
    return StepInputs(none, none, np.zeros(1, np.int32), none, (), none, none, greedy_sampling(0))


#: Ops on constants see no step: constants have no symbolic dims.
_NO_STEP = StepContext(_empty_step(), {}, {}, 16)
