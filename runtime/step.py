"""What goes into a step and what comes out of it: the contract between scheduler and driver.

All sequences of a step are packed in one row of T tokens. Arrays are C-contiguous numpy arrays.
Sampling is part of the step, so a step's output is token ids, and the next step may be issued
before their values are known: an input token id of ``FROM_HISTORY`` reads the token that an earlier
step sampled for this sequence and position (drivers keep every sequence's tokens in state "history").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

FROM_HISTORY = -1  # as a token id: "whatever was sampled for this position"
NO_FORCED = -1  # in SamplingInputs.forced: sample; else score this id instead


#: The parameters of SamplingInputs that all rows of a sequence share, one value a row, with their element types.
ROW_PARAMETERS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "num_logprobs": np.int32,
    "prompt_len": np.int32,
}


@dataclass(frozen=True)
class SamplingInputs:
    """Per-row sampling parameters; every array has length R unless said otherwise."""

    temperature: NDArray[np.float32]  # 0 = greedy
    top_k: NDArray[np.int32]  # 0 = off
    top_p: NDArray[np.float32]  # 1 = off, 0 = greedy
    min_p: NDArray[np.float32]  # 0 = off, 1 = greedy
    repetition_penalty: NDArray[np.float32]  # 1 = off; over prompt and output
    presence_penalty: NDArray[np.float32]  # 0 = off; over output only
    frequency_penalty: NDArray[np.float32]  # 0 = off; over output only
    seed: NDArray[np.uint64]
    num_logprobs: NDArray[np.int32]  # -1 none, 0 chosen only, n also the n best
    prompt_len: NDArray[np.int32]  # positions < prompt_len are prompt (penalty scopes)
    forced: NDArray[np.int32]  # NO_FORCED, or the token to score (prompt logprobs)
    bias_start: NDArray[np.int32]  # [R+1] offsets into bias_ids / bias_values
    bias_ids: NDArray[np.int32]  # token ids whose logit gets an addend (logit_bias, bans = -inf)
    bias_values: NDArray[np.float32]
    mask: NDArray[np.uint32] | None = None  # [R, ceil(V/32)] allowed-token bits, or None


def greedy_sampling(rows: int) -> SamplingInputs:
    """Sampling inputs of ``rows`` greedy rows without penalties, bias or logprobs."""
    off = {"top_p": 1, "repetition_penalty": 1, "num_logprobs": -1}  # everything else is off at 0
    return SamplingInputs(
        **{name: np.full(rows, off.get(name, 0), kind) for name, kind in ROW_PARAMETERS.items()},
        forced=np.full(rows, NO_FORCED, np.int32),
        bias_start=np.zeros(rows + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
    )


@dataclass(frozen=True)
class StepInputs:
    """One step. Sequence s owns tokens ``query_start[s]:query_start[s+1]``, at consecutive positions."""

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T] absolute position in the sequence
    query_start: NDArray[np.int32]  # [S+1]
    seq_slots: NDArray[np.int32]  # [S] slot of per-sequence state
    block_tables: tuple[NDArray[np.int32], ...]  # one [S, max_blocks_per_seq] per KV group; -1 = no block
    logits_rows: NDArray[np.int32]  # [R] indices into T
    row_seq: NDArray[np.int32]  # [R] the sequence of each row
    sampling: SamplingInputs
    want_logits: bool = False  # also return fp32 logits of the R rows

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_slots.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.logits_rows.shape[0])


@dataclass(frozen=True)
class StepOutputs:
    """Results of the R rows, in row order.

    Row r's token is for position ``positions[logits_rows[r]] + 1`` and has been stored in the
    history (unless forced). Log-probabilities are of the raw model distribution (before bias,
    penalties and temperature).
    """

    tokens: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32]  # [R] of the token (or of the forced one)
    ranks: NDArray[np.int32]  # [R] 1 = the most likely
    top_ids: NDArray[np.int32]  # [R, max_logprobs], best first, ties to the lower id; -1 past num_logprobs
    top_logprobs: NDArray[np.float32]  # [R, max_logprobs]
    logits: NDArray[np.float32] | None  # [R, V] when asked for


class FinishedStep(msgspec.Struct, eq=False, frozen=True):  # a Struct, like all that is made in every step
    """The StepHandle of a driver whose ``execute`` returns when the step has run."""

    outputs: StepOutputs
    tokens: list[int]

    def done(self) -> bool:
        return True

    def result(self) -> StepOutputs:
        return self.outputs


@runtime_checkable
class StepHandle(Protocol):
    """A step in flight."""

    @property
    def tokens(self) -> list[int]:
        """``result().tokens`` as a list, which is all that most steps are read for; waits and raises as it does."""
        ...

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        ...

    def result(self) -> StepOutputs:
        """Wait for the step; raises DriverError if it failed."""
        ...
