"""How passes rewrite: one sweep over the nodes in order, each visit may put new nodes in a node's place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.tensor_type import Dim, TensorType
from ...runtime.format.weight_expr import WeightExpr
from ..graph import Graph, Node, Value
from ..ops.base import Op
from ..ops.generic import Reshape, Transpose


class Sweep:
    """The state of one sweep. A visited node's inputs are already rewritten; new nodes land just before it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.origin = ""
        self._replaced: dict[Value, Value] = {}
        self._uses: dict[Value, int] = {}
        for node in graph.nodes:
            for value in node.inputs:
                self._uses[value] = self._uses.get(value, 0) + 1
        for value in graph.outputs:
            self._uses[value] = self._uses.get(value, 0) + 1

    def emit(self, op: Op, *inputs: Value) -> Value:
        """Add a node; returns its first output."""
        return self.emit_all(op, inputs)[0]

    def emit_all(self, op: Op, inputs: Iterable[Value]) -> list[Value]:
        """Add a node that keeps the origin of the node being visited; returns all its outputs."""
        node = self.graph.make_node(op, inputs, self.origin)
        self.nodes.append(node)
        return node.outputs

    def view(self, value: Value, shape: tuple[Dim, ...]) -> Value:
        """``value`` under another shape: no node if it has it already, never a view of a view."""
        if value.kind == "weight" and value.type.shape != shape:
            return self.emit(Reshape(shape), value)
        while value.type.shape != shape and value.node is not None and isinstance(value.node.op, Reshape):
            value = value.node.inputs[0]
        return value if value.type.shape == shape else self.emit(Reshape(shape), value)

    def transpose(self, value: Value, axes: tuple[int, ...]) -> Value:
        """``value`` with permuted axes; a permutation that moves no element is a view, two cancel."""
        if value.node is not None and isinstance(value.node.op, Transpose):
            inner = value.node.op.axes
            return self.transpose(value.node.inputs[0], tuple(inner[a] for a in axes))
        if moves_nothing(value.type.shape, axes):
            return self.view(value, tuple(value.type.shape[a] for a in axes))
        return self.emit(Transpose(axes), value)

    def constant(self, data: np.ndarray, type_: TensorType) -> Value:
        return self.graph.add_constant(data, type_)

    def used_once(self, value: Value) -> bool:
        """Whether the node being visited is the only reader of ``value``."""
        return self._uses.get(value, 0) == 1

    def run(self, visit: Callable[[Sweep, Node], list[Value] | None]) -> int:
        """Visit every node; returns how many were replaced."""
        changed = 0
        for node in self.graph.nodes:
            node.inputs = [self._replaced.get(v, v) for v in node.inputs]
            self.origin = node.origin
            new = visit(self, node)
            if new is None:
                self.nodes.append(node)
                continue
            changed += 1
            for old, value in zip(node.outputs, new, strict=True):
                self._replaced[old] = value
                self._uses[value] = self._uses.get(old, 0) + (self._uses.get(value, 0) if value in self._uses else 0)
        self.graph.nodes = self.nodes
        self.graph.outputs = [self._replaced.get(v, v) for v in self.graph.outputs]
        return changed


def sweep(graph: Graph, visit: Callable[[Sweep, Node], list[Value] | None]) -> int:
    """Rewrite ``graph`` in place: ``visit`` returns the values that replace a node's outputs, or None to keep it.

    Returns how many nodes were replaced.
    """
    return Sweep(graph).run(visit)


def until_stable(graph: Graph, visit: Callable[[Sweep, Node], list[Value] | None]) -> None:
    """Sweep until nothing changes. Raises GraphError if that never happens."""
    for _ in range(_MOST_SWEEPS):
        if sweep(graph, visit) == 0:
            return
    raise GraphError(f"rewriting did not settle in {_MOST_SWEEPS} sweeps; please report this with the --dump-ir folder")


_MOST_SWEEPS = 100  # real graphs need 2 to 5


def moves_nothing(shape: tuple[Dim, ...], axes: tuple[int, ...]) -> bool:
    """Whether a transposition keeps every element where it is (only dims of size 1 change place)."""
    order = [a for a in axes if shape[a] != 1]
    return order == sorted(order)


def derived_weight(graph: Graph, name: str, type_: TensorType, expr: WeightExpr) -> Value:
    """A weight with this expression: the one that is there already, or a new one with a name not in use."""
    for value, known in graph.weights.items():
        if known == expr and value.type == type_:
            return value
    taken = {value.name for value in graph.weights}
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}.{number}"
    return graph.add_weight(unique, type_, expr)


def with_settled_names(graph: Graph, rewrite: Callable[[], object]) -> None:
    """Run a rewrite that derives weights; those that replaced their originals then take over the names."""
    before = {value: value.name for value in graph.weights}
    rewrite()
    drop_unused(graph)
    free = set(before.values()) - {value.name for value in graph.weights}
    for value in graph.weights:
        base = value.name
        while base not in free and _NUMBERED.fullmatch(base):
            base = base.rpartition(".")[0]
        if value not in before and base in free:
            free.remove(base)
            value.name = base


_NUMBERED = re.compile(r".*\.\d+")


def drop_unused(graph: Graph) -> None:
    """Remove nodes without effect whose results nobody reads, and unread weights and constants."""
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op.has_effect or any(v in live for v in node.outputs):
            kept.append(node)
            live.update(node.inputs)
    graph.nodes = kept[::-1]
    graph.weights = {v: e for v, e in graph.weights.items() if v in live}
    graph.constants = {v: c for v, c in graph.constants.items() if v in live}
