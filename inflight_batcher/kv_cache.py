"""Which blocks hold which positions of which sequence: one pool and one table per KV group."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import PeltonError
from ..runtime.format.plan import KVGroup, Ranges
from .block_pool import BlockPool

NO_BLOCK = -1


@dataclass(frozen=True)
class BlockCopy:
    """Copy a block's contents in every layer of a group, before the step that comes with it."""

    group: int
    source: int
    target: int


class GroupTable:
    """Blocks of one KV group, by sequence slot.

    ``table`` is i32 [num_slots, max_blocks_per_seq]; in a slot's row the entries ``first[slot] : end[slot]`` are
    live, everything else is -1. ``first`` moves up when blocks fall out of the window.
    """

    def __init__(self, group: KVGroup, num_blocks: int, num_slots: int, ranges: Ranges, max_chunk: int) -> None:
        self.name = group.name
        self.window = group.window
        self.pool = BlockPool(num_blocks)
        self.table: NDArray[np.int32] = np.full((num_slots, ranges.max_blocks_per_seq), NO_BLOCK, np.int32)
        self.first = [0] * num_slots
        self.end = [0] * num_slots
        self._block = ranges.tokens_per_block
        self._max_chunk = max_chunk

    def peak(self, tokens: int) -> int:
        """Most blocks that a sequence holds at once while it stores ``tokens`` tokens."""
        whole = -(-tokens // self._block)
        if self.window is None:
            return whole
        # A chunk of c tokens and what its first token still sees span window + c - 1 positions at any offset.
        return min(whole, (self.window + self._max_chunk - 3) // self._block + 2)

    def first_needed(self, position: int) -> int:
        """Index of the first block that a query at ``position`` or later attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self._block

    def trim(self, slot: int, position: int) -> None:
        """Give back blocks that no query from ``position`` on can see."""
        needed = min(self.first_needed(position), self.end[slot])
        if needed <= self.first[slot]:
            return
        for index in range(self.first[slot], needed):
            self.pool.release(int(self.table[slot, index]))
            self.table[slot, index] = NO_BLOCK
        self.first[slot] = needed

    def missing(self, slot: int, tokens: int) -> int:
        """Blocks to allocate before positions below ``tokens`` can be stored."""
        return max(0, -(-tokens // self._block) - self.end[slot])

    def room(self, slot: int) -> int:
        """Tokens that a sequence may come to without a block taken or given back for it here."""
        stored = self.end[slot] * self._block
        if self.window is None:
            return stored
        # Token number t asks from position t - 1 on: the first block is out of sight at (first + 1) * block + window.
        return min(stored, (self.first[slot] + 1) * self._block + self.window - 1)

    def grow(self, slot: int, count: int) -> None:
        """Append ``count`` fresh blocks to a slot's row."""
        for index in range(self.end[slot], self.end[slot] + count):
            self.table[slot, index] = self.pool.allocate()
        self.end[slot] += count

    def release(self, slot: int) -> None:
        """Give back everything of a slot."""
        for block in self.blocks(slot):
            self.pool.release(block)
        self.table[slot, self.first[slot] : self.end[slot]] = NO_BLOCK
        self.first[slot] = self.end[slot] = 0

    def blocks(self, slot: int) -> list[int]:
        """Live block ids of a slot, in order of position."""
        live: list[int] = self.table[slot, self.first[slot] : self.end[slot]].tolist()
        return live

    def can_share(self, donor: int, tokens: int) -> bool:
        """Whether a donor still has every block that a query at position ``tokens`` attends to."""
        return self.first[donor] <= self.first_needed(tokens) and self.end[donor] * self._block >= tokens

    def share(self, donor: int, slot: int, tokens: int) -> tuple[int, int] | None:
        """Make ``slot`` start with the donor's first ``tokens`` tokens; full blocks are shared.

        Returns (source, target) of the partly filled last block, which must be copied because both write on.
        """
        first, full = self.first_needed(tokens), tokens // self._block
        self.first[slot] = self.end[slot] = first
        for index in range(first, full):
            block = int(self.table[donor, index])
            self.pool.share(block)
            self.table[slot, index] = block
        self.end[slot] = max(first, full)
        if tokens % self._block == 0:
            return None
        self.grow(slot, 1)
        return int(self.table[donor, full]), int(self.table[slot, full])


class KVCache:
    """The tables of all KV groups. Reads and writes block ids only, never a value.

    ``version`` changes whenever a table may have changed.
    """

    def __init__(
        self, groups: Seq[KVGroup], num_blocks: Seq[int], num_slots: int, ranges: Ranges, max_chunk: int
    ) -> None:
        self.version = 0
        self.room = [0] * num_slots  # tokens up to which ``reserve`` has nothing to do
        self.tokens_per_block = ranges.tokens_per_block
        self.groups = tuple(
            GroupTable(group, count, num_slots, ranges, max_chunk)
            for group, count in zip(groups, num_blocks, strict=True)
        )

    def peak(self, tokens: int) -> tuple[int, ...]:
        """Per group, the most blocks held at once by a sequence that stores ``tokens`` tokens."""
        return tuple(group.peak(tokens) for group in self.groups)

    def has_free(self, blocks: Seq[int]) -> bool:
        """Whether every pool has that many free blocks now."""
        return all(need <= group.pool.num_free for need, group in zip(blocks, self.groups, strict=True))

    def reserve(self, slot: int, start: int, end: int, known: int) -> bool:
        """Make room to store positions ``start:end``; False, and nothing allocated, when a pool is too empty.

        ``known`` (>= end) tokens exist already: a group without a window takes the blocks for all of them at once,
        so that a long prompt is not left halfway; a windowed group takes them chunk by chunk.
        """
        if known <= self.room[slot]:
            return True
        self.version += 1
        missing = []
        for group in self.groups:
            if group.window is not None:
                group.trim(slot, start)
            need = group.missing(slot, end if group.window is not None else known)
            if need > group.pool.num_free:
                return False
            missing.append(need)
        for group, need in zip(self.groups, missing, strict=True):
            if need:
                group.grow(slot, need)
        self.room[slot] = min((group.room(slot) for group in self.groups), default=0)
        return True

    def release(self, slot: int) -> None:
        """Give back all blocks of a slot."""
        self.version += 1
        self.room[slot] = 0
        for group in self.groups:
            group.release(slot)

    def can_fork(self, donor: int, tokens: int) -> bool:
        """Whether a new sequence could start from a donor's first ``tokens`` computed tokens."""
        return all(group.can_share(donor, tokens) for group in self.groups)

    def fork(self, donor: int, slot: int, tokens: int) -> list[BlockCopy]:
        """Let an empty slot start from a donor's first ``tokens`` tokens; returns the copies to make first."""
        self.version += 1
        copies = []
        for index, group in enumerate(self.groups):
            pair = group.share(donor, slot, tokens)
            if pair is not None:
                copies.append(BlockCopy(index, *pair))
        return copies

    def check_integrity(self, slots: Seq[int]) -> None:
        """Tables of live slots and pools agree; other slots hold nothing. Raises PeltonError."""
        live = set(slots)
        for group in self.groups:
            held: list[int] = []
            for slot in range(group.table.shape[0]):
                row, first, end = group.table[slot], group.first[slot], group.end[slot]
                blocks = row[first:end]
                if slot not in live and end != 0:
                    raise PeltonError(f"KV group {group.name}: slot {slot} is idle but holds blocks {blocks.tolist()}")
                if (blocks < 0).any() or (row[:first] != NO_BLOCK).any() or (row[end:] != NO_BLOCK).any():
                    raise PeltonError(f"KV group {group.name}: row of slot {slot} is damaged: {row.tolist()}")
                held.extend(blocks.tolist())
            group.pool.check_integrity(held)
