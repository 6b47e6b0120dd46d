"""RMS norm and rotary position embedding, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from .arrays import f32, rms_normalised, rotated
from .base import Op, StepContext, register
from .checks import constant_dim, need, need_count, need_float, need_rank


@register
@dataclass(frozen=True)
class RMSNorm(Op):
    """(x [...,N], w f32[N], [residual f32[...,N]]) -> dtype [...,N].

    x * rsqrt(mean(x^2) + eps) * w (+ residual), in fp32 (sum of squares in fp32).
    """

    name: ClassVar[str] = "rms_norm"
    eps: float
    dtype: DType
    residual: bool = False

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2 + self.residual)
        x, w = inputs[:2]
        need_float(self.name, "x", x)
        need_rank(self.name, "x", x, 1)
        need(self.name, "w", w, DType.F32, (constant_dim(self.name, x, -1),))
        if self.residual:
            need(self.name, "residual", inputs[2], DType.F32, x.shape)
        return (TensorType(self.dtype, x.shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        y = rms_normalised(inputs[0], self.eps) * f32(inputs[1])
        if self.residual:
            y = y + inputs[2]
        return (y.astype(self.dtype.numpy),)


@register
@dataclass(frozen=True)
class RopeTable(Op):
    """(positions i32[T], inv_freq f32[D/2]) -> cos f32[T,D/2], sin f32[T,D/2].

    angle = fp32(position) * inv_freq rounded to fp32, then cos/sin of that fp32 angle, times ``scale``.
    """

    name: ClassVar[str] = "rope_table"
    scale: float = 1.0

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        positions, inv_freq = inputs
        need_rank(self.name, "positions", positions, 1, 1)
        need(self.name, "positions", positions, DType.I32)
        need_rank(self.name, "inv_freq", inv_freq, 1, 1)
        need(self.name, "inv_freq", inv_freq, DType.F32)
        table = TensorType(DType.F32, (positions.shape[0], constant_dim(self.name, inv_freq, 0)))
        return (table, table)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        angle = f32(inputs[0])[:, None] * f32(inputs[1])[None, :]
        scale = np.float32(self.scale)
        return (np.cos(angle) * scale, np.sin(angle) * scale)


@register
@dataclass(frozen=True)
class Rope(Op):
    """(x f32[T,H,D], cos f32[T,R/2], sin f32[T,R/2]) -> f32[T,H,D]; R = rotary_dim <= D, the rest passes through.

    interleaved False: pairs are (i, i + R/2) ("rotate half"); True: (2i, 2i+1).
    (a, b) -> (a*cos - b*sin, b*cos + a*sin).
    """

    name: ClassVar[str] = "rope"
    rotary_dim: int
    interleaved: bool = False

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 3)
        x, cos, sin = inputs
        need_rank(self.name, "x", x, 3, 3)
        need(self.name, "x", x, DType.F32)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= constant_dim(self.name, x, -1):
            raise GraphError(f"rope: rotary_dim {self.rotary_dim} must be even and fit the last dim of {x}")
        for label, table in (("cos", cos), ("sin", sin)):
            need(self.name, label, table, DType.F32, (x.shape[0], self.rotary_dim // 2))
        return (x,)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        x, cos, sin = inputs
        return (rotated(x, cos, sin, self.rotary_dim, self.interleaved),)
