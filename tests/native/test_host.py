"""CPU features, cgroup quotas, and the choice of a target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pelton.runtime.drivers.cpu.host import host_features, select_target
from pelton.runtime.drivers.cpu.threads import cpu_list, default_threads, quota_cpus
from pelton.runtime.errors import DriverError, TargetMismatchError
from pelton.runtime.format.manifest import TargetEntry


def entry(key: str, features: str, rank: int, kind: str = "cpu") -> TargetEntry:
    return TargetEntry(
        key=key, kind=kind, sku=key, features=tuple(features.split()), rank=rank, compiler="g++ 12", flags=()
    )


def test_this_host():
    features = host_features()
    assert features
    if os.uname().machine == "x86_64":
        assert "sse2" in features


def test_only_what_every_cpu_has(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 amx_tile\n\nprocessor : 1\nflags\t\t: fpu avx2\n")
    assert host_features(path) == {"fpu", "avx2"}


def test_arm_spelling(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n")
    assert host_features(path) == {"fp", "asimd"}


def test_no_cpuinfo_is_an_error(tmp_path):
    with pytest.raises(DriverError, match="needs Linux"):
        host_features(tmp_path / "nothing")
    (tmp_path / "cpuinfo").write_text("cpu : strange\n")
    with pytest.raises(DriverError, match="lists no CPU features"):
        host_features(tmp_path / "cpuinfo")


V3, V4, SPR = entry("v3", "avx2", 30), entry("v4", "avx2 avx512f", 40), entry("spr", "avx2 avx512f amx_tile", 60)


@pytest.mark.parametrize(
    ("features", "chosen"),
    [("avx2", V3), ("avx2 avx512f", V4), ("avx2 avx512f amx_tile fpu", SPR), ("avx2 amx_tile", V3)],
)
def test_the_highest_rank_that_runs(features, chosen):
    for order in ([V3, V4, SPR], [SPR, V4, V3]):
        assert select_target(order, features.split()) is chosen


def test_a_mismatch_shows_both_sides():
    with pytest.raises(TargetMismatchError) as caught:
        select_target([V4, SPR, entry("h200", "", 99, kind="cuda")], ["avx2", "fpu"])
    text = str(caught.value)
    first, *others = text.splitlines()
    assert first.startswith("no target of this engine runs here: v4 needs avx512f, which this CPU lacks; rebuild")
    assert "--target" in first
    assert others[:2] == ["the engine has:", "  v4: avx2 avx512f"]
    assert "  h200: for cuda, not for a CPU" in others
    assert others[-1] == "  avx2 and 1 others"
    with pytest.raises(TargetMismatchError, match="it has h200, and none for a CPU; rebuild"):
        select_target([entry("h200", "", 99, kind="cuda")], ["avx2"])


def test_no_targets_at_all():
    with pytest.raises(TargetMismatchError, match="it has no target, and none for a CPU"):
        select_target([], ["avx2"])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2_takes_the_tightest_of_all_parents(tmp_path):
    write(tmp_path / "self", "0::/a/b\n")
    root = tmp_path / "cgroup"
    write(root / "a/b/cpu.max", "max 100000\n")
    assert quota_cpus(tmp_path / "self", root) is None
    write(root / "a/cpu.max", "250000 100000\n")
    assert quota_cpus(tmp_path / "self", root) == 2.5
    write(root / "a/b/cpu.max", "50000 100000\n")
    assert quota_cpus(tmp_path / "self", root) == 0.5


def test_cgroup_v2_namespaced_path_outside_the_mount(tmp_path):
    write(tmp_path / "self", "0::/../../system.slice/x\n")
    write(tmp_path / "cgroup/cpu.max", "300000 100000\n")
    assert quota_cpus(tmp_path / "self", tmp_path / "cgroup") == 3.0


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_cgroup_v1(tmp_path, folder):
    write(tmp_path / "self", "5:memory:/m\n3:cpu,cpuacct:/docker/x\n0::/\n")
    base = tmp_path / "cgroup" / folder / "docker/x"
    write(base / "cpu.cfs_quota_us", "-1\n")
    write(base / "cpu.cfs_period_us", "100000\n")
    assert quota_cpus(tmp_path / "self", tmp_path / "cgroup") is None
    write(base / "cpu.cfs_quota_us", "150000\n")
    assert quota_cpus(tmp_path / "self", tmp_path / "cgroup") == 1.5


def test_no_cgroups(tmp_path):
    assert quota_cpus(tmp_path / "nothing", tmp_path) is None


def test_default_team(monkeypatch):
    allowed = len(os.sched_getaffinity(0))
    for quota, expected in ((None, allowed), (0.5, 1), (1.9, 1), (1000.0, allowed)):
        monkeypatch.setattr("pelton.runtime.drivers.cpu.threads.quota_cpus", lambda quota=quota: quota)
        assert default_threads() == expected
    assert sorted(cpu_list()) == sorted(os.sched_getaffinity(0))
