"""Reference access to paged KV state: where a token's keys lie, writing them, attending to them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import DriverError
from .arrays import Floats, f32, softmax
from .base import StepContext


def token_sequences(ctx: StepContext) -> NDArray[np.int64]:
    """[T] the sequence (0..S-1) that owns each token of the step."""
    lengths = np.diff(ctx.step.query_start)
    return np.repeat(np.arange(ctx.step.num_seqs), lengths)


def write_kv(ctx: StepContext, state: str, k: np.ndarray, v: np.ndarray) -> None:
    """Store k and v [T,Hkv,D] at every token's place, rounded to the state's dtype."""
    storage = ctx.states[state]
    table = ctx.step.block_tables[ctx.state_groups[state]]
    positions = ctx.step.positions
    blocks = table[token_sequences(ctx), positions // ctx.tokens_per_block]
    if np.any(blocks < 0):
        token = int(np.argmax(blocks < 0))
        raise DriverError(f"{state}: token {token} at position {positions[token]} has no KV block in its block table")
    places = positions % ctx.tokens_per_block
    storage[blocks, places, 0] = f32(k).astype(storage.dtype)
    storage[blocks, places, 1] = f32(v).astype(storage.dtype)


def _stored(ctx: StepContext, state: str, sequence: int, start: int, stop: int) -> tuple[Floats, Floats]:
    """K and V of positions start..stop-1 as f32 [Hkv, stop-start, D]; blocks outside are not touched."""
    size = ctx.tokens_per_block
    table = ctx.step.block_tables[ctx.state_groups[state]][sequence]
    positions = np.arange(start, stop)
    blocks = table[positions // size]
    if np.any(blocks < 0):
        where = int(positions[np.argmax(blocks < 0)])
        raise DriverError(f"{state}: sequence {sequence} attends to position {where}, which has no KV block")
    pages = ctx.states[state][blocks, positions % size]
    kv = f32(np.moveaxis(pages, (1, 2), (0, 1)))
    return kv[0], kv[1]


def attend(
    ctx: StepContext, state: str, q: np.ndarray, scale: float, window: int | None, softcap: float | None
) -> Floats:
    """Causal attention of q [T,Hq,D] over what is stored; returns f32 [T,Hq,D].

    Every token is computed by itself over all its keys, so neither chunking nor mates change a bit.
    """
    heads, dim = q.shape[1:]
    kv_heads = ctx.states[state].shape[3]
    out = np.empty(q.shape, np.float32)
    queries = f32(q).reshape(q.shape[0], kv_heads, heads // kv_heads, dim)
    for token, sequence in enumerate(token_sequences(ctx)):
        position = int(ctx.step.positions[token])
        start = 0 if window is None else max(0, position - window + 1)
        k, v = _stored(ctx, state, int(sequence), start, position + 1)
        scores = np.matmul(queries[token], np.ascontiguousarray(k.transpose(0, 2, 1))) * np.float32(scale)
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        out[token] = np.matmul(softmax(scores), v).reshape(heads, dim)
    return out
