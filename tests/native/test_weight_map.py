"""Weights that move to huge pages while they are read."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pelton._core import NativeError, Team, WeightMap

ROOT = Path(__file__).resolve().parents[2]
PAGE, LEAF, WINDOW = 4096, 1 << 20, 2 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="the kernel has no transparent huge pages"
)


@pytest.fixture
def file(tmp_path):
    """A page of something else, then 9 windows and a bit of random bytes."""
    data = np.random.default_rng(5).integers(0, 256, 9 * WINDOW + LEAF + 777, np.uint8).tobytes()
    path = tmp_path / "weights"
    path.write_bytes(bytes(PAGE) + data)
    return path, data


def digests(data: bytes) -> bytes:
    return b"".join(hashlib.sha256(data[at : at + LEAF]).digest() for at in range(0, len(data), LEAF))


def make(path, data, *, hashes=True, move=True) -> WeightMap:
    fd = os.open(path, os.O_RDONLY)
    try:
        return WeightMap(fd, PAGE, len(data), digests(data) if hashes else b"", move)
    finally:
        os.close(fd)


def content(weights: WeightMap, nbytes: int) -> bytes:
    return ctypes.string_at(weights.address, nbytes)


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_team_finishes_all_of_it(file, hashes, move, threads):
    path, data = file
    weights = make(path, data, hashes=hashes, move=move)
    assert weights.address % WINDOW == 0
    assert content(weights, len(data)) == data
    weights.finish(Team(threads))
    assert weights.complete
    assert weights.wait(0)
    assert content(weights, len(data)) == data
    assert weights.take_damage() == []
    assert weights.moved_bytes == (len(data) if weights.moves else 0)


@needs_huge_pages
def test_moved_weights_are_on_huge_pages_of_their_own(file):
    path, data = file
    weights = make(path, data)
    weights.finish(Team(1))
    assert weights.moved_bytes == len(data)
    assert str(path) not in Path("/proc/self/maps").read_text()  # nothing is on the file any more
    path.write_bytes(bytes(path.stat().st_size))
    assert content(weights, len(data)) == data


def test_readers_never_see_anything_but_the_weights(file):
    """Two threads read all of it again and again, while it moves under them."""
    path, data = file
    expected = hashlib.sha256(data).digest()
    wrong: list[int] = []
    for _ in range(3):
        weights = make(path, data)
        view = np.frombuffer((ctypes.c_uint8 * len(data)).from_address(weights.address), np.uint8)

        def read(view=view, weights=weights) -> None:
            while not weights.complete:
                if hashlib.sha256(view).digest() != expected:
                    wrong.append(1)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        weights.start()
        weights.finish(Team(2))  # the thread gets little beside the readers
        for reader in readers:
            reader.join()
        assert hashlib.sha256(view).digest() == expected
    assert wrong == []


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("at", [0, LEAF - 1, LEAF, 5 * LEAF + 17, 19 * LEAF + 776])
def test_one_flipped_bit_is_found_wherever_it_is(file, move, at):
    path, data = file
    hashes = digests(data)
    broken = bytearray(path.read_bytes())
    broken[PAGE + at] ^= 4
    path.write_bytes(broken)
    with path.open("rb") as stream:
        weights = WeightMap(stream.fileno(), PAGE, len(data), hashes, move)
    weights.start()
    assert weights.wait(60)
    assert weights.damaged
    begin = at // LEAF * LEAF
    assert weights.take_damage() == [(PAGE + begin, PAGE + min(begin + LEAF, len(data)))]
    assert not weights.damaged
    assert content(weights, len(data)) == bytes(broken[PAGE:])


@pytest.mark.parametrize("move", [True, False])
def test_a_file_cut_short_is_damage_not_a_crash(file, move):
    path, data = file
    weights = make(path, data, move=move)
    os.truncate(path, PAGE + 3 * LEAF + 5)
    weights.finish(Team(2))
    lost = sorted(weights.take_damage())
    assert lost[0] == (PAGE + 3 * LEAF, PAGE + 4 * LEAF)
    assert len(lost) == len(digests(data)) // 32 - 3


def test_stop_in_the_middle_leaves_it_readable(file):
    path, data = file
    for _ in range(20):
        weights = make(path, data)
        weights.start()
        weights.stop()
        assert content(weights, len(data)) == data
        assert weights.wait(60) == weights.complete  # does not hang


def test_nothing_is_left_behind(file):
    path, data = file

    def used() -> tuple[int, int]:
        tasks = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")) + tasks, Path("/proc/self/maps").read_text().count(path.name)

    before = used()
    for wait in (True, False):
        weights = make(path, data)
        weights.start()
        if wait:
            weights.wait(60)
        del weights
    assert used() == before


def test_wrong_arguments_are_refused(file):
    path, data = file
    with path.open("rb") as stream:
        for bad in (b"x", digests(data)[:-32], digests(data) + bytes(32)):
            with pytest.raises(NativeError, match="hash tree has"):
                WeightMap(stream.fileno(), PAGE, len(data), bad, False)
        with pytest.raises(NativeError, match="cannot map"):
            WeightMap(stream.fileno(), 17, len(data), b"", False)
        with pytest.raises(NativeError, match="no bytes"):
            WeightMap(stream.fileno(), PAGE, 0, b"", False)


FORK = """
import ctypes, os, sys
sys.path.insert(0, {root!r})
from pelton._core import WeightMap
path, size = sys.argv[1], os.path.getsize(sys.argv[1])
data = open(path, "rb").read()
for turn in range(10):
    fd = os.open(path, os.O_RDONLY)
    weights = WeightMap(fd, 0, size, b"", True)
    os.close(fd)
    weights.start()
    child = os.fork()
    if child == 0:
        same = ctypes.string_at(weights.address, size) == data
        weights.wait(-1)
        weights.stop()
        del weights
        os._exit(0 if same else 1)
    assert ctypes.string_at(weights.address, size) == data
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
    assert weights.wait(60)
"""


def test_a_fork_in_the_middle_of_the_move(file):
    path, _ = file
    subprocess.run([sys.executable, "-c", FORK.format(root=str(ROOT)), str(path)], timeout=120, check=True)
