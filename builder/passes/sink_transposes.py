"""Move transpositions below elementwise work, towards attention, where they cancel or become strides.

A model computes q, k, v as [heads, T, D]; kernels want [T, heads, D], which is how the projections write them.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.elementwise import Binary, Cast, Unary, Where
from ..ops.generic import Concat, Reduce, Slice, Softmax, Transpose
from .canonicalise import transposed_view
from .match import producer
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """op(transpose(x), ...) becomes transpose(op(x, ...)) where the other operands need no copy for it."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    axes = _common_axes(node)
    if axes is None:
        return None
    op = _moved_op(node.op, axes)
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    if op is None:
        return None
    plans = [_untransposed(value, axes, inverse) for value in node.inputs]
    if any(plan is None for plan in plans):
        return None
    inputs = [s.view(value, shape) for value, shape in (plan for plan in plans if plan is not None)]
    return [s.transpose(s.emit(op, *inputs), axes)]


def _common_axes(node: Node) -> tuple[int, ...] | None:
    """The permutation of the first transposed operand that has the result's rank."""
    if not isinstance(node.op, Binary | Cast | Unary | Where | Concat | Slice | Softmax | Reduce):
        return None
    for value in node.inputs:
        found = producer(value, Transpose)
        if found is not None and isinstance(found.op, Transpose) and value.type.rank == node.outputs[0].type.rank:
            return found.op.axes
    return None


def _untransposed(
    value: Value, axes: tuple[int, ...], inverse: tuple[int, ...]
) -> tuple[Value, tuple[int | str, ...]] | None:
    """(source, shape to view it as) of an operand before the transposition; None if it would have to be copied."""
    found = producer(value, Transpose)
    if found is not None and isinstance(found.op, Transpose) and found.op.axes == axes:
        return found.inputs[0], found.inputs[0].type.shape
    shape = transposed_view(value, inverse)
    return None if shape is None else (value, shape)


def _moved_op(op: Op, axes: tuple[int, ...]) -> Op | None:
    """The op on the untransposed operands: axis numbers follow the permutation."""
    if isinstance(op, Slice | Concat | Softmax):
        return replace(op, axis=axes[op.axis % len(axes)])
    if isinstance(op, Reduce):
        return replace(op, axes=tuple(axes[a % len(axes)] for a in op.axes)) if op.keepdims else None
    return op
