"""Ops at a step's edges: resolve token ids, embed, pick rows, sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import DriverError, GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TOKEN_TYPE, TensorType
from .arrays import TOKEN_ARRAY, f32
from .base import Op, StepContext, register
from .checks import need, need_count, need_index, need_matrix, need_rank
from .sampling_reference import resolve_tokens_reference, sample_reference

HISTORY = "history"  # the slot state that holds every sequence's token ids by position


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

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        need(self.name, "token_ids", inputs[0], DType.I32, ("T",))
        return inputs

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (resolve_tokens_reference(ctx, inputs[0]),)


@register
@dataclass(frozen=True)
class Embedding(Op):
    """(ids i32[...], table [V,H] in any layout) -> dtype [...,H]: table rows, times scale (in fp32) when not 1."""

    name: ClassVar[str] = "embedding"
    dtype: DType
    scale: float = 1.0

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        ids, table = inputs
        need_index(self.name, "ids", ids)
        hidden = need_matrix(self.name, "table", table)[1]
        return (TensorType(self.dtype, (*ids.shape, hidden)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        ids, table = inputs
        if ids.size and (ids.min() < 0 or ids.max() >= table.shape[0]):
            raise DriverError(f"embedding: token ids {ids.min()}..{ids.max()} leave the table's {table.shape[0]} rows")
        rows = f32(table[ids])
        if self.scale != 1.0:
            rows = rows * np.float32(self.scale)
        return (rows.astype(self.dtype.numpy),)


@register
@dataclass(frozen=True)
class GatherRows(Op):
    """(x [T,H]) -> [C,H]: rows logits_rows[row_start : row_start + C]."""

    name: ClassVar[str] = "gather_rows"
    is_sequence_op: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        x = inputs[0]
        need_rank(self.name, "x", x, 2, 2)
        if x.shape[0] != "T" or x.layout != "rows":
            raise GraphError(f"gather_rows: x must be [T,H], got {x}")
        return (TensorType(x.dtype, ("C", x.shape[1])),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (inputs[0][ctx.step.logits_rows[ctx.row_start : ctx.row_start + ctx.row_count]],)


@register
@dataclass(frozen=True)
class Sample(Op):
    """(logits f32[C,V]) -> token; state "history"; fills the step outputs of the chunk's rows.

    For each row: raw logits are copied out if wanted; logprobs and ranks come from the raw logits (log-softmax in
    fp32; rank = 1 + how many are larger, ties: lower id first). Then bias, repetition / presence / frequency penalties
    (tokens of history[slot, 0..position]; prompt = positions < prompt_len), mask, temperature, min_p, top_k, top_p
    (renormalised after top_k), draw. Greedy (temperature 0, top_k 1, top_p 0 or min_p 1): highest adjusted logit,
    lowest id on ties. Draw: candidates in id order, or, when top_k or top_p is on, by (adjusted logit descending,
    id ascending); u in [0,1) = top 24 bits of the first Philox4x32-10 word with key = seed (low, high) and counter =
    (position of the new token, 0, 0, 0), times 2^-24; the first candidate whose cumulative weight exceeds u * total.
    Weights are integers (see sampling_reference.py), so that every target draws the same token from the same logits.
    A forced row draws nothing and does not write the history. Otherwise history[slot, position + 1] = token, if
    position + 1 < max_seq_len.
    """

    name: ClassVar[str] = "sample"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    vocab_size: int
    max_logprobs: int

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        need(self.name, "logits", inputs[0], DType.F32, ("C", self.vocab_size))
        return (TOKEN_TYPE,)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        sample_reference(ctx, inputs[0], self.max_logprobs)
        return (TOKEN_ARRAY,)
