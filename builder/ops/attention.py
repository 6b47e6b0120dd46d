"""Attention over paged KV state: as a model calls it, and split into write and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TOKEN_TYPE, TensorType
from .arrays import TOKEN_ARRAY, f32, rms_normalised, rotated, rounded
from .base import Op, StepContext, register
from .checks import constant_dim, need, need_count, need_rank, need_token
from .paged import attend, write_kv


def _need_heads(op: str, heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise GraphError(f"{op}: {heads} query heads do not divide into {kv_heads} key/value heads")


@register
@dataclass(frozen=True)
class Attention(Op):
    """(q f32[1,Hq,T,D], k f32[1,Hkv,T,D], v f32[1,Hkv,T,D]) -> f32[1,T,Hq,D]: as the model calls it, one whole layer.

    Stores k and v of the step's tokens in state ``state`` and attends to all stored ones of the same sequence;
    meaning as KVWrite followed by PagedAttention. ``mask``: "causal" (window None or a width). ``layer`` is the
    call's number in execution order; ``state`` is "kv.<layer>".
    """

    name: ClassVar[str] = "attention"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    layer: int
    mask: str
    window: int | None
    scale: float
    softcap: float | None = None

    @property
    def state(self) -> str:
        return f"kv.{self.layer}"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 3)
        q, k, v = inputs
        if self.mask != "causal":
            raise GraphError(f"attention: mask {self.mask!r} is not understood; known: causal")
        for label, x in (("q", q), ("k", k), ("v", v)):
            need_rank(self.name, label, x, 4, 4)
            need(self.name, label, x, DType.F32)
        _need_heads(self.name, constant_dim(self.name, q, 1), constant_dim(self.name, k, 1))
        if k != v or k.shape != (1, k.shape[1], q.shape[2], q.shape[3]) or q.shape[0] != 1:
            raise GraphError(f"attention: q {q}, k {k} and v {v} do not fit")
        return (TensorType(DType.F32, (1, q.shape[2], q.shape[1], q.shape[3])),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        q, k, v = (np.ascontiguousarray(x[0].transpose(1, 0, 2)) for x in inputs)
        write_kv(ctx, self.state, k, v)
        return (attend(ctx, self.state, q, self.scale, self.window, self.softcap)[None],)


@register
@dataclass(frozen=True)
class KVWrite(Op):
    """(k f32[T,Hkv,D], v f32[T,Hkv,D]) -> token; state ``state``.

    Stores both at (block table, position), rounded to the state's dtype.
    """

    name: ClassVar[str] = "kv_write"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    state: str
    kv_heads: int
    head_dim: int
    dtype: DType  # the state's storage dtype

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        for label, x in zip("kv", inputs, strict=True):
            need(self.name, label, x, DType.F32, ("T", self.kv_heads, self.head_dim))
        return (TOKEN_TYPE,)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        write_kv(ctx, self.state, *inputs)
        return (TOKEN_ARRAY,)


@register
@dataclass(frozen=True)
class QKVRopeWrite(Op):
    """(qkv f32[T,(Hq+2Hkv)*D], cos, sin[, q_norm f32[D], k_norm f32[D]]) -> (q compute[T,Hq,D], token).

    State ``state``. Splits q, k, v (in this order); if qk_norm: RMS-normalises each head of q and k over D (eps
    qk_eps) first; rotates q and k (see Rope); stores k and v like KVWrite; q is rounded to ``compute`` (no softmax
    scale applied).
    """

    name: ClassVar[str] = "qkv_rope_write"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    state: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    qk_norm: bool
    qk_eps: float
    compute: DType
    kv_dtype: DType

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 5 if self.qk_norm else 3)
        _need_heads(self.name, self.heads, self.kv_heads)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise GraphError(f"qkv_rope_write: rotary_dim {self.rotary_dim} must be even and at most {self.head_dim}")
        need(self.name, "qkv", inputs[0], DType.F32, ("T", (self.heads + 2 * self.kv_heads) * self.head_dim))
        for label, x in zip(("cos", "sin"), inputs[1:3], strict=True):
            need(self.name, label, x, DType.F32, ("T", self.rotary_dim // 2))
        for label, x in zip(("q_norm", "k_norm"), inputs[3:], strict=False):
            need(self.name, label, x, DType.F32, (self.head_dim,))
        return (TensorType(self.compute, ("T", self.heads, self.head_dim)), TOKEN_TYPE)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        qkv, cos, sin = inputs[:3]
        heads = f32(qkv).reshape(qkv.shape[0], -1, self.head_dim)
        q, k, v = np.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        if self.qk_norm:
            q = rms_normalised(q, self.qk_eps) * f32(inputs[3])
            k = rms_normalised(k, self.qk_eps) * f32(inputs[4])
        q = rotated(q, cos, sin, self.rotary_dim, self.interleaved)
        write_kv(ctx, self.state, rotated(k, cos, sin, self.rotary_dim, self.interleaved), v)
        return (q.astype(self.compute.numpy), TOKEN_ARRAY)


@register
@dataclass(frozen=True)
class PagedAttention(Op):
    """(q compute[T,Hq,D], token) -> dtype [T,Hq*D]; reads state ``state``.

    Token t of sequence s at position p attends to keys at positions j <= p with, if window is set, j > p - window.
    scores = (q . k) * scale in fp32; if softcap: softcap * tanh(scores / softcap); softmax in fp32; output = sum p * v,
    rounded to ``dtype``. q head h uses kv head h // (Hq / Hkv). Keys are visited on an absolute grid from position 0,
    so the result does not depend on chunking. Keys before the window may sit in freed blocks (-1): never read.
    Targets with 16-bit dot products may round p to ``compute`` before the product with v.
    """

    name: ClassVar[str] = "paged_attention"
    is_sequence_op: ClassVar[bool] = True
    state: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    compute: DType
    kv_dtype: DType
    dtype: DType

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        _need_heads(self.name, self.heads, self.kv_heads)
        need(self.name, "q", inputs[0], self.compute, ("T", self.heads, self.head_dim))
        need_token(self.name, "token", inputs[1])
        return (TensorType(self.dtype, ("T", self.heads * self.head_dim)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        q = rounded(inputs[0], self.compute.numpy)
        out = attend(ctx, self.state, q, self.scale, self.window, self.softcap)
        return (out.reshape(out.shape[0], -1).astype(self.dtype.numpy),)
