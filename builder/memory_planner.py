"""Lifetimes -> offsets in the arena. The result is checked by memory_checker.py, which shares no code with this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes; a cache line, and what kernels may assume


@dataclass(frozen=True)
class Lifetime:
    """A buffer that must keep its bytes during phases ``first`` to ``last``, both included.

    A phase is the time between two barriers: launches of one phase may run at the same time.
    """

    name: str
    nbytes: int
    first: int
    last: int


def plan_memory(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each lifetime, and the arena's size in bytes. Same input, same result.

    Greedy by size: the largest buffers are placed first, each into the lowest gap that is free during its lifetime.
    """
    order = sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first, i))
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    size = 0
    for index in order:
        wanted = lifetimes[index]
        offset = 0
        for other in sorted((i for i in placed if _meet(lifetimes[i], wanted)), key=lambda i: offsets[i]):
            if offset + wanted.nbytes <= offsets[other]:
                break
            offset = max(offset, _aligned(offsets[other] + lifetimes[other].nbytes))
        offsets[index] = offset
        placed.append(index)
        size = max(size, offset + wanted.nbytes)
    return offsets, _aligned(size)


def _meet(a: Lifetime, b: Lifetime) -> bool:
    """Whether the two are alive in a common phase (empty buffers meet nobody)."""
    return a.nbytes > 0 and b.nbytes > 0 and a.first <= b.last and b.first <= a.last


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
