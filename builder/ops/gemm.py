"""The GEMM every projection of a model becomes, with what happens before and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from .arrays import f32, rms_normalised, rounded, rows_times
from .base import Op, StepContext, register
from .checks import constant_dim, need, need_count, need_float, need_matrix, need_rank
from .elementwise import UNARY

ACTIVATIONS = ("none", "silu", "gelu_tanh", "gelu_erf", "relu")
PROLOGUES = ("none", "rms_norm")
GATE_ROWS = 16  # gate and up rows alternate in turns of this many


@register
@dataclass(frozen=True)
class Gemm(Op):
    """(x [...,K], w compute[N,K] in panels[, norm f32[K]][, bias f32[N]][, residual f32[...,M]]) -> dtype [...,M].

    1. prologue "rms_norm": x = x * rsqrt(mean(x^2)+eps) * norm, in fp32.   "none": x as is.
    2. x is rounded to ``compute`` (x may already be in it); acc = x @ w^T, fp32.
    3. if bias: acc += bias.
    4. activation on acc in fp32: none | silu | gelu_tanh | gelu_erf | relu.  If ``gated``: w's rows are gate and up
       interleaved by 16 (see weight_expr.Interleave; N counts both with padding; the bias likewise), out[i] =
       activation(gate[i]) * up[i], M = ``out_features``. Not gated: M = N.
    5. if softcap: acc = softcap * tanh(acc / softcap).   6. scaled: acc *= scale when not 1.
    7. if residual: acc += residual.   8. rounded to ``dtype``.
    Optional operands follow in this order when their flag is set. M = out_features always (<= N).
    """

    name: ClassVar[str] = "gemm"
    out_features: int
    compute: DType
    dtype: DType
    prologue: str = "none"
    eps: float = 0.0
    bias: bool = False
    activation: str = "none"
    gated: bool = False
    softcap: float | None = None
    scale: float = 1.0
    residual: bool = False

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2 + (self.prologue != "none") + self.bias + self.residual)
        if self.activation not in ACTIVATIONS or self.prologue not in PROLOGUES:
            raise GraphError(f"gemm: unknown activation {self.activation!r} or prologue {self.prologue!r}")
        x, w, *rest = inputs
        n, k = need_matrix(self.name, "w", w)
        need_float(self.name, "x", x)
        need_rank(self.name, "x", x, 1)
        if constant_dim(self.name, x, -1) != k or w.dtype != self.compute or w.layout not in ("panel16", "packed12"):
            wanted = f"{self.compute.value}[N,K]@panel16 or @packed12"
            raise GraphError(f"gemm: x {x} and w {w} do not fit: w must be {wanted}")
        padded = 2 * -(-self.out_features // GATE_ROWS) * GATE_ROWS if self.gated else self.out_features
        if n != padded:
            raise GraphError(f"gemm: w {w} must have {padded} rows for {self.out_features} outputs, gated={self.gated}")
        if self.prologue != "none":
            need(self.name, "norm", rest.pop(0), DType.F32, (k,))
        if self.bias:
            need(self.name, "bias", rest.pop(0), DType.F32, (n,))
        shape = (*x.shape[:-1], self.out_features)
        if self.residual:
            need(self.name, "residual", rest.pop(0), DType.F32, shape)
        return (TensorType(self.dtype, shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        x, w, *rest = inputs
        if self.prologue == "rms_norm":
            x = rms_normalised(x, self.eps) * f32(rest.pop(0))
        acc = rows_times(rounded(x, self.compute.numpy), w)
        if self.bias:
            acc = acc + f32(rest.pop(0))
        acc = self._activated(acc)
        if self.softcap is not None:
            acc = np.float32(self.softcap) * np.tanh(acc / np.float32(self.softcap))
        if self.scale != 1.0:
            acc = acc * np.float32(self.scale)
        if self.residual:
            acc = acc + f32(rest.pop(0))
        return (acc.astype(self.dtype.numpy),)

    def _activated(self, acc: np.ndarray) -> np.ndarray:
        """Step 4: activation, and the gate product over rows that alternate in turns of 16."""
        up = None
        if self.gated:
            turns = acc.reshape(*acc.shape[:-1], -1, 2, GATE_ROWS)
            acc, up = (
                np.ascontiguousarray(turns[..., i, :]).reshape(*acc.shape[:-1], -1)[..., : self.out_features]
                for i in (0, 1)
            )
        if self.activation != "none":
            acc = f32(UNARY[self.activation](f32(acc)))
        return acc if up is None else acc * up
