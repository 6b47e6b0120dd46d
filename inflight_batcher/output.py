"""What a caller gets back, and the values of one sequence while it grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from .sampling_params import SamplingParams
from .stop import StopStrings

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the raw model distribution; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the chosen token first, then the most likely ones, best first


@dataclass
class CompletionOutput:
    """One choice. ``delta`` and ``delta_token_ids`` are what is new since the previous output of a stream."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end of sequence
    delta: str = ""
    delta_token_ids: list[int] = field(default_factory=list)


class CompletionSnapshot(CompletionOutput):
    """A choice as it stood at some token. What grows with the answer is copied when it is looked at, and only then."""

    def __init__(self, index: int, values: SequenceValues) -> None:
        self.index = index
        self.cumulative_logprob = None if values.logprobs is None else values.cumulative_logprob
        self.finish_reason = values.finish_reason
        self.stop_reason = values.stop_reason
        self.delta = ""
        self.delta_token_ids = []
        # These lists only ever grow at their ends.
        self._grown = values.pieces, values.token_ids, values.logprobs
        self._counts = len(values.pieces), len(values.token_ids)

    def __getattr__(self, name: str) -> Any:
        """text, token_ids and logprobs, at first."""
        if name not in ("text", "token_ids", "logprobs"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        (pieces, token_ids, logprobs), (num_pieces, num_tokens) = self._grown, self._counts
        value: Any
        if name == "text":
            value = "".join(pieces[:num_pieces])
        elif name == "token_ids":
            value = token_ids[:num_tokens]
        else:
            value = None if logprobs is None else logprobs[:num_tokens]
        self.__dict__[name] = value
        return value


@dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock; None while the moment has not come."""

    arrival: float
    first_token: float | None = None
    finish: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass
class RequestOutput:
    """A request's choices so far; complete when ``finished``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


class TokenEvent(msgspec.Struct):
    """News of one choice after a step: text and tokens that are new, and why it ended if it did."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Detokenizer(Protocol):
    """Turns a growing list of tokens into text; only whole characters come out."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


#: Makes a detokenizer; the argument is skip_special_tokens.
DetokenizerFactory = Callable[[bool], Detokenizer]


class SequenceValues:
    """Token values, text and log-probabilities of one sequence, and its stop rules.

    Cost per token does not depend on how many came before.
    """

    def __init__(self, params: SamplingParams, eos: frozenset[int], detokenizer: Detokenizer | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.pieces: list[str] = []  # of the text that may be shown
        self._min_tokens, self._shows_stop = params.min_tokens, params.include_stop_str_in_output
        self._eos = frozenset() if params.ignore_eos else eos
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._detokenizer = detokenizer
        stops = params.stop_strings
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return "".join(self.pieces)

    def append(self, token: int, last: bool, logprobs: TokenLogprobs | None = None) -> str:
        """Take the next token; returns text to show. Sets ``finish_reason`` on a stop or when ``last``."""
        self.token_ids.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        may_stop = len(self.token_ids) >= self._min_tokens
        text = ""
        is_eos, is_stop_id = token in self._eos, token in self._stop_ids
        ends = may_stop and (is_eos or is_stop_id)
        if self._detokenizer is not None and (not ends or self._shows_stop):
            text = self._scan(self._detokenizer.push(token), may_stop)
        if self.finish_reason is None and ends:
            self.finish_reason, self.stop_reason = "stop", None if is_eos else token
        elif self.finish_reason is None and last:
            self.finish_reason = "length"
        else:
            if text:
                self.pieces.append(text)
            return text
        text += self._flush(may_stop)
        self._keep(text)
        return text

    def finish(self, reason: FinishReason) -> str:
        """End from outside (cancelled, or nothing to generate); returns text that was held back."""
        self.finish_reason = reason
        text = self._flush(may_stop=False)
        self._keep(text)
        return text

    def snapshot(self, index: int) -> CompletionOutput:
        """What there is now, for the caller. Costs the same however long the answer is."""
        return CompletionSnapshot(index, self)

    def _keep(self, text: str) -> None:
        if text:
            self.pieces.append(text)

    def _scan(self, text: str, may_stop: bool) -> str:
        if self._stops is None:
            return text
        scan = self._stops.push(text, may_stop)
        if scan.matched is not None:
            self.finish_reason, self.stop_reason = "stop", scan.matched
        return scan.text

    def _flush(self, may_stop: bool) -> str:
        """Text still inside the detokenizer (a character cut short) may yet complete a stop string."""
        if self._detokenizer is None or isinstance(self.stop_reason, str):
            return ""
        text = self._scan(self._detokenizer.flush(), may_stop)
        if self._stops is None or isinstance(self.stop_reason, str):
            return text
        return text + self._stops.flush()
