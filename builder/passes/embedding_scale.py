"""A constant factor on the embedding is applied as rows are read."""

from __future__ import annotations

from dataclasses import replace

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.elementwise import Binary
from ..ops.fused import Embedding
from .match import either_order, producer, scalar
from .rewriting import Sweep, sweep


def apply(graph: Graph) -> None:
    """embedding(ids, table) * s -> embedding with scale s, where nothing else reads the unscaled rows."""
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    if not isinstance(node.op, Binary):
        return None
    for rows, factor in either_order(node.outputs[0], "mul"):
        number, embedding = scalar(s.graph, factor), producer(rows, Embedding)
        if number is None or embedding is None or not isinstance(embedding.op, Embedding) or not s.used_once(rows):
            continue
        if embedding.op.scale == 1.0 and embedding.op.dtype == DType.F32 and rows.type == node.outputs[0].type:
            return [s.emit(replace(embedding.op, scale=number), *embedding.inputs)]
    return None
