"""The meaning of ResolveTokens and Sample in numpy.

Logprobs may differ from a kernel's by rounding; tokens may not. So everything that decides a token is
either exact (integers, comparisons) or a fixed sequence of single fp32 operations without fused
multiply-add, which numpy and every target carry out with the same bits:

* A logit that is NaN counts as -inf, +inf as the largest finite number, and -0 as +0.
* The weight of a candidate is the integer rint(2^30 * exp(-(top - x) / temperature)), see
  ``scaled_exponentials``. Integer sums do not depend on the order in which they are made, so a kernel
  may sum blocks, bins or lanes. Candidates of weight 0 do not exist.
* min_p keeps candidates whose probability is at least min_p times the top one's. top_k then keeps the k best by
  (adjusted logit descending, id ascending). top_p then keeps the shortest prefix, in that order, whose weight is at
  least top_p (in fp64) times the weight of what top_k left.
* The draw takes the first candidate whose cumulative weight exceeds floor(u * total), in id order, or in the order
  above when top_k or top_p is on.
* A row whose adjusted logits are all -inf gives id 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...runtime.step import FROM_HISTORY, NO_FORCED, SamplingInputs, StepOutputs
from .base import StepContext

F32 = np.float32
WEIGHT_ONE = 1 << 30  # the weight of the top candidate

_LARGEST = np.finfo(np.float32).max
_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011): four random 32-bit words for a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = _PHILOX_MULTIPLIERS[0] * c0
        p1 = _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK32
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def uniform24(seed: int, position: int) -> int:
    """The random number of a new token as an integer in [0, 2^24): u = uniform24 * 2^-24."""
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    return philox4x32((position & _MASK32, 0, 0, 0), key)[0] >> 8


def sanitise(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """NaN -> -inf, +inf -> the largest finite fp32, -0 -> +0; a new array."""
    x = np.where(np.isnan(logits), F32(-np.inf), np.minimum(logits, _LARGEST))
    return (x + F32(0)).astype(np.float32)


def scaled_exponentials(gap: NDArray[np.float32], temperature: np.float32) -> NDArray[np.float32]:
    """2^30 * exp(-gap / temperature) by a fixed sequence of fp32 operations (gap >= 0, may be inf).

    At most 2 ulp from the true value of the rounded quotient; exactly 2^30 at gap 0.
    """
    with np.errstate(over="ignore"):
        y = -np.minimum(gap / temperature, F32(40))
    n = np.rint(y * F32(1.44269504))
    r = (y - n * F32(0.69314575195)) - n * F32(1.4286067653e-6)
    p = np.full_like(r, F32(1 / 5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        p = p * r + F32(1 / factorial)
    scale = ((n.astype(np.int32) + np.int32(30 + 127)) << np.int32(23)).view(np.float32)
    return np.asarray(p * scale, dtype=np.float32)


def resolve_tokens_reference(ctx: StepContext, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """ResolveTokens: i32[T] -> i32[T]; fills in FROM_HISTORY entries and stores every id in state "history"."""
    history = ctx.states["history"]
    resolved = np.array(token_ids, dtype=np.int32)
    start = ctx.step.query_start
    for sequence, slot in enumerate(ctx.step.seq_slots):
        for t in range(int(start[sequence]), int(start[sequence + 1])):
            position = ctx.step.positions[t]
            if resolved[t] == FROM_HISTORY:
                resolved[t] = history[slot, position]
            history[slot, position] = resolved[t]
    return resolved


def adjusted_logits(
    x: NDArray[np.float32], sampling: SamplingInputs, row: int, past: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Bias, penalties and mask applied to one row of raw logits; ``past`` = ids of positions 0..position."""
    x = sanitise(x)
    vocab = x.shape[0]
    for i in range(int(sampling.bias_start[row]), int(sampling.bias_start[row + 1])):
        if 0 <= sampling.bias_ids[i] < vocab:
            x[sampling.bias_ids[i]] += sampling.bias_values[i]
    repetition = F32(sampling.repetition_penalty[row])
    presence = F32(sampling.presence_penalty[row])
    frequency = F32(sampling.frequency_penalty[row])
    if repetition != 1 or presence != 0 or frequency != 0:
        known = past[(past >= 0) & (past < vocab)]
        output = past[int(sampling.prompt_len[row]) :]
        counts = np.bincount(output[(output >= 0) & (output < vocab)], minlength=vocab)
        seen = np.zeros(vocab, dtype=bool)
        seen[known] = True
        scaled = np.where(x > 0, x / repetition, x * repetition)
        x = np.where(seen, scaled, x)
        penalised = (x - frequency * counts.astype(np.float32)) - presence
        x = np.where(counts > 0, penalised, x)
    if sampling.mask is not None:
        bits = np.unpackbits(np.ascontiguousarray(sampling.mask[row]).view(np.uint8), bitorder="little")
        x = np.where(bits[:vocab] != 0, x, F32(-np.inf))
    return sanitise(x)


def is_greedy(
    temperature: float | np.float32, top_k: int, top_p: float | np.float32, min_p: float | np.float32
) -> bool:
    """Whether parameters mean "the highest adjusted logit": no draw is made then."""
    return bool(not temperature >= _SMALLEST_NORMAL or top_k == 1 or top_p <= 0 or min_p >= 1)


def draw(
    x: NDArray[np.float32], temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32, u24: int
) -> int:
    """The token drawn from sanitised adjusted logits ``x``; ``u24`` as from ``uniform24``."""
    top = x.max()
    if is_greedy(temperature, top_k, top_p, min_p) or top == -np.inf:
        return int(x.argmax())
    scaled = scaled_exponentials(top - x, min(F32(temperature), _LARGEST))
    weights = np.rint(scaled).astype(np.int64)
    least = F32(min_p) * F32(WEIGHT_ONE) if min_p > 0 else F32(0)
    ids = np.flatnonzero((weights > 0) & (scaled >= least))
    if top_k > 0 or top_p < 1:
        ids = ids[np.argsort(-x[ids], kind="stable")]
        if top_k > 0:
            ids = ids[:top_k]
        if top_p < 1:
            before = np.cumsum(weights[ids]) - weights[ids]
            ids = ids[before.astype(np.float64) < np.float64(top_p) * np.float64(weights[ids].sum())]
    cumulative = np.cumsum(weights[ids])
    target = (u24 * int(cumulative[-1])) >> 24
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of one row of sanitised raw logits; all -inf if there is no finite logit."""
    wide = x.astype(np.float64)
    top = wide.max()
    if top == -np.inf:
        return wide
    gap = wide - top
    return np.asarray(gap - np.log(np.exp(gap).sum()))


def write_logprobs(out: StepOutputs, row: int, x: NDArray[np.float32], token: int, count: int, width: int) -> None:
    """Fill logprob, rank and the ``count`` best of one row; count -1 asks for none (0, rank 0, ids -1)."""
    out.logprobs[row], out.ranks[row] = 0, 0
    out.top_ids[row, :width] = -1
    out.top_logprobs[row, :width] = -np.inf
    if count < 0:
        return
    logprobs = log_softmax(x)
    out.logprobs[row] = logprobs[token]
    out.ranks[row] = 1 + int((x > x[token]).sum()) + int((x[:token] == x[token]).sum())
    best = np.argsort(-x, kind="stable")[: min(count, width)]
    out.top_ids[row, : len(best)] = best
    out.top_logprobs[row, : len(best)] = logprobs[best]


def sample_reference(ctx: StepContext, logits: NDArray[np.float32], max_logprobs: int) -> None:
    """Sample: logits f32[C,V] of rows ``ctx.row_start`` on -> fills ``ctx.outputs`` and state "history"."""
    out = ctx.outputs
    if out is None:
        raise ValueError("sample: the step context has no outputs to fill")
    step, sampling = ctx.step, ctx.step.sampling
    history = ctx.states["history"]
    for i in range(ctx.row_count):
        row = ctx.row_start + i
        position = int(step.positions[step.logits_rows[row]])
        slot = int(step.seq_slots[step.row_seq[row]])
        if out.logits is not None:
            out.logits[row] = logits[i]
        token = int(sampling.forced[row])
        if token == NO_FORCED:
            x = adjusted_logits(logits[i], sampling, row, history[slot, : position + 1])
            u24 = uniform24(int(sampling.seed[row]), position + 1)
            token = draw(
                x,
                F32(sampling.temperature[row]),
                int(sampling.top_k[row]),
                F32(sampling.top_p[row]),
                F32(sampling.min_p[row]),
                u24,
            )
            if position + 1 < history.shape[1]:
                history[slot, position + 1] = token
        out.tokens[row] = token
        write_logprobs(out, row, sanitise(logits[i]), token, int(sampling.num_logprobs[row]), max_logprobs)


__all__ = [
    "WEIGHT_ONE",
    "adjusted_logits",
    "draw",
    "is_greedy",
    "log_softmax",
    "philox4x32",
    "resolve_tokens_reference",
    "sample_reference",
    "sanitise",
    "scaled_exponentials",
    "uniform24",
]
