"""Drop the leading batch dim of 1: a step's sequences are packed in one row, so tokens become the first axis."""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.elementwise import Binary, Cast, Unary, Where
from ..ops.fused import Embedding
from ..ops.generic import Concat, Expand, Linear, MatMul, Reduce, Slice, Softmax, Transpose
from .rewriting import Sweep, until_stable

_ELEMENTWISE = (Binary, Cast, Unary, Where)


def apply(graph: Graph) -> None:
    """Each op on [1,...] becomes the op on [...] between two views; neighbouring views cancel."""
    until_stable(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    out = node.outputs[0]
    if out.type.rank < 2 or out.type.shape[0] != 1 or not any(isinstance(d, str) for d in out.type.shape):
        return None
    op = _squeezed_op(node)
    if op is None:
        return None
    inputs = [_squeezed(s, node, index) for index in range(len(node.inputs))]
    return [s.view(s.emit(op, *inputs), out.type.shape)]


def _squeezed(s: Sweep, node: Node, index: int) -> Value:
    """An operand without its leading 1 (operands of lower rank broadcast and stay as they are)."""
    value = node.inputs[index]
    weight_operand = isinstance(node.op, Linear | Embedding) and index > 0
    if weight_operand or (isinstance(node.op, _ELEMENTWISE) and value.type.rank < node.outputs[0].type.rank):
        return value
    return s.view(value, value.type.shape[1:])


def _squeezed_op(node: Node) -> Op | None:
    """The op for one axis less, or None if the op needs its first axis."""
    op, rank = node.op, node.inputs[0].type.rank
    if isinstance(op, _ELEMENTWISE):
        return op
    if isinstance(op, Linear | Embedding):
        return op if node.inputs[0].type.shape[:1] == (1,) else None
    if isinstance(op, MatMul):
        ranks = {v.type.rank for v in node.inputs}
        return op if ranks == {rank} and rank > 2 and all(v.type.shape[0] == 1 for v in node.inputs) else None
    if isinstance(op, Transpose):
        return Transpose(tuple(a - 1 for a in op.axes[1:])) if op.axes[0] == 0 else None
    if isinstance(op, Expand):
        return Expand(op.shape[1:]) if rank == len(op.shape) else None
    if isinstance(op, Slice | Concat | Softmax):
        axis = op.axis % rank
        return replace(op, axis=axis - 1) if axis > 0 else None
    if isinstance(op, Reduce):
        axes = [axis % rank for axis in op.axes]
        return replace(op, axes=tuple(a - 1 for a in axes)) if min(axes) > 0 else None
    return None
