"""The driver protocol: one device's memory, weights, state storage and execution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import DriverError
from ..format.plan import Plan
from ..step import StepHandle, StepInputs, StepOutputs


def check_allocation(plan: Plan, num_blocks: tuple[int, ...], num_slots: int) -> None:
    """Raises DriverError unless there is at least one block in each KV group, and one slot."""
    if len(num_blocks) != len(plan.kv_groups) or min(num_blocks, default=1) < 1 or num_slots < 1:
        raise DriverError(
            f"allocate({num_blocks}, {num_slots}): the plan has {len(plan.kv_groups)} KV groups; each needs at least"
            " one block, and there must be at least one slot"
        )


def empty_outputs(plan: Plan, rows: int, want_logits: bool) -> StepOutputs:
    """Outputs for a step of this many rows to fill in; what no row asks for stays as it is here."""
    best = plan.ranges.max_logprobs
    return StepOutputs(
        tokens=np.full(rows, -1, np.int32),
        logprobs=np.full(rows, -np.inf, np.float32),
        ranks=np.zeros(rows, np.int32),
        top_ids=np.full((rows, best), -1, np.int32),
        top_logprobs=np.full((rows, best), -np.inf, np.float32),
        logits=np.empty((rows, plan.vocab_size), np.float32) if want_logits else None,
    )


@runtime_checkable
class Driver(Protocol):
    """Runs the steps of one loaded engine. Not thread-safe: one step loop owns it."""

    plan: Plan

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        """Make state storage: blocks of each KV group, and per-sequence slots. Called once, before any step."""
        ...

    def block_bytes(self, group: int) -> int:
        """Bytes that one block of this KV group takes over all its layers."""
        ...

    def execute(self, inputs: StepInputs) -> StepHandle:
        """Start a step. At depth 1 a step may be complete on return; callers must not rely on it."""
        ...

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        """Copy whole blocks in every layer of a group (copy-on-write), ordered before the next step."""
        ...

    def hold_near(self, objects: Iterable[object]) -> None:
        """Take note of functions and objects that the caller goes through between any two steps.

        After ``allocate``. A driver whose steps displace them from the CPU's caches may fetch them back at a step's
        end; no result depends on it. Replaces what was noted before.
        """
        ...

    def close(self) -> None:
        """Give all memory and threads back. Further calls are errors."""
        ...
