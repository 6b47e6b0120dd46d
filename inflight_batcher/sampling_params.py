"""What a caller may ask of sampling, under vLLM's names, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Self

from ..runtime.errors import RequestError
from ..runtime.names import refuse_unknown

#: Of numbers that steps hold in fp32.
_LARGEST = 1e30


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Immutable; a bad value or an unknown field raises RequestError naming it.

    Greedy when ``temperature`` = 0, ``top_k`` = 1, ``top_p`` = 0 or ``min_p`` = 1. Order of the filters: temperature,
    min_p, top_k, top_p. ``repetition_penalty`` looks at prompt and output, the other two at the output only.
    """

    n: int = 1  # completions of the prompt
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: drawn from the engine's seed, in order of arrival; choice i uses seed + i
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False  # also puts the text of a stop token in the output
    ignore_eos: bool = False
    min_tokens: int = 0  # end-of-sequence, stop ids and stop strings do not count before this many tokens
    max_tokens: int | None = 16  # None: as many as the engine's range allows; 0: only score the prompt
    logprobs: int | None = None  # 0: of the chosen token; k: also of the k most likely
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None  # token id -> addend, clamped to [-100, 100]
    bad_words: Sequence[str | Sequence[int]] | None = None  # text or token ids that must not be produced
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __new__(cls, *values: object, **named: object) -> Self:
        """Only refuses what is no field, before Python's own message does."""
        refuse_unknown(cls.__name__, named, (field.name for field in fields(cls)), RequestError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _integer("n", self.n, low=1)
        _number("temperature", self.temperature, low=0.0, high=_LARGEST)
        _integer("top_k", self.top_k, low=-1, high=2**31 - 1)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=_LARGEST)
        if self.repetition_penalty < 1 / _LARGEST:
            raise _refuse("repetition_penalty", self.repetition_penalty, "a number above 0 (1 = off)")
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        self._check_lengths()
        self._normalise()

    def _check_lengths(self) -> None:
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0)
            if self.min_tokens > self.max_tokens:
                raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0)

    def _normalise(self) -> None:
        """Give every collection one immutable form, so that params can be shared and compared."""
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        if "" in self.stop_strings:
            raise _refuse("stop", "", "non-empty strings")
        if self.stop_strings and not self.detokenize:
            raise _refuse("stop", self.stop, "no stop strings when detokenize is false")
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _bias(self.logit_bias))
        words = self.bad_words if self.bad_words is not None else ()
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise _refuse("bad_words", words, "a list of strings or of token id lists")
        put(self, "bad_words", tuple(w if isinstance(w, str) else _ids("bad_words", w) for w in words))
        if any(len(w) == 0 for w in self.bad_words or ()):
            raise _refuse("bad_words", words, "no empty entries")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, in the caller's order."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0 or self.min_p == 1


def _refuse(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}: got {value!r}; allowed: {allowed}")


def _span(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    bad = isinstance(value, bool) or not isinstance(value, Integral)
    if bad or value < low or (high is not None and value > high):
        raise _refuse(name, value, f"an integer, {_span(low, high)}")


def _number(name: str, value: Any, low: float, high: float | None = None) -> None:
    bad = isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)
    if bad or value < low or (high is not None and value > high):
        raise _refuse(name, value, f"a finite number, {_span(low, high)}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise _refuse(name, value, "a string or a list of strings")
    return tuple(items)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refuse(name, value, "a list of token ids")
    for item in value:
        _integer(name, item, low=0)
    return tuple(int(item) for item in value)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a mapping from token id to a number")
    for token, addend in value.items():
        _integer("logit_bias", token, low=0)
        _number("logit_bias", addend, low=-math.inf)
    return {int(token): min(100.0, max(-100.0, float(addend))) for token, addend in value.items()}
