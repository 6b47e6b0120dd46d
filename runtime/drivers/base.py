"""The driver protocol: one device's memory, weights, state storage and execution."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..format.plan import Plan
from ..step import StepHandle, StepInputs


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

    def close(self) -> None:
        """Give all memory and threads back. Further calls are errors."""
        ...
