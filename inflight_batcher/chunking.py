"""How the prompt tokens that fit a step are divided among sequences in prefill."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class ChunkPolicy(enum.StrEnum):
    """Who gets prompt tokens when not all fit."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"  # finish one prompt before the next
    EQUAL_PROGRESS = "equal_progress"  # a unit each, in turn


def chunk_sizes(remaining: Sequence[int], capacity: int, unit: int, policy: ChunkPolicy) -> list[int]:
    """Prompt tokens for each sequence this step, given what each still has to do.

    A chunk is a multiple of ``unit`` tokens unless it ends the prompt; the sum is at most ``capacity``.
    """
    if policy is ChunkPolicy.FIRST_COME_FIRST_SERVED:
        return _in_order(remaining, capacity, unit)
    return _in_turn(remaining, capacity, unit)


def _in_order(remaining: Sequence[int], capacity: int, unit: int) -> list[int]:
    sizes = []
    for tokens in remaining:
        size = tokens if tokens <= capacity else capacity // unit * unit
        sizes.append(size)
        capacity -= size
    return sizes


def _in_turn(remaining: Sequence[int], capacity: int, unit: int) -> list[int]:
    sizes = [0] * len(remaining)
    moved = True
    while moved:
        moved = False
        for i, tokens in enumerate(remaining):
            step = min(unit, tokens - sizes[i])
            if 0 < step <= capacity:
                sizes[i] += step
                capacity -= step
                moved = True
    return sizes
