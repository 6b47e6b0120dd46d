"""The fused ops that kernels are written for. Numerics here are the contract of every target.

"compute" is the type to which a dot product's operands are rounded (f32, f16 or bf16); products
are accumulated in fp32. Everything between is fp32. Token count T may be any value from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...runtime.format.dtypes import DType
from .base import Op, register


@register
@dataclass(frozen=True)
class ResolveTokens(Op):
    """(token_ids i32[T]) -> i32[T]; state "history".

    FROM_HISTORY entries are replaced by history[slot, position]; every resolved id is then stored at
    history[slot, position].
    """

    name: ClassVar[str] = "resolve_tokens"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class Embedding(Op):
    """(ids i32[...], table [V,H] rows or panel16) -> dtype [...,H]: rows of the table, times scale (in fp32) when not 1."""

    name: ClassVar[str] = "embedding"
    dtype: DType
    scale: float = 1.0


@register
@dataclass(frozen=True)
class RMSNorm(Op):
    """(x [...,N], w f32[N]) -> dtype [...,N]: x * rsqrt(mean(x^2) + eps) * w, in fp32 (sum of squares over N in fp32)."""

    name: ClassVar[str] = "rms_norm"
    eps: float
    dtype: DType


@register
@dataclass(frozen=True)
class RopeTable(Op):
    """(positions i32[T], inv_freq f32[D/2]) -> cos f32[T,D/2], sin f32[T,D/2].

    angle = fp32(position) * inv_freq rounded to fp32, then cos/sin of that fp32 angle, times ``scale``.
    """

    name: ClassVar[str] = "rope_table"
    scale: float = 1.0


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


@register
@dataclass(frozen=True)
class KVWrite(Op):
    """(k f32[T,Hkv,D], v f32[T,Hkv,D]) -> token; state ``state``: stores both at (block table, position), rounded to the state's dtype."""

    name: ClassVar[str] = "kv_write"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    state: str
    kv_heads: int
    head_dim: int
    dtype: DType  # the state's storage dtype


@register
@dataclass(frozen=True)
class QKVRopeWrite(Op):
    """(qkv f32[T,(Hq+2Hkv)*D], cos, sin[, q_norm f32[D], k_norm f32[D]]) -> (q compute[T,Hq,D], token); state ``state``.

    Splits q, k, v (in this order); if qk_norm: RMS-normalises each head of q and k over D (eps qk_eps) first; rotates
    q and k (see Rope); stores k and v like KVWrite; q is rounded to ``compute`` (no softmax scale applied).
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


@register
@dataclass(frozen=True)
class PagedAttention(Op):
    """(q compute[T,Hq,D], token) -> dtype [T,Hq*D]; reads state ``state``.

    Token t of sequence s at position p attends to keys at positions j <= p with, if window is set, j > p - window.
    scores = (q . k) * scale in fp32; if softcap: softcap * tanh(scores / softcap); softmax in fp32; output = sum p * v,
    rounded to ``dtype``. q head h uses kv head h // (Hq / Hkv). Keys are visited on an absolute grid from position 0, so
    the result does not depend on chunking. Keys before the window may sit in blocks that were freed (-1): never read.
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


@register
@dataclass(frozen=True)
class Gemm(Op):
    """(x [...,K], w compute[N,K] panel16[, norm f32[K]][, bias f32[N]][, residual f32[...,M]]) -> dtype [...,M].

    1. prologue "rms_norm": x = x * rsqrt(mean(x^2)+eps) * norm, in fp32.   "none": x as is.
    2. x is rounded to ``compute`` (x may already be in it); acc = x @ w^T, fp32.
    3. if bias: acc += bias.
    4. activation on acc in fp32: none | silu | gelu_tanh | gelu_erf | relu.  If ``gated``: w's rows are gate and up interleaved
       by 16 (see weight_expr.Interleave; N counts both with padding), out[i] = activation(gate[i]) * up[i], M = ``out_features``.
       Not gated: M = N.
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


@register
@dataclass(frozen=True)
class GatherRows(Op):
    """(x [T,H]) -> [C,H]: rows logits_rows[row_start : row_start + C]."""

    name: ClassVar[str] = "gather_rows"
    is_sequence_op: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class Sample(Op):
    """(logits f32[C,V]) -> token; state "history"; fills the step outputs of the chunk's rows.

    For each row: raw logits are copied out if wanted; logprobs and ranks come from the raw logits (log-softmax in fp32;
    rank = 1 + how many are larger, ties: lower id first). Then bias, repetition / presence / frequency penalties (tokens of
    history[slot, 0..position]; prompt = positions < prompt_len), mask, temperature, min_p, top_k, top_p (renormalised
    after top_k), draw. Greedy (temperature 0, top_k 1, top_p 0 or min_p 1): highest adjusted logit, lowest id on ties.
    Draw: candidates in id order, or, when top_k or top_p is on, ordered by (adjusted logit descending, id ascending); u in [0,1) =
    top 24 bits of the first Philox4x32-10 word with key = seed (low, high) and counter = (position of the new token, 0, 0, 0),
    times 2^-24; the first candidate whose cumulative weight exceeds u * total. Weights are the integers
    rint(2^30 * exp((x - top) / temperature)), so the token does not depend on the order of summation; sampling_reference.py
    gives every step bit by bit. A forced row draws nothing and does not write the history.
    Not asked for (num_logprobs -1): logprob 0, rank 0, ids -1.
    Otherwise history[slot, position + 1] = token, if position + 1 < max_seq_len.
    """

    name: ClassVar[str] = "sample"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    vocab_size: int
    max_logprobs: int
