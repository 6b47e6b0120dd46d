"""The only loop over steps: schedule, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ..runtime.drivers.base import Driver
from ..runtime.errors import PeltonError
from ..runtime.step import StepHandle, StepOutputs
from .batch import Batch, Chunk, StepArrays
from .bias import LogitRules
from .output import Detokenizer, DetokenizerFactory, Logprob, SequenceValues, TokenEvent, TokenLogprobs
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Sequence

_U64 = 2**64


class StepLoop:
    """Runs requests on a driver. Not thread-safe: one thread adds, aborts and steps.

    ``depth`` steps may be in flight: at 1 a step is read before the next is planned; at 2 planning and packing hide
    behind the driver, and stop checks lag by a step (a token sampled after the end is dropped).
    """

    def __init__(
        self,
        driver: Driver,
        num_blocks: tuple[int, ...],
        *,
        eos_token_ids: tuple[int, ...] = (),
        detokenizer: DetokenizerFactory | None = None,
        decode_token: Callable[[int], str] | None = None,
        config: SchedulerConfig | None = None,
        seed: int = 0,
        depth: int = 1,
    ) -> None:
        plan = driver.plan
        self.driver = driver
        # Per-sequence state other than the token history (recurrences) cannot be shared block by block.
        shareable = all(state.kind == "paged_kv" or state.name == "history" for state in plan.states)
        self.scheduler = Scheduler(plan.ranges, plan.kv_groups, num_blocks, config, can_fork=shareable)
        driver.allocate(num_blocks, self.scheduler.num_slots)
        self._arrays = StepArrays(plan.ranges, self.scheduler.kv, self.scheduler.num_slots, depth)
        self._depth = depth
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()
        self._eos = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._decode_token = decode_token
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._seed = seed
        self._unseeded = 0  # requests without a seed so far
        own = (StepLoop.step, StepLoop._read, SequenceValues.append, SequenceValues._scan, TokenEvent, self)
        driver.hold_near((*own, *self.scheduler.used_each_step(), *self._arrays.used_each_step()))

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; RequestError when it can never run."""
        if request.request_id in self._requests:
            raise PeltonError(f"request id {request.request_id!r} is in use by an unfinished request")
        params = request.params
        bias, early = dict(params.logit_bias or {}), self._banned_early(request)
        rules = LogitRules(bias, early, params.min_tokens, request.bad_words)
        self.scheduler.check_fits(request.stored_tokens)
        request.seed = self._seed_of(request)
        for index in range(params.n):
            values = SequenceValues(params, self._eos, self._new_detokenizer(params))
            seed = (request.seed + index) % _U64
            seq = Sequence(request, index, self._arrivals, seed, values, None if rules.empty else rules)
            self._arrivals += 1
            request.sequences.append(seq)
            self.scheduler.add(seq)
        self._requests[request.request_id] = request

    def _new_detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self._detokenizer is None or not params.detokenize:
            return None
        return self._detokenizer(params.skip_special_tokens)

    def abort(self, request_id: str) -> None:
        """Cancel a request now; what its steps in flight bring is dropped. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for seq in request.sequences:
            if not seq.finished:
                self.scheduler.finish(seq)
                seq.values.finish("abort")
        request.metrics.finish = time.monotonic()

    def abort_all(self) -> None:
        """Cancel everything and forget the steps in flight."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._in_flight.clear()

    def step(self) -> list[TokenEvent]:
        """One turn: plan and start a step, then read the oldest if ``depth`` are in flight (or none was planned).

        When the driver fails, every request is aborted and the error is raised.
        """
        try:
            batch = self.scheduler.schedule()
            if batch.chunks:
                for copy in batch.copies:
                    self.driver.copy_blocks(copy.group, [copy.source], [copy.target])
                handle = self.driver.execute(self._arrays.pack(batch))
                if self._depth > 1:
                    self._in_flight.append((batch, handle))
                    if len(self._in_flight) < self._depth:
                        return []
                    batch, handle = self._in_flight.popleft()
            elif self._in_flight:
                batch, handle = self._in_flight.popleft()
            else:
                self._check_nothing_left()
                return []
            events = self._read(batch, handle)
            if not self._requests and not self._in_flight:
                self.scheduler.check_idle()
            return events
        except BaseException:
            self.abort_all()
            raise

    def _check_nothing_left(self) -> None:
        if self._requests:
            self.scheduler.check_integrity()
            raise PeltonError("the scheduler has requests but can run none of them; this is a bug")

    def _read(self, batch: Batch, handle: StepHandle) -> list[TokenEvent]:
        """Give each row's value to its sequence; take out the sequences that ended."""
        events: list[TokenEvent] = []
        tokens = handle.tokens
        row = 0
        for chunk in batch.chunks:
            seq, first = chunk.seq, row
            values = seq.values
            row += chunk.num_rows
            seq.in_flight -= 1
            if values.finish_reason is not None:
                continue
            scored = chunk.num_rows - chunk.samples
            if scored:
                self._take_scores(chunk, handle.result(), first, scored)
            if chunk.samples:
                request, token, logprobs = seq.request, tokens[row - 1], None
                if request.metrics.first_token is None:
                    request.metrics.first_token = time.monotonic()
                asked = request.params.logprobs
                if asked is not None:
                    logprobs = self._logprobs(handle.result(), row - 1, token, asked)
                text = values.append(token, len(values.token_ids) + 1 == request.max_tokens, logprobs)
                events.append(
                    TokenEvent(request.request_id, seq.index, text, (token,), values.finish_reason, values.stop_reason)
                )
            elif not seq.generates and chunk.end == seq.limit:
                values.finish("length")
                events.append(TokenEvent(seq.request.request_id, seq.index, "", (), "length"))
            if seq.values.finish_reason is not None:
                self._retire(seq)
        return events

    def _take_scores(self, chunk: Chunk, outputs: StepOutputs, row: int, scored: int) -> None:
        """Log-probabilities or logits of prompt positions; row i belongs to the chunk's position ``first + i``."""
        request = chunk.seq.request
        first = chunk.end - chunk.num_rows
        if request.want_logits and outputs.logits is not None:
            if request.logits is None:
                request.logits = np.empty((chunk.seq.prompt_len, outputs.logits.shape[1]), np.float32)
            request.logits[first : first + scored] = outputs.logits[row : row + scored]
        asked = request.params.prompt_logprobs
        if asked is None or request.prompt_logprobs is None:
            return
        for offset in range(min(scored, chunk.seq.prompt_len - 1 - first)):
            token = int(request.prompt_token_ids[first + offset + 1])
            request.prompt_logprobs.append(self._logprobs(outputs, row + offset, token, asked))

    def _logprobs(self, outputs: StepOutputs, row: int, token: int, count: int) -> TokenLogprobs:
        """The chosen token, then the ``count`` most likely."""
        entries = {token: Logprob(float(outputs.logprobs[row]), int(outputs.ranks[row]), self._decode(token))}
        top_ids: list[int] = outputs.top_ids[row, :count].tolist()
        top: list[float] = outputs.top_logprobs[row, :count].tolist()
        for rank, (other, logprob) in enumerate(zip(top_ids, top, strict=True), start=1):
            if other >= 0 and other not in entries:
                entries[other] = Logprob(logprob, rank, self._decode(other))
        return entries

    def _decode(self, token: int) -> str | None:
        return None if self._decode_token is None else self._decode_token(token)

    def _retire(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        request = seq.request
        if request.finished:
            request.metrics.finish = time.monotonic()
            self._requests.pop(request.request_id, None)

    def _banned_early(self, request: Request) -> frozenset[int]:
        """Tokens that must not come before min_tokens."""
        if not request.params.min_tokens:
            return frozenset()
        stops = frozenset(request.params.stop_token_ids or ())
        return stops if request.params.ignore_eos else stops | self._eos

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or the next of a sequence that depends on the loop's seed alone."""
        if request.params.seed is not None:
            return request.params.seed % _U64
        self._unseeded += 1
        return _mix(_mix(self._seed % _U64) + self._unseeded)

    def check_integrity(self) -> None:
        """Raise PeltonError when the scheduler's state contradicts itself, or something is left over when idle."""
        self.scheduler.check_integrity()
        known = {seq for request in self._requests.values() for seq in request.sequences if not seq.finished}
        if known != set(self.scheduler.waiting) | set(self.scheduler.running):
            raise PeltonError("step loop: unfinished sequences and the scheduler's queues differ")


def _mix(value: int) -> int:
    """SplitMix64: spreads consecutive numbers over 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) % _U64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % _U64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % _U64
    return value ^ (value >> 31)
