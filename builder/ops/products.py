"""Reductions and products that a traced model may contain: reduce, softmax, matmul, linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.tensor_type import Dim, TensorType
from .arrays import f32, rows_times
from .arrays import softmax as softmax_f32
from .base import Op, StepContext, register
from .checks import constant_dim, need, need_count, need_float, need_matrix, need_rank
from .elementwise import broadcast_shapes

_REDUCERS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@register
@dataclass(frozen=True)
class Reduce(Op):
    """kind: sum | mean | max | min over constant axes; fp32 accumulation in index order."""

    name: ClassVar[str] = "reduce"
    kind: str
    axes: tuple[int, ...]
    keepdims: bool

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        x = inputs[0]
        if self.kind not in _REDUCERS:
            raise GraphError(f"reduce: unknown kind {self.kind!r}; known: {', '.join(_REDUCERS)}")
        for axis in self.axes:
            if constant_dim(self.name, x, axis) == 0:
                raise GraphError(f"reduce: axis {axis} of {x} is empty")
        axes = {axis % x.rank for axis in self.axes}
        if len(axes) != len(self.axes) or not axes:
            raise GraphError(f"reduce: axes {self.axes} repeat or are empty")
        kept = [1 if i in axes else d for i, d in enumerate(x.shape) if self.keepdims or i not in axes]
        return (TensorType(x.dtype, tuple(kept)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        x = inputs[0]
        axes = sorted(axis % x.ndim for axis in self.axes)
        outer = [d for i, d in enumerate(x.shape) if i not in axes]
        flat = np.moveaxis(x, axes, range(-len(axes), 0)).reshape(*outer, -1)
        if flat.dtype.itemsize < 4 and flat.dtype != np.bool_:
            flat = f32(flat)
        # accumulate, not reduce: numpy's reduce adds pairwise, the contract is index order
        total = _REDUCERS[self.kind].accumulate(flat, axis=-1)[..., -1]
        if self.kind == "mean":
            total = total / np.asarray(flat.shape[-1], total.dtype)
        shape = [1 if i in axes else d for i, d in enumerate(x.shape)] if self.keepdims else outer
        return (np.asarray(total).astype(x.dtype).reshape(shape),)


@register
@dataclass(frozen=True)
class Softmax(Op):
    """Softmax over one constant axis, in fp32."""

    name: ClassVar[str] = "softmax"
    axis: int

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        need_float(self.name, "x", inputs[0])
        constant_dim(self.name, inputs[0], self.axis)
        return (TensorType(inputs[0].dtype, inputs[0].shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(softmax_f32(inputs[0], self.axis)).astype(inputs[0].dtype),)


@register
@dataclass(frozen=True)
class MatMul(Op):
    """numpy matmul of two activations, broadcasting batch dims (contracted dim constant); fp32 sum in index order."""

    name: ClassVar[str] = "matmul"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        a, b = inputs
        for label, x in (("a", a), ("b", b)):
            need_rank(self.name, label, x, 2)
            need(self.name, label, x)
        if a.dtype != b.dtype or constant_dim(self.name, a, -1) != constant_dim(self.name, b, -2):
            raise GraphError(f"matmul: {a} and {b} do not fit")
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.rank > 2 or b.rank > 2 else ()
        return (TensorType(a.dtype, (*batch, a.shape[-2], b.shape[-1])),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        a, b = f32(inputs[0]), f32(inputs[1])
        total = a[..., :, 0, None] * b[..., None, 0, :]
        for k in range(1, a.shape[-1]):
            total = total + a[..., :, k, None] * b[..., None, k, :]
        return (total.astype(inputs[0].dtype),)


@register
@dataclass(frozen=True)
class Linear(Op):
    """(x [...,K], w [N,K][, b [N]]) -> [...,N]: torch.nn.functional.linear; fp32 accumulation, result in x's dtype."""

    name: ClassVar[str] = "linear"
    bias: bool = False

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 3 if self.bias else 2)
        x, w = inputs[:2]
        n, k = need_matrix(self.name, "w", w)
        need_rank(self.name, "x", x, 1)
        if constant_dim(self.name, x, -1) != k:
            raise GraphError(f"linear: x {x} does not fit w {w}: the last dim of each must be equal")
        if self.bias:
            need(self.name, "bias", inputs[2], shape=(n,))
        shape: tuple[Dim, ...] = (*x.shape[:-1], n)
        return (TensorType(x.dtype, shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        y = rows_times(inputs[0], inputs[1])
        if self.bias:
            y = y + f32(inputs[2])
        return (y.astype(inputs[0].dtype),)
