"""The roofs: plausible, pinned, refused where nonsense is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pelton._core import NativeError, request_tile_permission
from pelton._core import Roofs as NativeRoofs
from pelton.runtime.drivers.cpu.host import host_features
from pelton.runtime.drivers.cpu.roofs import RoofMeter, Roofs, instructions, last_level_cache, median_roofs
from pelton.runtime.errors import DriverError
from pelton.runtime.format.dtypes import DType

#: Features as /proc/cpuinfo spells them, fastest first -> the instruction that must then be measured.
EXPECTED = {
    "dot_bf16": {"amx_bf16": "amx tdpbf16ps", "avx512_bf16": "avx512 vdpbf16ps"},
    "dot_int8": {"amx_int8": "amx tdpbssd", "avx512_vnni": "avx512 vpdpbusd"},
    "fma_f32": {"avx512f": "avx512 vfmadd231ps"},
}


def tiles_granted() -> bool:
    try:
        request_tile_permission()
    except NativeError:
        return False
    return True


def test_a_sample_has_every_peak_of_this_cpu() -> None:
    meter = RoofMeter(2, read_bytes=8 << 20)
    sample = meter.sample(passes=3)
    assert sample.threads == meter.threads == 2
    assert sample.peaks.keys() == instructions().keys()
    assert sample.read > 1e8
    assert all(rate > 1e8 for rate in sample.peaks.values())


def test_instructions_follow_the_features() -> None:
    features = host_features()
    if not tiles_granted():
        features -= {"amx_bf16", "amx_int8"}
    for kind, expected in EXPECTED.items():
        wanted = next((name for feature, name in expected.items() if feature in features), None)
        if wanted is not None:
            assert instructions()[kind] == wanted


@pytest.mark.isa("amx_bf16")
def test_without_permission_for_tiles_vectors_are_measured() -> None:
    """The kernel refuses tiles where a signal stack has no room for them: here 8 KiB, in a process of its own."""
    code = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(room), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from pelton._core import Roofs
assert min(Roofs(1, [], 4096).peak("dot_bf16", 1)) > 0
print(Roofs.instructions()["dot_bf16"])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "avx512 vdpbf16ps", process.stderr


@pytest.mark.isa("avx512_bf16")
def test_a_dot_product_does_more_than_an_fma() -> None:
    """One after the other: pairs in bf16 do twice the work, quads in int8 four times. The best of many short passes.

    Of vectors, that is: a Xeon with AMX begins fewer dot products than FMAs, and does half an FMA's work in bf16 where
    tiles are refused. Tiles do 16 and 32 times an FMA's work there.
    """
    native = NativeRoofs(1, [], 4096)
    rates = {kind: max(native.peak(kind, 15)) for kind in ("fma_f32", "dot_bf16", "dot_int8")}
    bf16, int8 = rates["dot_bf16"] / rates["fma_f32"], rates["dot_int8"] / rates["fma_f32"]
    if instructions()["dot_bf16"].startswith("amx"):
        assert 5 < bf16 < 50
        assert 1.3 * bf16 < int8 < 3 * bf16
    elif "amx_bf16" in host_features():
        assert 0.4 < bf16 < 3
        assert 1.3 < int8 < 6
    else:
        assert 1.3 < bf16 < 3
        assert 2.6 < int8 < 6


def test_no_thread_is_left_behind_and_the_caller_stays_unpinned() -> None:
    before, threads = os.sched_getaffinity(0), threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    native = NativeRoofs(2, sorted(before)[:2], 1 << 20)
    assert len(native.read(2)) == 2
    assert len(native.peak("fma_f32", 4)) == 4
    assert os.sched_getaffinity(0) == before
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/task")) == tasks


def test_more_threads_than_cpus() -> None:
    count = len(os.sched_getaffinity(0)) + 3
    assert RoofMeter(count, read_bytes=4 << 20).sample(passes=1).read > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPUs are needed")
def test_a_cache_line_goes_around() -> None:
    """The best of some tries: other programs may need the CPUs meanwhile."""
    meter = RoofMeter(2, read_bytes=1 << 20)
    assert 5e-9 < min(meter.sample(passes=1).round_trip for _ in range(5)) < 1e-5
    assert 0 < meter.sample(passes=1).round_trip < 1.0
    # To the farthest of several, and no further.
    assert 0 < RoofMeter(len(os.sched_getaffinity(0)) + 2, read_bytes=1 << 20).sample(passes=1).round_trip < 1.0


def test_a_reading_is_repeated_if_the_cpus_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate and the round trip of a sample belong together."""

    class Native:
        trips = iter([50e-9, 300e-9, 310e-9, 70e-9])
        reads = iter([36e9, 60e9, 1e9])

        def peak(self, kind: str, passes: int) -> list[float]:
            return [1.0] * passes

        def read(self, passes: int) -> list[float]:
            return [next(self.reads)] * passes

        def round_trip(self) -> float:
            return next(self.trips)

    meter = RoofMeter(1, read_bytes=1 << 20)
    monkeypatch.setattr(meter, "_native", Native())
    sample = meter.sample()
    assert (sample.read, sample.round_trip) == (60e9, 310e-9)


def test_one_thread_has_no_round_trip() -> None:
    meter = RoofMeter(1, read_bytes=1 << 20)
    assert meter.sample(passes=1).round_trip == 0.0


def test_a_round_trip_on_one_cpu_ends() -> None:
    cpu = min(os.sched_getaffinity(0))
    native, begin = NativeRoofs(3, [cpu] * 3, 1 << 20), time.monotonic()
    assert 0 < native.round_trip() < 1.0
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "one, other, alike",
    [(50, 50, True), (50, 99, True), (50, 100, False), (50, 300, False), (0, 0, True), (0, 50, False)],
)
def test_placements_are_told_by_round_trips(one: float, other: float, alike: bool) -> None:
    first, second = (Roofs(2, 1.0, {}, trip) for trip in (one, other))
    assert first.placed_like(second) == second.placed_like(first) == alike


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: NativeRoofs(0, [], 1 << 20), "not 0"),
        (lambda: NativeRoofs(2, [-1, 0], 1 << 20), "no CPU -1"),
        (lambda: NativeRoofs(4, [], 100), "too few"),
        (lambda: NativeRoofs(1, [], 4096).read(0), "at least one"),
        (lambda: NativeRoofs(1, [], 4096).peak("dot_f8", 1), "dot_f8"),
    ],
)
def test_nonsense_is_refused(call, message: str) -> None:
    with pytest.raises(NativeError, match=message):
        call()


def test_the_meter_raises_typed_errors() -> None:
    with pytest.raises(DriverError, match="threads can measure"):
        RoofMeter(10_000)


def test_medians_and_the_peak_of_a_type() -> None:
    rates = ((1, 30, 7), (9, 10, 5), (2, 20, 6))
    samples = [Roofs(2, float(r), {"fma_f32": float(p)}, float(t)) for r, p, t in rates]
    roofs = median_roofs(samples)
    assert roofs == Roofs(2, 2.0, {"fma_f32": 20.0}, 6.0)
    assert roofs.peak_of(DType.BF16) == ("fma_f32", 20.0)
    assert Roofs(1, 1.0, {"fma_f32": 1.0, "dot_bf16": 5.0}, 0.0).peak_of(DType.BF16) == ("dot_bf16", 5.0)
    assert Roofs(1, 1.0, {}, 0.0).peak_of(DType.BF16) == ("", 0.0)
    with pytest.raises(ValueError, match="no samples"):
        median_roofs([])


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1M", "3072K", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 3 << 20
    assert last_level_cache(tmp_path / "nothing") == 0
