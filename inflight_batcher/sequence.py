"""One choice of one request, as the scheduler sees it: counts, a slot, never a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .bias import LogitRules
from .output import SequenceValues

if TYPE_CHECKING:
    from .request import Request

NO_SLOT = -1


class Sequence:
    """Counts of one growing list of tokens.

    Tokens ``[0, num_computed)`` have their K/V stored by steps that were issued; ``[0, num_tokens)`` exist, though
    the values of the latest may still be in flight; ``[0, limit)`` will be computed before the sequence ends: the
    last token it generates is never stored.
    """

    def __init__(
        self, request: Request, index: int, arrival: int, seed: int, values: SequenceValues, rules: LogitRules | None
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.rank = (-request.priority, arrival)  # sort key: who is served first
        self.seed = seed
        self.values = values
        self.rules = rules
        self.slot = NO_SLOT
        self.prompt_len = int(request.prompt_token_ids.shape[0])
        self.limit = request.stored_tokens
        self.num_tokens = self.prompt_len
        self.num_computed = 0
        self.in_flight = 0  # steps issued and not yet read
        self.waits_for_values = rules is not None and rules.needs_values
        self.generates = request.max_tokens > 0
        #: Positions [num_scored, score_end) still need a row that scores the next prompt token.
        self.num_scored = 0
        self.score_end = 0
        if request.want_logits or (params.prompt_logprobs is not None and index == 0):
            # The last prompt token's row samples if anything is generated, and scores nothing otherwise.
            self.score_end = self.prompt_len - self.generates
        #: Token values fed explicitly; later positions are read from the driver's history.
        self.known: NDArray[np.int32] = request.prompt_token_ids
        #: Whether a sibling's prompt K/V may be taken over. A repetition penalty reads the prompt in the history,
        #: which only tokens that are fed explicitly put there.
        self.may_fork = params.n > 1 and params.repetition_penalty == 1 and self.score_end == 0

    @property
    def remaining(self) -> int:
        """Tokens that exist and are not computed yet (0 when the sequence is complete by count)."""
        return min(self.num_tokens, self.limit) - self.num_computed

    @property
    def runnable(self) -> bool:
        """Whether the next step may include it."""
        return self.remaining > 0 and not (self.waits_for_values and self.in_flight)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.values.finish_reason is not None

    def samples_at(self, end: int) -> bool:
        """Whether a chunk that ends at ``end`` yields a new token."""
        return self.generates and end == self.num_tokens

    def rows_for(self, count: int) -> int:
        """Rows of logits that the next ``count`` tokens need."""
        end = self.num_computed + count
        if self.num_scored >= self.score_end:
            return int(self.samples_at(end))
        first = max(self.num_scored, self.num_computed)
        return max(0, min(end, self.score_end) - first) + self.samples_at(end)

    def rewind(self) -> None:
        """Forget what was computed; it will be computed again from token values that are known by then."""
        self.num_computed = 0
        self.slot = NO_SLOT

    def start(self, slot: int, computed: int) -> None:
        """Take a slot, with ``computed`` tokens already stored. All values are known: nothing is in flight."""
        self.slot = slot
        self.num_computed = computed
        if self.values.token_ids:
            self.known = np.concatenate([self.request.prompt_token_ids, np.asarray(self.values.token_ids, np.int32)])
