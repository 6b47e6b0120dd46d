"""activation(x @ gate) * (x @ up) becomes one gated GEMM over interleaved weights."""

from __future__ import annotations

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_expr import Interleave, Pack
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary, Unary
from ..ops.fused import Gemm
from ..ops.gemm import ACTIVATIONS, GATE_ROWS
from ..ops.generic import Linear
from .match import either_order, producer
from .names import merged_name
from .rewriting import Sweep, derived_weight, sweep


def apply(graph: Graph) -> None:
    """The root is the product. Both linears must have weights of their own and no other reader."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if not isinstance(node.op, Binary) or node.op.kind != "mul":
        return None
    for activated, linear in either_order(node.outputs[0], "mul"):
        act, up = producer(activated, Unary), producer(linear, Linear)
        if act is None or up is None or not isinstance(act.op, Unary) or act.op.kind not in ACTIVATIONS:
            continue
        gate = producer(act.inputs[0], Linear)
        if gate is None or not _alike(s.graph, gate, up):
            continue
        if all(s.used_once(v) for v in (activated, linear, gate.outputs[0])):
            return [_gated(s, gate, up, act.op.kind)]
    return None


def _alike(graph: Graph, gate: Node, up: Node) -> bool:
    return (
        gate is not up
        and gate.op == up.op
        and gate.inputs[0] is up.inputs[0]
        and gate.inputs[0].type.dtype == DType.F32
        and [v.type for v in gate.inputs] == [v.type for v in up.inputs]
        and all(v in graph.weights for n in (gate, up) for v in n.inputs[1:])
    )


def _gated(s: Sweep, gate: Node, up: Node, activation: str) -> Value:
    out_features = gate.outputs[0].type.shape[-1]
    bias = len(gate.inputs) == 3
    assert isinstance(out_features, int)
    rows = 2 * -(-out_features // GATE_ROWS) * GATE_ROWS
    name = merged_name([gate.inputs[1].name, up.inputs[1].name])
    parts = [Interleave(tuple(s.graph.weights[n.inputs[i]] for n in (gate, up)), GATE_ROWS) for i in range(1, 2 + bias)]
    depth = gate.inputs[1].type.shape[1]
    matrix = TensorType(DType.F32, (rows, depth), "panel16")
    operands = [gate.inputs[0], derived_weight(s.graph, name, matrix, Pack(parts[0], "panel16"))]
    if bias:
        operands.append(derived_weight(s.graph, name + ".bias", TensorType(DType.F32, (rows,)), parts[1]))
    op = Gemm(out_features, DType.F32, DType.F32, bias=bias, activation=activation, gated=True)
    s.origin = name
    return s.emit(op, *operands)
