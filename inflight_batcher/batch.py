"""One step's work, and its packing into the arrays that a driver takes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..runtime.format.plan import Ranges
from ..runtime.step import FROM_HISTORY, NO_FORCED, ROW_PARAMETERS, SamplingInputs, StepInputs
from .bias import Addends
from .kv_cache import BlockCopy, KVCache
from .sequence import Sequence


class Chunk(msgspec.Struct, eq=False):  # a Struct, like all that is made in every step: it is made without Python
    """Tokens ``start : start+count`` of a sequence. Its ``num_rows`` rows are for its last tokens.

    All rows score prompt tokens, but for the last one of a chunk that ``samples``.
    """

    seq: Sequence
    slot: int
    start: int
    count: int
    num_rows: int
    samples: bool

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.count


class Batch(msgspec.Struct, eq=False):
    """What one step computes: chunks of sequences, and what must happen before."""

    chunks: list[Chunk]
    started: list[Sequence]  # sequences that got their slot in this step
    copies: list[BlockCopy]
    num_tokens: int
    num_rows: int
    decodes: bool  # every running sequence takes one token, and its row samples the next
    changes: int  # the scheduler's: two batches of the same number have the same sequences running


def all_decode(chunks: Seq[Chunk]) -> bool:
    """Whether every chunk is one token whose value the driver has, and its row samples the next."""
    return all(c.count == c.num_rows == 1 and c.samples and c.start >= len(c.seq.known) for c in chunks)


class _Buffers:
    """Arrays of one step at their largest sizes."""

    def __init__(self, ranges: Ranges, num_groups: int) -> None:
        tokens, seqs, rows = ranges.max_num_tokens, ranges.max_batch_size, ranges.max_logits_rows
        self.token_ids = np.empty(tokens, np.int32)
        self.positions = np.empty(tokens, np.int32)
        self.position_view = self.positions.data  # to write one number through: sooner done than through the array
        self.query_start = np.zeros(seqs + 1, np.int32)
        self.slots = np.empty(seqs, np.int32)
        self.tables = [np.empty((seqs, ranges.max_blocks_per_seq), np.int32) for _ in range(num_groups)]
        self.logits_rows = np.empty(rows, np.int32)
        self.row_seq = np.empty(rows, np.int32)
        self.forced = np.empty(rows, np.int32)
        self.parameters = {name: np.empty(rows, kind) for name, kind in ROW_PARAMETERS.items()}
        self.sampling: SamplingInputs | None = None  # of the last step packed here, when it may serve again
        self.sampling_key = b""
        # The last step packed here, while one just like it may follow: the same sequences, each one token further.
        self.inputs: StepInputs | None = None
        self.changes = 0  # its batch's
        self.version = 0  # of the block tables


class StepArrays:
    """Preallocated step inputs, one set for each step that may be in flight, and the parameters of each slot."""

    def __init__(self, ranges: Ranges, kv: KVCache, num_slots: int, depth: int) -> None:
        self._sets = [_Buffers(ranges, len(kv.groups)) for _ in range(depth)]
        self._turn = 0
        self._binds = 0  # changes of the parameters of any slot
        self._kv = kv
        self._by_slot = {name: np.zeros(num_slots, kind) for name, kind in ROW_PARAMETERS.items()}
        self._arange = np.arange(max(ranges.max_seq_len, ranges.max_num_tokens) + 1, dtype=np.int32)
        self._no_bias = np.zeros(ranges.max_logits_rows + 1, np.int32)
        self._no_ids, self._no_values = np.empty(0, np.int32), np.empty(0, np.float32)

    def used_each_step(self) -> tuple[object, ...]:
        """What packing a decode step goes through."""
        views = [buffers.position_view for buffers in self._sets]
        return StepArrays.pack, self, self._sets, *self._sets, *views

    def pack(self, batch: Batch) -> StepInputs:
        """Fill the next set of preallocated arrays; they stay untouched for ``depth`` - 1 more steps.

        The work depends on the step's tokens and rows, not on how long sequences are.
        """
        for seq in batch.started:
            self._bind(seq)
        buffers = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        chunks = batch.chunks
        if buffers.inputs is not None and batch.decodes and batch.changes == buffers.changes:
            # Drivers see the same StepInputs object again, with other numbers in two of its arrays.
            if batch.num_tokens == 1:
                buffers.position_view[0] = chunks[0].start
            else:
                buffers.positions[: batch.num_tokens] = [chunk.start for chunk in chunks]
            if buffers.version != self._kv.version:
                self._pack_tables(buffers, buffers.slots[: batch.num_tokens])
            return buffers.inputs
        tokens, seqs, rows = batch.num_tokens, len(chunks), batch.num_rows
        decodes = all_decode(chunks)
        if decodes:
            self._pack_decodes(buffers, chunks)
        else:
            self._pack_mixed(buffers, chunks)
        slots = buffers.slots[:seqs]
        self._pack_tables(buffers, slots)
        inputs = StepInputs(
            token_ids=buffers.token_ids[:tokens],
            positions=buffers.positions[:tokens],
            query_start=buffers.query_start[: seqs + 1],
            seq_slots=slots,
            block_tables=tuple(table[:seqs] for table in buffers.tables),
            logits_rows=buffers.logits_rows[:rows],
            row_seq=buffers.row_seq[:rows],
            sampling=self._decode_sampling(buffers, batch) if decodes else self._pack_sampling(buffers, batch),
            want_logits=any(chunk.num_rows and chunk.seq.request.want_logits for chunk in chunks),
        )
        repeats = decodes and batch.decodes and all(chunk.seq.rules is None for chunk in chunks)
        buffers.inputs, buffers.changes = inputs if repeats else None, batch.changes
        return inputs

    def _pack_tables(self, buffers: _Buffers, slots: NDArray[np.int32]) -> None:
        for group, table in zip(self._kv.groups, buffers.tables, strict=True):
            group.table.take(slots, axis=0, out=table[: slots.shape[0]], mode="clip")
        buffers.version = self._kv.version

    def _bind(self, seq: Sequence) -> None:
        """Note a sequence's parameters under its slot."""
        params, table, slot = seq.request.params, self._by_slot, seq.slot
        self._binds += 1
        table["temperature"][slot] = params.temperature
        table["top_k"][slot] = max(params.top_k, 0)
        table["top_p"][slot] = params.top_p
        table["min_p"][slot] = params.min_p
        table["repetition_penalty"][slot] = params.repetition_penalty
        table["presence_penalty"][slot] = params.presence_penalty
        table["frequency_penalty"][slot] = params.frequency_penalty
        table["seed"][slot] = seq.seed
        table["num_logprobs"][slot] = -1 if params.logprobs is None else params.logprobs
        table["prompt_len"][slot] = seq.prompt_len

    def _pack_decodes(self, buffers: _Buffers, chunks: Seq[Chunk]) -> None:
        """One token and one row a sequence, every token read from the history."""
        count = len(chunks)
        buffers.token_ids[:count] = FROM_HISTORY
        buffers.positions[:count] = [chunk.start for chunk in chunks]
        buffers.slots[:count] = [chunk.slot for chunk in chunks]
        buffers.query_start[: count + 1] = self._arange[: count + 1]
        buffers.logits_rows[:count] = self._arange[:count]
        buffers.row_seq[:count] = self._arange[:count]
        buffers.forced[:count] = NO_FORCED

    def _pack_mixed(self, buffers: _Buffers, chunks: Seq[Chunk]) -> None:
        token = row = 0
        for index, chunk in enumerate(chunks):
            end = token + chunk.count
            known = chunk.seq.known[chunk.start : chunk.end]
            buffers.token_ids[token : token + len(known)] = known
            buffers.token_ids[token + len(known) : end] = FROM_HISTORY
            buffers.positions[token:end] = self._arange[chunk.start : chunk.end]
            buffers.slots[index] = chunk.slot
            buffers.query_start[index] = token
            if chunk.num_rows:
                last = row + chunk.num_rows
                buffers.logits_rows[row:last] = self._arange[end - chunk.num_rows : end]
                buffers.row_seq[row:last] = index
                buffers.forced[row:last] = NO_FORCED
                scored = chunk.num_rows - chunk.samples
                if scored:
                    buffers.forced[row : row + scored] = _next_tokens(chunk, scored)
                row = last
            token = end
        buffers.query_start[len(chunks)] = token

    def _decode_sampling(self, buffers: _Buffers, batch: Batch) -> SamplingInputs:
        """While the same sequences decode step after step, their parameters stay as they were packed."""
        if any(chunk.seq.rules is not None for chunk in batch.chunks):
            return self._pack_sampling(buffers, batch)
        key = b"%d:" % self._binds + buffers.slots[: batch.num_rows].tobytes()
        if buffers.sampling is None or buffers.sampling_key != key:
            buffers.sampling = self._pack_sampling(buffers, batch)
            buffers.sampling_key = key
        return buffers.sampling

    def _pack_sampling(self, buffers: _Buffers, batch: Batch) -> SamplingInputs:
        rows = batch.num_rows
        buffers.sampling = None
        row_slots = buffers.slots.take(buffers.row_seq[:rows], mode="clip")
        parameters = {}
        for name, table in self._by_slot.items():
            parameters[name] = out = buffers.parameters[name][:rows]
            table.take(row_slots, out=out, mode="clip")
        self._override_scored(parameters["num_logprobs"], batch.chunks)
        starts, ids, values = self._pack_bias(batch)
        return SamplingInputs(
            **parameters, forced=buffers.forced[:rows], bias_start=starts, bias_ids=ids, bias_values=values
        )

    def _override_scored(self, num_logprobs: NDArray[np.int32], chunks: Seq[Chunk]) -> None:
        """Rows that score prompt tokens have a number of log-probabilities of their own."""
        row = 0
        for chunk in chunks:
            scored = chunk.num_rows - chunk.samples
            if scored:
                asked = chunk.seq.request.params.prompt_logprobs
                num_logprobs[row : row + scored] = -1 if asked is None else asked
            row += chunk.num_rows

    def _pack_bias(self, batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        if all(chunk.seq.rules is None for chunk in batch.chunks):
            return self._no_bias[: batch.num_rows + 1], self._no_ids, self._no_values
        counts = np.zeros(batch.num_rows + 1, np.int32)
        parts: list[Addends] = []
        row = 0
        for chunk in batch.chunks:
            row += chunk.num_rows
            if chunk.samples and chunk.seq.rules is not None:
                parts.append(chunk.seq.rules.at(chunk.end - chunk.seq.prompt_len, chunk.seq.values.token_ids))
                counts[row] = parts[-1][0].shape[0]
        starts = np.cumsum(counts, dtype=np.int32)
        if not parts:
            return starts, self._no_ids, self._no_values
        return starts, np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])


def _next_tokens(chunk: Chunk, scored: int) -> NDArray[np.int32]:
    """The prompt tokens that a chunk's scoring rows score; past the prompt's end there is none, so token 0."""
    first = chunk.end - chunk.num_rows + 1
    following = chunk.seq.request.prompt_token_ids[first : first + scored]
    if following.shape[0] < scored:
        following = np.append(following, np.zeros(scored - following.shape[0], np.int32))
    return following
