"""What an op is: a frozen dataclass with ``infer`` (types) and ``reference`` (numpy meaning).

An op's fields are plain values (int, float, str, bool, DType, tuples of those, or None), so
it prints, parses, and serialises into a launch plan without code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import msgspec
import numpy as np

from ...runtime.format.tensor_type import TensorType
from ...runtime.step import StepInputs, StepOutputs


@dataclass
class StepContext:
    """What a reference meaning may see besides its inputs: the step, its row chunk, and state.

    ``states[name]``: "paged_kv" -> f32-or-storage-dtype array [num_blocks, tokens_per_block, 2, kv_heads, head_dim]
    (index 2: 0 = K, 1 = V); "slot" -> [num_slots, *shape].
    ``row_start``/``row_count``: the chunk of R rows that the tail is working on (C = row_count).
    ``outputs``: full-R arrays that ``sample`` fills.
    """

    step: StepInputs
    states: dict[str, np.ndarray]
    state_groups: dict[str, int]
    tokens_per_block: int
    row_start: int = 0
    row_count: int = 0
    outputs: StepOutputs | None = None

    @property
    def symbols(self) -> dict[str, int]:
        return {"T": self.step.num_tokens, "S": self.step.num_seqs, "R": self.step.num_rows, "C": self.row_count}


@dataclass(frozen=True)
class Op:
    """Base of all ops. Subclasses set ``name`` and are registered by ``@register``."""

    name: ClassVar[str]
    #: Sequence ops know sequence boundaries; all others must treat T as a batch axis only.
    is_sequence_op: ClassVar[bool] = False
    #: Ops with effects on state or step outputs are never removed, duplicated or reordered.
    has_effect: ClassVar[bool] = False

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        """Output types; raises GraphError naming the operand that does not fit."""
        raise NotImplementedError(self.name)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        """The op's meaning. Arrays come in their logical shape (layouts already undone) and storage dtype."""
        raise NotImplementedError(self.name)

    def attributes(self) -> dict[str, Any]:
        """Fields as JSON-able values, in field order."""
        built = msgspec.to_builtins(self)
        assert isinstance(built, dict)
        return built


OPS: dict[str, type[Op]] = {}


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: make an op known by name to the text parser and to plans."""
    if cls.name in OPS:
        raise ValueError(f"two ops are named {cls.name!r}")
    OPS[cls.name] = cls
    return cls


def op_from_attributes(name: str, attributes: dict[str, Any]) -> Op:
    """Rebuild an op from a plan's (name, attributes); raises KeyError or msgspec.ValidationError."""
    unknown = attributes.keys() - {field.name for field in fields(OPS[name])}
    if unknown:
        raise msgspec.ValidationError(f"{name} has no field {', '.join(sorted(map(repr, unknown)))}")
    return msgspec.convert(attributes, type=OPS[name])


__all__ = ["OPS", "Op", "StepContext", "op_from_attributes", "register"]
