"""Move the choice of rows up to the last layer's attention: what follows is computed for wanted rows only.

From here on the graph is the plan's tail, which runs once for each chunk of C rows.
"""

from __future__ import annotations

from dataclasses import replace

from ...runtime.errors import GraphError
from ...runtime.format.tensor_type import Dim
from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.elementwise import Binary, Cast, Unary, Where
from ..ops.fused import GatherRows, RMSNorm
from ..ops.generic import Concat, Expand, Linear, Reduce, Reshape, Slice, Softmax
from .rewriting import Sweep

#: Ops that compute each row (T) by itself, so rows can be picked before them.
_ROW_LOCAL = (Binary, Cast, Unary, Where, Concat, Expand, Linear, Reduce, Reshape, Slice, Softmax, RMSNorm)


def apply(graph: Graph) -> None:
    """Logits [1,T,V] become [C,V]; all that leads to them alone is computed for the C rows."""
    if len(graph.outputs) != 1:
        raise GraphError(f"a model has one output, its logits; this graph has {len(graph.outputs)}")
    logits = graph.outputs[0]
    tail = _tail(graph, logits)
    s = Sweep(graph)
    s.nodes = [node for node in graph.nodes if node not in tail]
    order = [node for node in graph.nodes if node in tail]
    rows: dict[Value, Value] = {}

    def picked(value: Value) -> Value:
        """The wanted rows of a value from before the tail; values without T are the same for every row."""
        if value not in rows:
            rows[value] = _gather(s, value) if "T" in value.type.shape else value
        return rows[value]

    for node in order:
        s.origin = node.origin
        outputs = s.emit_all(_for_rows(node.op), [picked(v) for v in node.inputs])
        rows.update(zip(node.outputs, outputs, strict=True))
    result = picked(logits)
    graph.outputs = [s.view(result, ("C", result.type.shape[-1]))]
    graph.nodes = s.nodes


def _tail(graph: Graph, logits: Value) -> set[Node]:
    """All nodes that only the logits need, row by row: the head, the final norm, and the last layer from the end of
    its attention on. Of a prompt's last layer only K and V are needed for all tokens."""
    users = graph.users()
    tail: set[Node] = set()
    for node in reversed(graph.nodes):
        (value,) = node.outputs if len(node.outputs) == 1 else (None,)
        if value is None or not isinstance(node.op, _ROW_LOCAL) or "T" not in value.type.shape:
            continue
        readers = users.get(value, [])
        if value is logits or (readers and all(reader in tail for reader in readers)):
            tail.add(node)
    return tail


def _gather(s: Sweep, value: Value) -> Value:
    """[.., T, H] (leading dims 1) -> rows, with T replaced by C in the same place."""
    shape = value.type.shape
    at = shape.index("T")
    if any(d != 1 for d in shape[:at]):
        raise GraphError(f"cannot pick rows of %{value.name}: {value.type}: the token axis is not the first")
    width = 1
    for dim in shape[at + 1 :]:
        assert isinstance(dim, int)
        width *= dim
    gathered = s.emit(GatherRows(), s.view(value, ("T", width)))
    return s.view(gathered, _to_rows(shape))


def _to_rows(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple("C" if d == "T" else d for d in shape)


def _for_rows(op: Op) -> Op:
    """The same op with C in place of T."""
    return replace(op, shape=_to_rows(op.shape)) if isinstance(op, Reshape | Expand) else op
