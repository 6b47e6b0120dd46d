"""Choosing tactics: by timing, from a timing cache, or by the kernel's own model of the SKU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .kernels import Kernel, KernelCall
from .machine import Machine
from .tactics import Tunable, Workload, fastest, label, tactic_of, variants_of, workloads
from .target import Target
from .timing_cache import Seconds, TimingCache, rounded, timing_key

Source = Literal["model", "timed", "cache"]


class Timer(Protocol):
    """Times variants of a kernel on this machine (``tactic_timer.TacticTimer`` does)."""

    def __call__(
        self, call: KernelCall, target: Target, variants: Sequence[Tunable], workloads: Sequence[Workload]
    ) -> list[list[float]]:
        """seconds[variant][workload]"""
        ...


@dataclass(frozen=True)
class Choice:
    """The variant that one kernel of a plan has, and why: ``timings`` by machine, none if it is the model's choice."""

    kernel: Kernel
    source: Source = "model"
    workloads: tuple[Workload, ...] = ()
    timings: tuple[tuple[Machine, Seconds], ...] = ()

    @property
    def reason(self) -> str:
        """As engines tell it. Timed just now or read from a cache is the same to them: same choice, same bytes."""
        machines = "; ".join(str(machine) for machine, _ in self.timings)
        return f"timed on {machines}" if machines else "model"


@dataclass(frozen=True)
class Tuning:
    """The choices for one target, and a few words about them for the build's summary."""

    choices: dict[KernelCall, Choice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def preferred(self) -> dict[KernelCall, Kernel]:
        """The kernel for each call that has a choice of its own."""
        return {call: choice.kernel for call, choice in self.choices.items() if choice.source != "model"}


@dataclass
class Tuner:
    """Chooses for the targets of a build, one after the other.

    timer: None = nothing is timed, the cache decides. features: this machine's, by which targets can be timed at all.
    With a timer only this machine's entries of the cache count (for what it can run), otherwise every machine's alike,
    so that a file gives the same engine wherever it is used.
    """

    timer: Timer | None
    cache: TimingCache | None
    machine: Machine
    features: Collection[str]
    _timed: dict[str, Seconds] = field(default_factory=dict)

    def tune(
        self,
        emitted: Sequence[tuple[str, Kernel, KernelCall]],
        target: Target,
        done: Callable[[], None] = lambda: None,
    ) -> Tuning:
        """Choose for the kernels of a plan. ``done`` is called after each."""
        missing = [f for f in target.sku.features if f not in self.features] if target.sku else []
        here = self.timer is not None and not missing
        choices: dict[KernelCall, Choice] = {}
        for _, kernel, call in emitted:
            variants = variants_of(kernel, call, target)
            if len(variants) > 1:
                choices[call] = self._choose(kernel, call, target, variants, here)
            done()
        return Tuning(choices, tuple(_notes(target, list(choices.values()), missing if self.timer else [])))

    def _choose(
        self, kernel: Kernel, call: KernelCall, target: Target, variants: Sequence[Tunable], here: bool
    ) -> Choice:
        steps = workloads(call)
        labels = [label(tactic_of(variant, call, target)) for variant in variants]
        key = timing_key(kernel, call, target, steps)
        source: Source = "cache"
        timings = self._known(key, labels, len(steps), here)
        if not timings:
            if not here or self.timer is None:
                return Choice(variants[0])
            source = "timed"
            rows = self.timer(call, target, variants, steps)
            seconds = {name: tuple(map(rounded, row)) for name, row in zip(labels, rows, strict=True)}
            timings = [(self.machine, seconds)]
            self._keep(key, call, target, steps, seconds)
        elif key in self._timed:
            source = "timed"
        joined = [[time for _, seconds in timings for time in seconds[name]] for name in labels]
        return Choice(variants[fastest(joined)], source, steps, tuple(timings))

    def _known(self, key: str, labels: Sequence[str], count: int, here: bool) -> list[tuple[Machine, Seconds]]:
        """Timings from this build (kernels that differ in nothing that matters are timed once), or from the cache."""
        if key in self._timed:
            return [(self.machine, self._timed[key])]
        if self.cache is None:
            return []
        return self.cache.get(key, labels, count, self.machine if here else None)

    def _keep(self, key: str, call: KernelCall, target: Target, steps: Sequence[Workload], seconds: Seconds) -> None:
        """At once, so that an interrupted build has not timed in vain."""
        self._timed[key] = seconds
        if self.cache is not None:
            types = f"({', '.join(map(str, call.inputs))}) -> {', '.join(map(str, call.outputs))}"
            self.cache.put(key, f"{call.op.name} {types}", target, steps, self.machine, seconds)
            self.cache.save()


def _notes(target: Target, choices: Sequence[Choice], missing: Sequence[str]) -> list[str]:
    """One line for a target that has tactics."""
    if not choices:
        return []
    counts = Counter(choice.source for choice in choices)
    parts = [f"{counts[source]} {words}" for source, words in _WORDS.items() if counts[source]]
    lacks = f"; not timed, because this machine lacks {' '.join(missing)}" if missing else ""
    return [f"{target}: tactics of {len(choices)} kernels: {', '.join(parts)}{lacks}"]


_WORDS: dict[Source, str] = {
    "timed": "timed on this machine",
    "cache": "from the timing cache",
    "model": "by the model of the SKU",
}
