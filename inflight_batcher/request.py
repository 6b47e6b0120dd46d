"""A request as it waits and runs, and the checks that it can be served at all."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import RequestError
from ..runtime.format.plan import Ranges
from .output import RequestMetrics, RequestOutput, TokenLogprobs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .sequence import Sequence

DEFAULT_PRIORITY = 0.5
#: Most choices (SamplingParams.n) of one request.
MAX_CHOICES = 256


class ContextLengthError(RequestError):
    """Prompt and output do not fit the engine's range."""

    def __init__(self, message: str, prompt_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


@dataclass(eq=False)
class Request:
    """One prompt and what to do with it. ``sequences`` has ``params.n`` entries once it was added."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]  # [L]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, or what the range leaves
    prompt: str | None = None
    priority: float = DEFAULT_PRIORITY  # 0 to 1, higher first; equal ones in order of arrival
    want_logits: bool = False  # fp32 logits of every prompt position, in ``logits``
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    logits: NDArray[np.float32] | None = None  # [L, V]
    seed: int = 0  # of choice 0

    @property
    def stored_tokens(self) -> int:
        """Tokens of one choice whose K/V will be stored at most: the last generated one never is."""
        return int(self.prompt_token_ids.shape[0]) + max(self.max_tokens - 1, 0)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        for seq in self.sequences:  # noqa: SIM110 - in every step, and a generator costs more than the loop
            if seq.values.finish_reason is None:
                return False
        return True

    @cached_property
    def prompt_list(self) -> list[int]:
        """The prompt's ids, for all outputs."""
        ids: list[int] = self.prompt_token_ids.tolist()
        return ids

    def output(self) -> RequestOutput:
        """A snapshot for the caller. Costs the same however long prompt and answer are."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_list,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[seq.values.snapshot(seq.index) for seq in self.sequences],
            finished=self.finished,
            metrics=self.metrics,
        )


def make_request(
    request_id: str,
    token_ids: Seq[int] | NDArray[np.int32],
    params: SamplingParams,
    ranges: Ranges,
    vocab_size: int,
    *,
    prompt: str | None = None,
    priority: float = DEFAULT_PRIORITY,
    want_logits: bool = False,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Check a prompt and its parameters against the engine's ranges; raises RequestError saying what to change.

    ``bad_words``: those of the parameters, as token ids.
    """
    ids = check_tokens(token_ids, vocab_size)
    length = int(ids.shape[0])
    room = ranges.max_seq_len - length
    wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
    if wanted > room:
        raise ContextLengthError(
            f"the prompt has {length} token{'s' * (length != 1)} and max_tokens is {wanted}: together "
            f"{length + wanted}, but this engine was built for max_seq_len {ranges.max_seq_len}. Shorten one of them, "
            f"or rebuild the engine with --max-seq-len {length + wanted} or more",
            length,
            ranges.max_seq_len,
        )
    if params.n > MAX_CHOICES:
        raise RequestError(f"n: got {params.n}; one request has at most {MAX_CHOICES} choices. Send several requests")
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and asked > ranges.max_logprobs:
            raise RequestError(
                f"{name}: got {asked}, but this engine was built for at most {ranges.max_logprobs}. "
                f"Ask for fewer, or rebuild the engine with --max-logprobs {asked}"
            )
    named = {"logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_token_ids or ()}
    for name, tokens in (named | {"bad_words": [token for word in bad_words for token in word]}).items():
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            raise RequestError(f"{name}: token ids {outside[:4]} are outside the vocabulary of {vocab_size} tokens")
    if not 0.0 <= priority <= 1.0:
        raise RequestError(f"priority: got {priority!r}; allowed: a number between 0 and 1")
    request = Request(request_id, ids, params, wanted, prompt, float(priority), want_logits, bad_words)
    if params.prompt_logprobs is not None:
        request.prompt_logprobs = [None]  # the first token follows nothing
    return request


def check_tokens(token_ids: Seq[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """A prompt as i32 [L]; raises RequestError when it is empty, not integers, or outside the vocabulary."""
    try:
        wide = np.asarray(token_ids)
    except ValueError as error:
        raise RequestError(f"prompt_token_ids: {error}; allowed: a flat list of token ids") from error
    if wide.size == 0:
        raise RequestError("the prompt is empty: give at least one token (many models take their start token)")
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise RequestError(
            f"prompt_token_ids: got an array of {wide.dtype} with {wide.ndim} dimensions; allowed: a flat list of ids"
        )
    outside = np.flatnonzero((wide < 0) | (wide >= vocab_size))
    if outside.size:
        where = int(outside[0])
        raise RequestError(
            f"prompt_token_ids[{where}] = {int(wide[where])} is outside the vocabulary of {vocab_size} tokens"
        )
    return np.ascontiguousarray(wide, np.int32)
