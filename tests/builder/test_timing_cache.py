"""The timing cache file: what it keeps, what it refuses, and that nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pelton.builder.machine import Machine, this_machine
from pelton.builder.tactics import Workload
from pelton.builder.target import CPU_SKUS, Target
from pelton.builder.timing_cache import TimingCache, rounded
from pelton.runtime.errors import TimingCacheError

TARGET = Target("cpu", CPU_SKUS["x86-64-v3"])
HERE = Machine(cpu="one", caches=("L2 1024K",), threads=2)
THERE = Machine(cpu="other", caches=(), threads=8)
STEPS = (Workload((4,)), Workload((64,)))
SECONDS = {"a 1": (1e-3, 2e-3), "a 2": (1.5e-3, 0.123456789e-7)}


def filled(path: Path) -> TimingCache:
    cache = TimingCache.open(path, create=True)
    cache.put("k 1", "gemm", TARGET, STEPS, HERE, SECONDS)
    cache.put("k 1", "gemm", TARGET, STEPS, THERE, {"a 1": (2.0, 3.0), "a 2": (4.0, 5.0)})
    cache.put("k 2", "gemm", TARGET, STEPS[:1], THERE, {"a 1": (1.0,)})
    cache.save()
    return cache


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    filled(path)
    first = path.read_bytes()
    cache = TimingCache.open(path, create=False)
    assert cache.get("k 1", ["a 1", "a 2"], 2, HERE) == [(HERE, SECONDS)]
    assert {m.cpu for m, _ in cache.get("k 1", ["a 1", "a 2"], 2, None)} == {"one", "other"}
    assert cache.get("k 2", ["a 1"], 1, HERE) == []
    cache.save()
    assert path.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_people_can_read_it(tmp_path: Path) -> None:
    filled(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["schema"] == 1
    assert document["machines"][HERE.id] == {"cpu": "one", "caches": ["L2 1024K"], "threads": 2}
    entry = document["kernels"]["k 1"]
    assert entry["sku"] == "x86-64-v3"
    assert entry["workloads"] == ["4 tokens", "64 tokens"]
    assert entry["seconds"][HERE.id]["a 1"] == [0.001, 0.002]


def test_incomplete_entries_do_not_count(tmp_path: Path) -> None:
    """A tactic that is new, or workloads that have changed: time again."""
    cache = filled(tmp_path / "t.json")
    assert cache.get("k 1", ["a 1", "a 3"], 2, HERE) == []
    assert cache.get("k 1", ["a 1"], 1, HERE) == []
    assert cache.get("k 3", ["a 1"], 1, None) == []
    # One that is no longer offered is left out.
    assert cache.get("k 1", ["a 2"], 2, HERE) == [(HERE, {"a 2": SECONDS["a 2"]})]


def test_two_builds_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    one, two = (TimingCache.open(path, create=True) for _ in range(2))
    one.put("k 1", "gemm", TARGET, STEPS[:1], HERE, {"a 1": (1.0,)})
    two.put("k 1", "gemm", TARGET, STEPS[:1], THERE, {"a 1": (2.0,)})
    two.put("k 2", "gemm", TARGET, STEPS[:1], THERE, {"a 1": (3.0,)})
    one.save()
    two.save()
    cache = TimingCache.open(path, create=False)
    assert len(cache.get("k 1", ["a 1"], 1, None)) == 2
    assert cache.get("k 2", ["a 1"], 1, THERE) == [(THERE, {"a 1": (3.0,)})]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "t.json"
    link.symlink_to(tmp_path / "real" / "t.json")
    filled(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "t.json").is_file()


def set_at(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the JSON document; "*" stands for the first key there."""

    def edit(document: dict[str, Any]) -> None:
        at: Any = document
        for key in keys[:-1]:
            at = at[next(iter(at)) if key == "*" else key]
        at[next(iter(at)) if keys[-1] == "*" else keys[-1]] = value

    return edit


DAMAGES = {
    "newer": (set_at("schema", value=2), "schema 2"),
    "no schema": (lambda d: d.pop("schema"), "damaged"),
    "schema text": (set_at("schema", value="1"), "damaged"),
    "unknown field": (set_at("more", value=1), "damaged"),
    "no kernels": (lambda d: d.pop("kernels"), "damaged"),
    "negative": (set_at("kernels", "k 1", "seconds", "*", "a 1", value=[-1.0, 1.0]), "damaged"),
    "zero": (set_at("kernels", "k 1", "seconds", "*", "a 1", value=[0, 1]), "damaged"),
    "text": (set_at("kernels", "k 1", "seconds", "*", "a 1", value=["1", "2"]), "damaged"),
    "one time too few": (set_at("kernels", "k 1", "seconds", "*", "a 1", value=[1.0]), "are not the times of 2"),
    "unknown machine": (lambda d: d["machines"].clear(), "unknown machine"),
    "another machine": (set_at("machines", "*", "threads", value=7), "by its own description"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_and_kept(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    filled(path)
    edit, message = DAMAGES[name]
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    check_refused(path, message)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema": 1}', b"[" * 100000, b"\x7fELF", b'{"schema": 1e400}'],
    ids=["empty", "cut", "list", "null", "bytes", "bare", "deep", "elf", "huge"],
)
def test_other_files_are_refused_and_kept(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    check_refused(path, "damaged or no timing cache")


def test_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    filled(path)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 2, 37):
        path.write_bytes(whole[:size])
        check_refused(path, "damaged")


def test_infinite_times_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    filled(path)
    path.write_text(path.read_text().replace("0.001", "1e999"))
    check_refused(path, "damaged")


def check_refused(path: Path, message: str) -> None:
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(TimingCacheError, match=message) as raised:
            TimingCache.open(path, create=create)
        assert str(path) in str(raised.value)
        assert "name another file" in str(raised.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_damage_that_comes_later_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    cache = filled(path)
    path.write_text("not ours")
    with pytest.raises(TimingCacheError):
        cache.save()
    assert path.read_text() == "not ours"


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TimingCacheError, match="does not exist; make it .* with --autotune"):
        TimingCache.open(tmp_path / "none.json", create=False)
    with pytest.raises(TimingCacheError, match="cannot write .*none"):
        TimingCache.open(tmp_path / "none" / "t.json", create=True)
    with pytest.raises(TimingCacheError, match="cannot read .*directory"):
        TimingCache.open(tmp_path, create=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TimingCacheError, match="cannot write"):
        TimingCache.open(tmp_path / "t.json", create=True)


def test_rounded_is_what_the_file_says() -> None:
    for seconds in (0.00123456789, 1.0, 9.99999e-5, 12345.678):
        kept = rounded(seconds)
        assert json.loads(json.dumps(kept)) == kept
        assert abs(kept / seconds - 1) < 1e-3


def test_machines(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU\ncpu family\t: 6\nmodel\t: 143\n\nmodel name\t: no\n")
    for index, (level, kind, size) in enumerate(
        (("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "2M"))
    ):
        folder = tmp_path / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    machine = this_machine(cpuinfo, tmp_path / "cache")
    assert machine.cpu == "Some CPU (cpu family 6, model 143)"
    assert machine.caches == ("L1 32K", "L2 2M")
    assert str(machine) == f"Some CPU (cpu family 6, model 143), {machine.threads} threads"
    silent = this_machine(tmp_path / "none", tmp_path / "none")
    assert (silent.cpu, silent.caches) == ("unknown CPU", ())
    assert len({machine.id, silent.id, this_machine().id, HERE.id}) == 4
    assert this_machine().id == this_machine().id
