"""Block ids of one KV group: handing out, sharing, giving back. Knows no sequence and no memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..runtime.errors import PeltonError


class BlockPool:
    """Reference-counted block ids ``0 .. num_blocks-1``. All operations are O(1) per block.

    Free blocks are handed out in the order in which they became free (lowest ids first at the start), which is
    also least-recently-used order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A free block with one holder. The caller has looked at ``num_free``; IndexError when there is none."""
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block in use; its contents must no longer change."""
        if self._refs[block] == 0:
            raise PeltonError(f"block pool: block {block} is free and cannot be shared")
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer; the block is free when the last one lets go."""
        if self._refs[block] == 0:
            raise PeltonError(f"block pool: block {block} was released more often than it was taken")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Compare with ``held``: the blocks that holders say they have, repeated once per holder."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        for block, (said, known) in enumerate(zip(counts, self._refs, strict=True)):
            if said != known:
                raise PeltonError(f"block pool: block {block} has {said} holders but {known} references")
        free = set(self._free)
        if len(free) != len(self._free):
            raise PeltonError("block pool: a block is free twice")
        wrong = [block for block in range(self.num_blocks) if (block in free) != (self._refs[block] == 0)]
        if wrong:
            raise PeltonError(f"block pool: blocks {wrong[:8]} are neither free nor held, or both")
