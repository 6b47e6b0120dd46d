"""The invariants of a Graph, as a table. A pass that breaks one is a bug, and the error names the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..runtime.errors import BuildError, GraphError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_type import LAYOUTS, SYMBOLS, Dim, TensorType
from ..runtime.format.weight_eval import expr_type
from .graph import Graph, Node, Value
from .ops.fused import KVWrite, PagedAttention, QKVRopeWrite, ResolveTokens, Sample
from .ops.generic import Attention
from .ops.tokens import HISTORY

Problems = Iterator[str]


def verify(graph: Graph) -> None:
    """Raises GraphError with the first few broken invariants; returns if there are none."""
    problems = [f"{name}: {text}" for name, check in INVARIANTS.items() for text in check(graph)]
    if problems:
        shown = "\n".join(f"  {p}" for p in problems[:5])
        more = f"\n  ... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise GraphError(f"the graph breaks {len(problems)} invariants:\n{shown}{more}")


def where(node: Node) -> str:
    """How messages name a node."""
    results = ", ".join(f"%{v.name}" for v in node.outputs)
    return f"{results} = {node.op.name} (from {node.origin or 'no module'})"


def _inputs(graph: Graph) -> Problems:
    expected = [TensorType(DType.I32, ("T",))] * 2
    if [v.type for v in graph.inputs] != expected or any(v.kind != "input" for v in graph.inputs):
        yield f"inputs must be token_ids i32[T] and positions i32[T], got {graph.inputs}"


def _names(graph: Graph) -> Problems:
    seen: set[str] = set()
    for value in _all_values(graph):
        if value.name in seen:
            yield f"two values are named %{value.name}"
        seen.add(value.name)


def _producers(graph: Graph) -> Problems:
    for node in graph.nodes:
        for value in node.outputs:
            if value.kind != "node" or value.node is not node:
                yield f"%{value.name} does not point back to its producer {where(node)}"
    for kind, values in (("weight", graph.weights), ("constant", graph.constants)):
        for value in values:
            if value.kind != kind:
                yield f"%{value.name} is listed as a {kind} but is of kind {value.kind}"


def _order(graph: Graph) -> Problems:
    """SSA: one definition, before every use."""
    defined: set[Value] = {*graph.inputs, *graph.weights, *graph.constants}
    for node in graph.nodes:
        for value in node.inputs:
            if value not in defined:
                yield f"{where(node)} reads %{value.name}, which is not defined before it"
        for value in node.outputs:
            if value in defined:
                yield f"%{value.name} is defined twice, again by {where(node)}"
            defined.add(value)
    for value in graph.outputs:
        if value not in defined:
            yield f"output %{value.name} is not defined"
    if not graph.outputs:
        yield "there are no outputs"


def _types(graph: Graph) -> Problems:
    """The types of a node's results are those that its op infers."""
    for node in graph.nodes:
        try:
            expected = node.op.infer(*(v.type for v in node.inputs))
        except GraphError as error:
            yield f"{where(node)}: {error}"
            continue
        actual = tuple(v.type for v in node.outputs)
        if actual != expected:
            yield f"{where(node)} has types {_list(actual)}, its op gives {_list(expected)}"


def _dims(graph: Graph) -> Problems:
    for value in _all_values(graph):
        if value.type.layout not in LAYOUTS:
            yield f"%{value.name} has unknown layout {value.type.layout!r}"
        for dim in value.type.shape:
            if (isinstance(dim, str) and dim not in SYMBOLS) or (isinstance(dim, int) and dim < 0):
                yield f"%{value.name}: {value.type} has the impossible dim {dim!r}"


def _weights(graph: Graph) -> Problems:
    for value, expr in graph.weights.items():
        try:
            type_ = expr_type(expr)
        except BuildError as error:
            yield f"weight %{value.name}: {error}"
            continue
        if type_ != value.type:
            yield f"weight %{value.name} is declared {value.type}, its expression gives {type_}"


def _constants(graph: Graph) -> Problems:
    for value, data in graph.constants.items():
        if any(isinstance(d, str) for d in value.type.shape) or value.type.layout != "rows":
            yield f"constant %{value.name} has type {value.type}; constants have constant dims and layout rows"
        elif data.shape != value.type.shape or data.dtype != value.type.dtype.numpy:
            yield f"constant %{value.name} is declared {value.type}, its data is {data.dtype}{list(np.shape(data))}"


def _states(graph: Graph) -> Problems:
    """Every state an op names exists, fits the op, and belongs to a known group."""
    specs = {spec.name: spec for spec in graph.states}
    if len(specs) != len(graph.states):
        yield "two states share a name"
    for spec in graph.states:
        if spec.kind == "paged_kv" and not 0 <= spec.group < len(graph.kv_groups):
            yield f"state {spec.name} is of KV group {spec.group}; there are {len(graph.kv_groups)}"
    for node in graph.nodes:
        name = state_of(node)
        if name is None:
            continue
        if name not in specs:
            yield f"{where(node)} uses state {name!r}, which does not exist"
            continue
        spec, op = specs[name], node.op
        wanted: tuple[str, DType, tuple[Dim, ...]]
        match op:
            case QKVRopeWrite() | PagedAttention():
                wanted = ("paged_kv", op.kv_dtype, (op.kv_heads, op.head_dim))
            case KVWrite():
                wanted = ("paged_kv", op.dtype, (op.kv_heads, op.head_dim))
            case Attention():
                wanted = ("paged_kv", spec.dtype, (node.inputs[1].type.shape[1], node.inputs[1].type.shape[3]))
            case _:
                wanted = ("slot", DType.I32, spec.shape)
        if (spec.kind, spec.dtype, spec.shape) != wanted:
            yield f"{where(node)} does not fit state {spec}"
        if isinstance(op, PagedAttention) and spec.group < len(graph.kv_groups):
            window = graph.kv_groups[spec.group].window
            if window != op.window:
                yield f"{where(node)} has window {op.window}, its KV group has {window}"


def _effects(graph: Graph) -> Problems:
    """Each KV state is written once, and read through the token of that write."""
    writers: dict[str, Node] = {}
    for node in graph.nodes:
        if isinstance(node.op, KVWrite | QKVRopeWrite | Attention):
            if node.op.state in writers:
                yield f"{where(node)} writes {node.op.state} a second time"
            writers[node.op.state] = node
        if isinstance(node.op, PagedAttention):
            writer = node.inputs[1].node if len(node.inputs) > 1 else None
            if writer is None or writer is not writers.get(node.op.state):
                yield f"{where(node)} reads {node.op.state} without the token of its write"


def _tail(graph: Graph) -> Problems:
    """Values with C exist only from gather_rows on; resolve_tokens is first and sample last, at most once each."""
    gathered = False
    for index, node in enumerate(graph.nodes):
        gathered = gathered or node.op.name == "gather_rows"
        if not gathered and any("C" in v.type.shape for v in node.outputs):
            yield f"{where(node)} has rows (C) before any were gathered"
        if isinstance(node.op, ResolveTokens) and index != 0:
            yield f"{where(node)} must be the first node"
        if isinstance(node.op, Sample) and node is not graph.nodes[-1]:
            yield f"{where(node)} must be the last node"


def state_of(node: Node) -> str | None:
    """The state that a node's op uses, if any."""
    match node.op:
        case Attention() | KVWrite() | QKVRopeWrite() | PagedAttention():
            return node.op.state
        case ResolveTokens() | Sample():
            return HISTORY
    return None


def _all_values(graph: Graph) -> list[Value]:
    made = [v for node in graph.nodes for v in node.outputs]
    return [*graph.inputs, *graph.weights, *graph.constants, *made]


def _list(types: tuple[TensorType, ...]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


INVARIANTS: dict[str, Callable[[Graph], Problems]] = {
    "inputs": _inputs,
    "unique names": _names,
    "producers": _producers,
    "definition before use": _order,
    "inferred types": _types,
    "dims": _dims,
    "weight types": _weights,
    "constant types": _constants,
    "states": _states,
    "effects": _effects,
    "tail": _tail,
}
