"""Every linear over a stored weight becomes a GEMM over panels of 16 outputs.

A tied embedding then reads the same panels as the head, so the table is stored once.
"""

from __future__ import annotations

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_expr import Pack
from ..graph import Graph, Node, Value
from ..ops.fused import Embedding, Gemm
from ..ops.generic import Linear
from .names import module_name
from .rewriting import Sweep, derived_weight, sweep, with_settled_names


def apply(graph: Graph) -> None:
    """Linears of fp32 activations with an fp32 weight matrix; a linear of two activations stays generic."""
    tied = {n.inputs[1] for n in graph.nodes if isinstance(n.op, Linear) and _converts(graph, n)}

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        if isinstance(node.op, Embedding) and node.inputs[1] in tied:
            return [s.emit(node.op, node.inputs[0], _packed(graph, node.inputs[1]))]
        if isinstance(node.op, Linear) and _converts(graph, node):
            x, weight, *bias = node.inputs
            rows = weight.type.shape[0]
            assert isinstance(rows, int)
            op = Gemm(rows, DType.F32, DType.F32, bias=node.op.bias)
            return [s.emit(op, x, _packed(graph, weight), *bias)]
        return None

    with_settled_names(graph, lambda: sweep(graph, visit))


def _converts(graph: Graph, node: Node) -> bool:
    x, weight, *bias = node.inputs
    plain = x.type.dtype == DType.F32 and weight in graph.weights and weight.type.dtype == DType.F32
    return plain and weight.type.layout == "rows" and all(b.type.dtype == DType.F32 for b in bias)


def _packed(graph: Graph, weight: Value) -> Value:
    type_ = TensorType(weight.type.dtype, weight.type.shape, "panel16")
    return derived_weight(graph, module_name(weight.name), type_, Pack(graph.weights[weight], "panel16"))
