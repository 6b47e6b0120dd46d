"""Matrices that every reader takes so are stored in 12 bits an element (layout packed12), where no value is lost.

What is read from memory for each token is a quarter less then. Whether a matrix fits is known from its values alone,
so each is looked at once; one that does not stays in panel16, as does one that would not get smaller (few outputs fill
their panel of 32 with zeros). Tables that only an embedding reads stay row-major: a token reads one row of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_source import TensorSource
from ...runtime.format.tensor_type import TensorType, layout_problem
from ...runtime.format.weight_eval import fits
from ...runtime.format.weight_expr import Pack
from ..graph import Graph, Node, Value

LAYOUT = "packed12"

#: Whether some kernel of every target takes a node with operands of these types.
Reads = Callable[[Node, Sequence[TensorType]], bool]


def apply(graph: Graph, source: TensorSource | None, reads: Reads | None) -> None:
    """Does nothing where it is not known which kernels there will be, or what the values are."""
    if source is None or reads is None:
        return
    readers = graph.users()
    for value, expr in graph.weights.items():
        if not isinstance(expr, Pack) or expr.layout != "panel16":
            continue
        packed = replace(value.type, layout=LAYOUT)
        if layout_problem(packed) or packed.nbytes() >= value.type.nbytes():
            continue
        if all(_takes(reads, node, value, packed) for node in readers[value]) and fits(expr.x, source, LAYOUT):
            value.type, graph.weights[value] = packed, Pack(expr.x, LAYOUT)


def note(graph: Graph) -> str | None:
    """What the build report says of bf16 matrices that were not packed; None if all were, or there are none."""
    layouts = [value.type.layout for value in graph.weights if value.type.dtype is DType.BF16]
    kept, packed = layouts.count("panel16"), layouts.count(LAYOUT)
    if not kept:
        return None
    return (
        f"{kept} of {kept + packed} matrices stay in 16 bits an element: in 12 their values do not fit, or they would"
        " be no smaller, or a target cannot read them"
    )


def _takes(reads: Reads, node: Node, value: Value, packed: TensorType) -> bool:
    return reads(node, [packed if operand is value else operand.type for operand in node.inputs])
