"""Addends to the logits of one sequence: logit_bias, tokens banned until min_tokens, bad words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Addends = tuple[NDArray[np.int32], NDArray[np.float32]]  # token ids, each once, and what to add to their logits


class LogitRules:
    """What is added to the logits of the next token, given how many tokens came before it.

    Only bad words of several tokens look at values; everything else depends on the count, so that a step can be
    packed before the previous one is read.
    """

    def __init__(
        self,
        bias: dict[int, float],
        banned_early: Iterable[int],
        min_tokens: int,
        bad_words: Iterable[Sequence[int]],
    ) -> None:
        words = [tuple(word) for word in bad_words]
        self._phrases: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for word in words:
            if len(word) > 1:
                self._phrases.setdefault(word[-2], []).append(word)
        self._min_tokens = min_tokens
        late = dict(bias) | {word[0]: -math.inf for word in words if len(word) == 1}
        early = late | {token: -math.inf for token in banned_early}
        self._early, self._late = early, late
        self._early_addends, self._late_addends = _addends(early), _addends(late)

    @property
    def needs_values(self) -> bool:
        """Whether earlier tokens must be known before a row can be packed."""
        return bool(self._phrases)

    @property
    def empty(self) -> bool:
        """Whether nothing is ever added."""
        return not self._early and not self._phrases

    def at(self, count: int, tokens: Sequence[int]) -> Addends:
        """Addends for the output token number ``count`` (from 0); ``tokens`` are the outputs before it."""
        early = count < self._min_tokens
        begun = self._phrases.get(tokens[-1], ()) if tokens else ()
        banned = [word[-1] for word in begun if len(word) <= len(tokens) + 1 and _ends_with(tokens, word[:-1])]
        if not banned:
            return self._early_addends if early else self._late_addends
        return _addends((self._early if early else self._late) | dict.fromkeys(banned, -math.inf))


def _ends_with(tokens: Sequence[int], prefix: tuple[int, ...]) -> bool:
    return tuple(tokens[len(tokens) - len(prefix) :]) == prefix


def _addends(table: dict[int, float]) -> Addends:
    return np.fromiter(table.keys(), np.int32, len(table)), np.fromiter(table.values(), np.float32, len(table))
