"""Graph, Node, Value: the builder's intermediate representation (SSA, one straight-line block).

Nodes are in execution order. Every value has exactly one producer: a graph input, a weight, a
constant, or a node. A node keeps its origin, the module path in the model it came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..runtime.format.plan import KVGroup, StateSpec
from ..runtime.format.tensor_type import TensorType
from ..runtime.format.weight_expr import WeightExpr
from .ops.base import Op


@dataclass(eq=False)
class Value:
    """An SSA value. ``kind`` says who produces it; ``node`` is set when kind is "node"."""

    name: str
    type: TensorType
    kind: str  # "input" | "weight" | "constant" | "node"
    node: Node | None = None

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False)
class Node:
    """One op applied to values."""

    op: Op
    inputs: list[Value]
    outputs: list[Value]
    origin: str = ""


@dataclass(eq=False)
class Graph:
    """A whole model. ``inputs`` are always token_ids i32[T] and positions i32[T]."""

    inputs: list[Value] = field(default_factory=list)
    weights: dict[Value, WeightExpr] = field(default_factory=dict)
    constants: dict[Value, np.ndarray] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    states: list[StateSpec] = field(default_factory=list)
    kv_groups: list[KVGroup] = field(default_factory=list)
    _next: int = 0

    def fresh_name(self, hint: str = "v") -> str:
        """A value name not used before in this graph (stable from build to build)."""
        self._next += 1
        return f"{hint}{self._next}"

    def add_input(self, name: str, type_: TensorType) -> Value:
        value = Value(name, type_, "input")
        self.inputs.append(value)
        return value

    def add_weight(self, name: str, type_: TensorType, expr: WeightExpr) -> Value:
        value = Value(name, type_, "weight")
        self.weights[value] = expr
        return value

    def add_constant(self, data: np.ndarray, type_: TensorType, hint: str = "c") -> Value:
        value = Value(self.fresh_name(hint), type_, "constant")
        self.constants[value] = data
        return value

    def make_node(self, op: Op, inputs: Iterable[Value], origin: str = "") -> Node:
        """A node with inferred output types, not yet placed in ``nodes``."""
        operands = list(inputs)
        node = Node(op, operands, [], origin)
        for type_ in op.infer(*(v.type for v in operands)):
            node.outputs.append(Value(self.fresh_name(), type_, "node", node))
        return node

    def append(self, op: Op, inputs: Iterable[Value], origin: str = "") -> list[Value]:
        """Add a node at the end; returns its outputs."""
        node = self.make_node(op, inputs, origin)
        self.nodes.append(node)
        return node.outputs

    def users(self) -> dict[Value, list[Node]]:
        """For each value the nodes that read it (a snapshot, in order)."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                found.setdefault(value, []).append(node)
        return found

    def replace_uses(self, old: Value, new: Value) -> None:
        """Make every reader (and the outputs list) of ``old`` read ``new``."""
        for node in self.nodes:
            node.inputs = [new if v is old else v for v in node.inputs]
        self.outputs = [new if v is old else v for v in self.outputs]
