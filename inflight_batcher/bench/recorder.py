"""A driver that notes when each step ran and how large it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...runtime.drivers.base import Driver
from ...runtime.step import StepHandle, StepInputs
from .costs import StepShape


@dataclass(frozen=True)
class StepRecord:
    """One step. Times in nanoseconds of the performance counter: ``begin`` to ``end`` inside the driver,
    ``resume``: the caller goes on (between ``end`` and it lies only the taking of this record). ``native``: entered
    and left native code, for drivers that are Python around it."""

    begin: int
    end: int
    resume: int
    shape: StepShape
    native: tuple[int, int] | None = None

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence advanced by one token and has a row."""
        return self.shape.tokens == len(self.shape.counts) == self.shape.rows


class RecordingDriver:
    """Passes everything on to ``driver``, whose ``execute`` is complete on return, and keeps a record of each step.

    native_span: when the driver's last step entered and left native code, in nanoseconds of the performance counter.
    """

    def __init__(self, driver: Driver, native_span: Callable[[], tuple[int, int]] | None = None) -> None:
        self.inner = driver
        self._native_span = native_span
        self.plan = driver.plan
        self._records: list[StepRecord] = []

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        self.inner.allocate(num_blocks, num_slots)

    def block_bytes(self, group: int) -> int:
        return self.inner.block_bytes(group)

    def execute(self, inputs: StepInputs) -> StepHandle:
        begin = time.perf_counter_ns()
        handle = self.inner.execute(inputs)
        end = time.perf_counter_ns()
        # The arrays are used again for later steps: take what is needed now.
        first = inputs.query_start[:-1]
        counts = (inputs.query_start[1:] - first).tolist()
        shape = StepShape(tuple(inputs.positions[first].tolist()), tuple(counts), inputs.num_rows)
        native = None if self._native_span is None else self._native_span()
        self._records.append(StepRecord(begin, end, time.perf_counter_ns(), shape, native))
        return handle

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        self.inner.copy_blocks(group, source, target)

    def hold_near(self, objects: Iterable[object]) -> None:
        self.inner.hold_near(objects)

    def close(self) -> None:
        self.inner.close()

    def take(self) -> list[StepRecord]:
        """The records since the last call."""
        records, self._records = self._records, []
        return records


def gaps_us(records: list[StepRecord]) -> list[float]:
    """Microseconds of Python between two steps: the step loop's and the driver's, the recording left out."""
    gaps = []
    for before, after in zip(records, records[1:], strict=False):
        left = before.end if before.native is None else before.native[1]
        entered = after.begin if after.native is None else after.native[0]
        gaps.append((entered - left - (before.resume - before.end)) / 1e3)
    return gaps
