"""What this machine can do at most, measured: the roofs that timings are held against."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...._core import MAX_WORKERS
from ...._core import Roofs as NativeRoofs
from ...format.dtypes import DType
from .binding import native_errors
from .threads import cpu_list, default_threads

T = TypeVar("T")

_LEAST_READ_BYTES = 256 << 20
_TRIES = 4  # of a reading during which the CPUs stay where they are
_CACHE_MULTIPLE = 4  # a pass reads so many times the last-level cache

#: Instructions that compute products of a type; which is fastest depends on the CPU.
_PEAKS_OF: dict[DType, tuple[str, ...]] = {
    DType.BF16: ("dot_bf16", "fma_f32"),
    DType.F16: ("fma_f32",),
    DType.F32: ("fma_f32",),
    DType.I8: ("dot_int8", "fma_f32"),
}


@dataclass(frozen=True)
class Roofs:
    """Rates of this machine with ``threads`` threads.

    read: bytes a second, sequentially, from huge pages. peaks: operations a second (a multiplication or an addition
    counts one) in registers, by kind: "fma_f32", "dot_bf16", "dot_int8", as far as the CPU has them. round_trip:
    seconds that a cache line takes from the first thread's CPU to the farthest other's and back, 0.0 with one thread.
    It tells where the CPUs are: a hypervisor moves virtual ones, and ``read`` holds for one placement only.
    """

    threads: int
    read: float
    peaks: dict[str, float]
    round_trip: float

    def peak_of(self, compute: DType) -> tuple[str, float]:
        """The kind and the rate that products of this type reach at most; ("", 0.0) where none was measured."""
        there = [(kind, self.peaks[kind]) for kind in _PEAKS_OF.get(compute, ()) if kind in self.peaks]
        return max(there, key=lambda peak: peak[1], default=("", 0.0))

    def placed_like(self, other: Roofs) -> bool:
        """Whether the CPUs lay alike for both samples."""
        return alike(self.round_trip, other.round_trip)


class RoofMeter:
    """Measures the roofs again and again, in between other measurements: a machine's rates drift with its neighbours.

    threads: as the driver's (None: all CPUs this process may use). read_bytes: what a reading pass reads; default: four
    times the last-level cache, 256 MiB at least. Raises DriverError. The memory is given back with the meter.
    """

    def __init__(self, threads: int | None = None, *, read_bytes: int | None = None) -> None:
        self.threads = min(default_threads(), MAX_WORKERS) if threads is None else threads
        cpus = cpu_list()
        size = max(_LEAST_READ_BYTES, _CACHE_MULTIPLE * last_level_cache()) if read_bytes is None else read_bytes
        with native_errors("roofs"):
            self._native = NativeRoofs(self.threads, cpus[: self.threads] if self.threads <= len(cpus) else [], size)

    def sample(self, passes: int = 9) -> Roofs:
        """Each roof once, as the median of ``passes`` passes of some milliseconds.

        Round trips are measured before and after the reading, which is repeated, a few times, if the CPUs moved.
        """
        with native_errors("roofs"):
            peaks = {kind: statistics.median(self._native.peak(kind, passes)) for kind in instructions()}
            before = self._native.round_trip()
            for _ in range(_TRIES):
                read = statistics.median(self._native.read(passes))
                after = self._native.round_trip()
                if alike(before, after):
                    break
                before = after
            return Roofs(self.threads, read, peaks, after)


def alike(one: float, other: float) -> bool:
    """Whether two round trips are of one placement: they differ by less than a factor of two."""
    low, high = sorted((one, other))
    return low == high or high < 2 * low


def by_placement(items: Iterable[T], roofs: Callable[[T], Roofs]) -> list[list[T]]:
    """Items whose roofs are of one placement together, nearest CPUs first."""
    groups: list[list[T]] = []
    for item in sorted(items, key=lambda item: roofs(item).round_trip):
        if groups and roofs(groups[-1][0]).placed_like(roofs(item)):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def instructions() -> dict[str, str]:
    """The instruction behind each peak that this CPU has."""
    return NativeRoofs.instructions()


def median_roofs(samples: Sequence[Roofs]) -> Roofs:
    """The median of every rate over samples of one meter; ValueError if there are none."""
    if not samples:
        raise ValueError("median_roofs: there are no samples")
    peaks = {kind: statistics.median(sample.peaks[kind] for sample in samples) for kind in samples[0].peaks}
    read = statistics.median(sample.read for sample in samples)
    return Roofs(samples[0].threads, read, peaks, statistics.median(sample.round_trip for sample in samples))


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that CPU 0 sees; 0 where the system does not say."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes)
