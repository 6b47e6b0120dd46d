"""Times the variants of a kernel on this machine: compiled, run by the CPU driver, compared bit by bit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..runtime.drivers.cpu.driver import CpuDriver
from ..runtime.drivers.cpu.roofs import last_level_cache
from ..runtime.errors import BuildError, TacticError
from ..runtime.format.manifest import TargetEntry
from .codegen.cache import ObjectCache
from .codegen.cpu import compile_cpu, compiler_version
from .kernels import KernelCall
from .tactics import Tunable, Workload, label, tactic_of
from .target import Target
from .trial import Trial

_TURNS = 3  # each workload comes so often, since a neighbour's burst may last as long as a turn
_SECONDS = 0.25  # of a turn, or one pass over all variants if that takes longer
_LEAST_COLD, _MOST_COLD = 64 << 20, 256 << 20


class TacticTimer:
    """``timer(call, target, variants, workloads)`` is seconds[variant][workload], as medians of alternating runs.

    Compiler, cache and jobs as for the engine's own kernels. The thread team is the one an engine has by default.
    """

    def __init__(self, compiler: str | None, cache_dir: Path | None, jobs: int) -> None:
        self._compiler, self._cache_dir, self._jobs = compiler, cache_dir, jobs

    def __call__(
        self, call: KernelCall, target: Target, variants: Sequence[Tunable], workloads: Sequence[Workload]
    ) -> list[list[float]]:
        """Raises TacticError if two variants differ in a bit; BuildError, DriverError."""
        if target.sku is None:
            raise BuildError(f"target {target} has no code to time")
        cold = min(max(2 * last_level_cache(), _LEAST_COLD), _MOST_COLD)
        trial = Trial(call, target, variants, workloads, cold)
        names = zip(trial.symbols, variants, strict=True)
        sources = [(symbol, variant.emit(trial.call, target, symbol)) for symbol, variant in names]
        cache = ObjectCache(self._cache_dir)
        trial.link(compile_cpu(sources, target.sku, compiler=self._compiler, cache=cache, jobs=self._jobs))
        driver = CpuDriver(trial, _entry(target), weights="copy")
        try:
            driver.allocate((trial.blocks,), trial.slots)
            for workload in workloads:
                driver.execute(trial.step(workload))  # touches all memory
                self._compare(driver, trial, target, variants, workload)
            return _medians(driver, trial, len(variants), workloads)
        finally:
            driver.close()

    def _compare(
        self, driver: CpuDriver, trial: Trial, target: Target, variants: Sequence[Tunable], workload: Workload
    ) -> None:
        size = trial.output_bytes(workload)
        want = driver.buffer(0)[:size]
        for index, variant in enumerate(variants):
            got = driver.buffer(index)[:size]
            if np.array_equal(got, want):
                continue
            at = int(np.flatnonzero(got != want)[0])
            ours, model = (label(tactic_of(v, trial.call, target)) for v in (variant, variants[0]))
            raise TacticError(
                f"{variant.name} for {trial.call.op} on {target}: the tactic ({ours}) gives other bits than ({model}) "
                f"for {workload}, from output byte {at} on. Tactics must not change results: please report this, "
                f"with the compiler's version ({compiler_version(self._compiler)}); build without --autotune meanwhile"
            )


def _medians(driver: CpuDriver, trial: Trial, variants: int, workloads: Sequence[Workload]) -> list[list[float]]:
    """seconds[variant][workload], the wait for the slowest worker included."""
    samples: list[list[list[int]]] = [[[] for _ in workloads] for _ in range(variants)]
    driver.set_timing(True)
    for _ in range(_TURNS):
        for which, workload in enumerate(workloads):
            step, end_of_turn = trial.step(workload), time.monotonic() + _SECONDS
            while True:
                driver.execute(step)
                for launch, _, begin, _, end in driver.take_timings().tolist():
                    samples[trial.variant_of(launch)][which].append(end - begin)
                if time.monotonic() > end_of_turn:
                    break
    return [[statistics.median(times) / 1e9 for times in row] for row in samples]


def _entry(target: Target) -> TargetEntry:
    sku = target.sku
    name, features = (sku.name, sku.features) if sku else ("", ())
    return TargetEntry(key=str(target), kind=target.kind, sku=name, features=features, rank=0, compiler="", flags=())
