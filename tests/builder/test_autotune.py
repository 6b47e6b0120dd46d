"""Choosing tactics with a timer that is told what to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pelton.builder.autotune import Tuner
from pelton.builder.kernels import Kernel, KernelCall, KernelRegistry
from pelton.builder.machine import Machine
from pelton.builder.tactics import Tunable, Workload, variants_of
from pelton.builder.target import CPU_SKUS, Target
from pelton.builder.timing_cache import TimingCache
from pelton.plugins import KERNELS
from pelton.runtime.errors import TacticError

from .test_tactics import attention_call, gemm_call

V3, SPR = (Target("cpu", CPU_SKUS[name]) for name in ("x86-64-v3", "sapphirerapids"))
FEATURES = CPU_SKUS["x86-64-v3"].features
HERE = Machine(cpu="here", caches=(), threads=2)
THERE = Machine(cpu="there", caches=(), threads=8)
CALLS = (gemm_call(48, 64), attention_call(9, 3))
Emitted = list[tuple[str, Kernel, KernelCall]]


@dataclass
class ToldTimer:
    """Says that one variant takes ``share`` of the time of the others; remembers what it was asked."""

    best: int = 1
    share: float = 0.5
    asked: list[KernelCall] = field(default_factory=list)

    def __call__(
        self, call: KernelCall, target: Target, variants: Sequence[Tunable], workloads: Sequence[Workload]
    ) -> list[list[float]]:
        self.asked.append(call)
        return [[self.share if i == self.best else 1.0 for _ in workloads] for i in range(len(variants))]


def emitted(target: Target = V3, calls: Sequence[KernelCall] = CALLS) -> Emitted:
    registry = KernelRegistry(KERNELS)
    return [(f"f{i}", registry.select(call, target), call) for i, call in enumerate(calls)]


def tuner(timer: ToldTimer | None, path: Path | None = None, machine: Machine = HERE) -> Tuner:
    cache = None if path is None else TimingCache.open(path, create=timer is not None)
    return Tuner(timer, cache, machine, FEATURES)


@pytest.mark.parametrize("best", [0, 1, 3])
def test_the_fastest_is_chosen(best: int) -> None:
    timer = ToldTimer(best)
    tuning = tuner(timer).tune(emitted(), V3)
    assert timer.asked == list(CALLS)
    for _, kernel, call in emitted():
        assert tuning.choices[call].kernel == variants_of(kernel, call, V3)[best]
        assert tuning.choices[call].source == "timed"
        assert tuning.choices[call].reason == "timed on here, 2 threads"
    assert tuning.notes == ("cpu:x86-64-v3: tactics of 2 kernels: 2 timed on this machine",)


def test_noise_does_not_beat_the_model() -> None:
    tuning = tuner(ToldTimer(2, share=0.985)).tune(emitted(), V3)
    for _, kernel, call in emitted():
        assert tuning.choices[call].kernel == variants_of(kernel, call, V3)[0]


def test_the_chosen_kernel_takes_part_in_lowering() -> None:
    tuning = tuner(ToldTimer(2)).tune(emitted(), V3)
    registry = KernelRegistry(KERNELS).choosing(tuning.preferred())
    for call in CALLS:
        assert registry.select(call, V3) is tuning.choices[call].kernel
    assert registry.select(gemm_call(16, 16), V3).name == "cpu.gemm.avx2"


def test_equal_shapes_are_timed_once() -> None:
    """The window's block tables do not matter to the time, so they are no part of the shape."""
    other = KernelCall(CALLS[1].op, CALLS[1].inputs, CALLS[1].outputs, ("kv",), CALLS[1].ranges, kv_group=1)
    timer = ToldTimer()
    tuning = tuner(timer).tune(emitted(calls=(*CALLS, other)), V3)
    assert len(timer.asked) == 2
    assert tuning.choices[other].kernel == tuning.choices[CALLS[1]].kernel
    assert tuning.choices[other].source == "timed"


def test_a_second_build_times_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    first = tuner(ToldTimer(3), path).tune(emitted(), V3)
    written = path.read_bytes()
    timer = ToldTimer(1)
    second = tuner(timer, path).tune(emitted(), V3)
    assert timer.asked == []
    assert second.preferred() == first.preferred()
    assert [c.reason for c in second.choices.values()] == [c.reason for c in first.choices.values()]
    assert {c.source for c in second.choices.values()} == {"cache"}
    assert path.read_bytes() == written
    assert second.notes == ("cpu:x86-64-v3: tactics of 2 kernels: 2 from the timing cache",)


def test_timings_are_kept_even_if_the_build_stops(tmp_path: Path) -> None:
    class Stopping(ToldTimer):
        def __call__(self, *arguments: object) -> list[list[float]]:
            if self.asked:
                raise TacticError("stop")
            return super().__call__(*arguments)  # type: ignore[arg-type]

    path = tmp_path / "t.json"
    with pytest.raises(TacticError):
        tuner(Stopping(), path).tune(emitted(), V3)
    timer = ToldTimer()
    tuner(timer, path).tune(emitted(), V3)
    assert timer.asked == [CALLS[1]]


def test_another_machine_times_for_itself_and_adds(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuner(ToldTimer(3), path).tune(emitted(), V3)
    timer = ToldTimer(1)
    there = tuner(timer, path, THERE).tune(emitted(), V3)
    assert len(timer.asked) == 2
    assert there.choices[CALLS[0]].reason == "timed on there, 8 threads"
    again = tuner(ToldTimer(2), path).tune(emitted(), V3)
    assert again.choices[CALLS[0]].kernel == variants_of(emitted()[0][1], CALLS[0], V3)[3]


def test_without_autotune_the_file_decides_wherever_we_are(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timed = tuner(ToldTimer(3), path).tune(emitted(), V3)
    here, there = (tuner(None, path, machine).tune(emitted(), V3) for machine in (HERE, THERE))
    assert here == there
    assert here.preferred() == timed.preferred()
    # With a second machine's timings both count: 0.5 x 1 on the first, 1 x 0.4 on the other.
    tuner(ToldTimer(1, share=0.4), path, THERE).tune(emitted(), V3)
    both = tuner(None, path).tune(emitted(), V3)
    assert both.choices[CALLS[0]].kernel == variants_of(emitted()[0][1], CALLS[0], V3)[1]
    assert "here" in both.choices[CALLS[0]].reason
    assert "there" in both.choices[CALLS[0]].reason


def test_without_autotune_what_the_file_lacks_is_the_models(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuner(ToldTimer(1), path).tune(emitted(calls=CALLS[:1]), V3)
    tuning = tuner(None, path).tune(emitted(), V3)
    assert [c.source for c in tuning.choices.values()] == ["cache", "model"]
    assert tuning.choices[CALLS[1]].reason == "model"
    assert list(tuning.preferred()) == [CALLS[0]]
    assert tuning.notes == ("cpu:x86-64-v3: tactics of 2 kernels: 1 from the timing cache, 1 by the model of the SKU",)


def test_targets_that_do_not_run_here(tmp_path: Path) -> None:
    path, timer = tmp_path / "t.json", ToldTimer(1)
    tuning = tuner(timer, path).tune(emitted(SPR), SPR)
    assert timer.asked == []
    assert {c.source for c in tuning.choices.values()} == {"model"}
    assert "this machine lacks avx512f" in tuning.notes[0]
    # A machine that runs them leaves its timings for this one.
    Tuner(ToldTimer(2), TimingCache.open(path, create=True), THERE, CPU_SKUS["sapphirerapids"].features).tune(
        emitted(SPR), SPR
    )
    tuning = tuner(timer, path).tune(emitted(SPR), SPR)
    assert timer.asked == []
    assert {c.source for c in tuning.choices.values()} == {"cache"}
    assert tuning.choices[CALLS[0]].reason == "timed on there, 8 threads"


def test_skus_do_not_share_timings(tmp_path: Path) -> None:
    path, v4 = tmp_path / "t.json", Target("cpu", CPU_SKUS["x86-64-v4"])
    features = CPU_SKUS["x86-64-v4"].features
    calls = (attention_call(9, 3),)  # the same kernel and types on both
    for target in (V3, v4):
        timer = ToldTimer()
        Tuner(timer, TimingCache.open(path, create=True), HERE, features).tune(emitted(target, calls), target)
        assert len(timer.asked) == 1
