"""Ops that only move elements: reshape, transpose, expand, slice, concat, gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.tensor_type import SYMBOLS, Dim, TensorType
from .base import Op, StepContext, register
from .checks import constant_dim, element_count, need, need_count, need_index
from .elementwise import broadcast_shapes


def concrete(ctx: StepContext, shape: tuple[Dim, ...]) -> tuple[int, ...]:
    """A shape with this step's symbol values."""
    return tuple(ctx.symbols[d] if isinstance(d, str) else d for d in shape)


def _need_dims(op: str, shape: tuple[Dim, ...]) -> None:
    for dim in shape:
        if (isinstance(dim, str) and dim not in SYMBOLS) or (isinstance(dim, int) and dim < 0):
            raise GraphError(f"{op}: {dim!r} is not a dim (a number from 0, or one of {', '.join(SYMBOLS)})")


@register
@dataclass(frozen=True)
class Reshape(Op):
    """Same elements in row-major order under another shape; at most one symbolic dim, the same before and after."""

    name: ClassVar[str] = "reshape"
    shape: tuple[Dim, ...]

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        need(self.name, "x", inputs[0])
        _need_dims(self.name, self.shape)
        before, after = element_count(inputs[0].shape), element_count(self.shape)
        if before != after or len(after[1]) > 1:
            raise GraphError(f"reshape: cannot view {inputs[0]} as [{','.join(map(str, self.shape))}]")
        return (TensorType(inputs[0].dtype, self.shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (inputs[0].reshape(concrete(ctx, self.shape)),)


@register
@dataclass(frozen=True)
class Transpose(Op):
    """Permute axes, numpy order."""

    name: ClassVar[str] = "transpose"
    axes: tuple[int, ...]

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        x = inputs[0]
        if sorted(self.axes) != list(range(x.rank)):
            raise GraphError(f"transpose: axes {self.axes} do not permute {x}")
        return (TensorType(x.dtype, tuple(x.shape[a] for a in self.axes)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(inputs[0].transpose(self.axes)),)


@register
@dataclass(frozen=True)
class Expand(Op):
    """Broadcast to ``shape`` (numpy broadcast_to)."""

    name: ClassVar[str] = "expand"
    shape: tuple[Dim, ...]

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        _need_dims(self.name, self.shape)
        if broadcast_shapes(inputs[0].shape, self.shape) != self.shape:
            raise GraphError(f"expand: {inputs[0]} does not broadcast to [{','.join(map(str, self.shape))}]")
        return (TensorType(inputs[0].dtype, self.shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(np.broadcast_to(inputs[0], concrete(ctx, self.shape))),)


@register
@dataclass(frozen=True)
class Slice(Op):
    """x[..., start:stop:step, ...] on one constant axis (never symbolic); 0 <= start <= stop <= dim, step >= 1."""

    name: ClassVar[str] = "slice"
    axis: int
    start: int
    stop: int
    step: int = 1

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        x = inputs[0]
        dim = constant_dim(self.name, x, self.axis)
        if not 0 <= self.start <= self.stop <= dim or self.step < 1:
            raise GraphError(f"slice: {self.start}:{self.stop}:{self.step} does not fit axis {self.axis} of {x}")
        shape = list(x.shape)
        shape[self.axis] = len(range(self.start, self.stop, self.step))
        return (TensorType(x.dtype, tuple(shape)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        index = [slice(None)] * inputs[0].ndim
        index[self.axis] = slice(self.start, self.stop, self.step)
        return (np.ascontiguousarray(inputs[0][tuple(index)]),)


@register
@dataclass(frozen=True)
class Concat(Op):
    """Concatenate along a constant axis."""

    name: ClassVar[str] = "concat"
    axis: int

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        if not inputs:
            raise GraphError("concat: takes at least one operand")
        first = inputs[0]
        total = sum(constant_dim(self.name, x, self.axis) for x in inputs)
        axis = self.axis % first.rank
        for x in inputs[1:]:
            if x.dtype != first.dtype or x.rank != first.rank or _without(x.shape, axis) != _without(first.shape, axis):
                raise GraphError(f"concat: {x} does not fit {first} along axis {self.axis}")
        return (TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.concatenate(inputs, axis=self.axis),)


def _without(shape: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    return shape[:axis] + shape[axis + 1 :]


@register
@dataclass(frozen=True)
class Gather(Op):
    """(data, index i32[...]) -> data indexed along ``axis`` (numpy take): shape data[:axis] + index + data[axis+1:]."""

    name: ClassVar[str] = "gather"
    axis: int

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        data, index = inputs
        constant_dim(self.name, data, self.axis)
        need_index(self.name, "index", index)
        axis = self.axis % data.rank
        return (TensorType(data.dtype, (*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.take(inputs[0], inputs[1], axis=self.axis),)
