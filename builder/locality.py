"""Row locality: outside sequence ops the tokens of a step are only a batch axis.

All sequences of a step lie packed in one axis T, so an op that combines, shifts, counts or orders along T would mix
sequences. Every op has a rule here; an op without one is refused. ``positions`` must be in use,
because otherwise the model takes positions from somewhere that packing breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..runtime.errors import UnsupportedModelError
from ..runtime.format.tensor_type import Dim, TensorType
from .graph import Graph, Node
from .ops.elementwise import Binary, Cast, Unary, Where
from .ops.fused import Embedding
from .ops.generic import Attention, Concat, Expand, Gather, Linear, MatMul, Reduce, Reshape, Slice, Softmax, Transpose

_REMEDY = "tokens of different sequences would mix; the family needs an adapter"


def verify_locality(graph: Graph) -> None:
    """Raise UnsupportedModelError if an op outside sequence ops treats T as more than a batch axis.

    The same if positions do not matter: then tokens find their place by some other way than the one pelton feeds.
    """
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if sum(dim == "T" for dim in value.type.shape) > 1:
                raise _violation(node, "a value has two token axes (a product of every token with every other)")
        rule = _RULES.get(type(node.op))
        if rule is None:
            raise _violation(node, "it has no row locality rule")
        if reason := rule(node.op, [v.type for v in node.inputs], [v.type for v in node.outputs]):
            raise _violation(node, reason)
    if not _positions_live(graph):
        raise UnsupportedModelError(
            "the logits do not depend on position_ids, so the model counts positions some other way, which packed "
            "sequences would break; the family needs an adapter"
        )


def _positions_live(graph: Graph) -> bool:
    """Whether positions reach the outputs."""
    needed = set(graph.outputs)
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
    return any(value in needed for value in graph.inputs if value.name == "positions")


def _violation(node: Node, reason: str) -> UnsupportedModelError:
    operands = ", ".join(str(v.type) for v in node.inputs)
    return UnsupportedModelError(f"{node.origin or 'model'}: {node.op.name}({operands}): {reason}; {_REMEDY}")


def _free(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    """Broadcasting ops line T up with itself or with 1; anything else gives a second T axis or no type."""
    return None


def _axis(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    if isinstance(op, Gather):
        return "it looks tokens up by index" if inputs[0].shape[op.axis] == "T" else None
    return "it works along the token axis" if any(x.shape[op.axis] == "T" for x in inputs) else None


def _reduce(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    return "it reduces over the token axis" if any(inputs[0].shape[axis] == "T" for axis in op.axes) else None


def _matmul(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    a, b = inputs
    return "it contracts over the token axis" if "T" in (a.shape[-1], b.shape[-2]) else None


def _linear(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    mixed = inputs[0].shape[-1] == "T" or any("T" in x.shape for x in inputs[1:])
    return "its weights or its contracted axis run over tokens" if mixed else None


def _reshape(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    before, after = _outer(inputs[0].shape), _outer(outputs[0].shape)
    return None if before == after else "it moves elements from one token to another"


def _outer(shape: tuple[Dim, ...]) -> int | None:
    """Product of the dims outside T, or None without T: what decides which token an element belongs to."""
    if "T" not in shape:
        return None
    return math.prod(int(dim) for dim in shape[: shape.index("T")])


def _attention(op: Any, inputs: list[TensorType], outputs: list[TensorType]) -> str | None:
    fits = all(x.rank == 4 and x.shape[2] == "T" for x in inputs)
    return None if fits else "attention's token axis is not where it must be"


_RULES: dict[type, Callable[[Any, list[TensorType], list[TensorType]], str | None]] = {
    Unary: _free,
    Binary: _free,
    Where: _free,
    Cast: _free,
    Expand: _free,
    Transpose: _free,
    Embedding: _free,
    Reshape: _reshape,
    Slice: _axis,
    Concat: _axis,
    Gather: _axis,
    Softmax: _axis,
    Reduce: _reduce,
    MatMul: _matmul,
    Linear: _linear,
    Attention: _attention,
}
