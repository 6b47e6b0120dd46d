"""Mask descriptors: what an attention mask of the model library means, found by evaluating it.

The library builds a mask from an index function (batch, head, query, key) -> allowed. Its value on a
grid of positions up to the engine's longest sequence tells the kind; what fits no kind is not
guessed at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_DENSE = 96  # the first queries are all looked at
_HEADS = 3  # a mask that differs between heads is no kind we know


@dataclass(frozen=True)
class MaskDescriptor:
    """One attention mask. Travels through the traced model in the place of the mask tensor.

    ``kind``: "causal" (with ``window``: None, or how many latest positions are seen, the query's own
    included), "bidirectional", or "unknown"; ``detail`` says what was seen, for error messages.
    """

    kind: str
    window: int | None = None
    detail: str = ""


def classify_mask(function: MaskFunction, max_seq_len: int) -> MaskDescriptor:
    """Find the kind of an index function for positions below ``max_seq_len``.

    A window of at least ``max_seq_len`` never hides anything and is reported as plain causal.
    """
    queries = _query_rows(max_seq_len)
    try:
        rows = [_allowed(function, queries, max_seq_len, head) for head in range(_HEADS)]
    except Exception as error:  # any failure of foreign code means: not understood
        return MaskDescriptor(
            "unknown", detail=f"it cannot be evaluated on plain positions ({type(error).__name__}: {error})"
        )
    if any(not torch.equal(rows[0], other) for other in rows[1:]):
        return MaskDescriptor("unknown", detail="it differs from head to head")
    allowed = rows[0]
    query = queries[:, None]
    key = torch.arange(max_seq_len)[None, :]
    if bool(allowed.all()):
        return _bidirectional_or_causal(max_seq_len)
    window = int(allowed[-1].sum())
    if torch.equal(allowed, (key <= query) & (key > query - window)):
        return MaskDescriptor("causal", None if window >= max_seq_len else window)
    return MaskDescriptor("unknown", detail=_describe(allowed, queries))


def _bidirectional_or_causal(max_seq_len: int) -> MaskDescriptor:
    """Everything is allowed: with one position that is causal as well."""
    if max_seq_len == 1:
        return MaskDescriptor("causal")
    return MaskDescriptor("bidirectional", detail="every position sees every other, also later ones")


def _query_rows(max_seq_len: int) -> torch.Tensor:
    """Queries to look at: the first ones, powers of two and their neighbours, an even spread, the last."""
    rows = set(range(min(_DENSE, max_seq_len)))
    power = 1
    while power < max_seq_len:
        rows |= {power - 1, power, power + 1}
        power *= 2
    rows |= {i * (max_seq_len - 1) // 31 for i in range(32)}
    return torch.tensor(sorted(row for row in rows if 0 <= row < max_seq_len))


def _allowed(function: MaskFunction, queries: torch.Tensor, max_seq_len: int, head: int) -> torch.Tensor:
    """The function's value [queries, keys], evaluated in row blocks to bound memory."""
    blocks = []
    for block in torch.split(queries, 16):
        value = function(
            torch.zeros(1, 1, dtype=torch.long),
            torch.full((1, 1), head, dtype=torch.long),
            block[:, None],
            torch.arange(max_seq_len)[None, :],
        )
        blocks.append(torch.as_tensor(value, dtype=torch.bool).expand(len(block), max_seq_len))
    return torch.cat(blocks)


def _describe(allowed: torch.Tensor, queries: torch.Tensor) -> str:
    """A few rows in words: which keys some queries see."""
    seen = []
    for row in sorted({0, len(queries) // 2, len(queries) - 1}):
        keys = allowed[row].nonzero().flatten()
        span = f"{int(keys[0])}..{int(keys[-1])}" if len(keys) else "nothing"
        seen.append(f"query {int(queries[row])} sees {len(keys)} keys in {span}")
    return "; ".join(seen)
