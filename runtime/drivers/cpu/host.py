"""What this machine is: CPU features, how many threads to use, and which target of an engine to run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...errors import DriverError, TargetMismatchError
from ...format.manifest import TargetEntry


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of the features that every CPU has, as the kernel spells them ("avx512_bf16", on Arm "asimd").

    Raises DriverError where there is no such file to read (not Linux), since guessing would end in an illegal instruction.
    """
    try:
        text = cpuinfo.read_text()
    except OSError as error:
        raise DriverError(
            f"cannot read CPU features from {cpuinfo} ({error}); the cpu driver needs Linux, this is {platform.system()}"
        ) from error
    found: frozenset[str] | None = None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            here = frozenset(value.split())
            found = here if found is None else found & here
    if found is None:
        raise DriverError(f"{cpuinfo} lists no CPU features on this machine ({platform.machine()})")
    return found


def select_target(targets: Sequence[TargetEntry], features: Collection[str] | None = None) -> TargetEntry:
    """The CPU target of highest rank that ``features`` (default: this host's) can run.

    Raises TargetMismatchError that lists, for each target, what the host lacks.
    """
    have = frozenset(host_features() if features is None else features)
    fitting = [t for t in targets if t.kind == "cpu" and have.issuperset(t.features)]
    if fitting:
        return max(fitting, key=lambda t: t.rank)
    lines = []
    for target in targets:
        if target.kind != "cpu":
            lines.append(f"  {target.key}: for {target.kind}, not for a CPU")
        else:
            missing = " ".join(f for f in target.features if f not in have)
            lines.append(f"  {target.key}: needs {' '.join(target.features)}\n    missing here: {missing}")
    listing = "\n".join(lines) or "  (none)"
    raise TargetMismatchError(
        f"no target of this engine runs on this machine.\nthe engine has:\n{listing}\n"
        f"this machine ({platform.machine()}) has:\n  {' '.join(sorted(have))}\n"
        "rebuild with a --target that fits (pelton targets lists them)"
    )


def cpu_list() -> list[int]:
    """CPUs this process may use, first those of distinct cores, then their second hardware threads."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    second: list[int] = []
    seen: set[str] = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = path.read_text().strip()
        except OSError:
            core = f"cpu {cpu}"
        (second if core in seen else first).append(cpu)
        seen.add(core)
    return first + second


def default_threads() -> int:
    """Size of a thread team that is not given: CPUs allowed by affinity, or whole CPUs of the cgroup quota if fewer."""
    allowed = len(os.sched_getaffinity(0))
    quota = quota_cpus()
    # A team larger than the quota is throttled in the middle of a step, all of it waiting for one.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def quota_cpus(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs' worth of time that this process's cgroup (v2 or v1) and its parents allow; None = no limit."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _walk(root, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                limits += _walk(root / name, path, _quota_v1)
    return min(limits, default=None)


def _walk(root: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Limits of a cgroup and of its parents, up to ``root``."""
    # In a container the path may be the host's, and only the root is mounted: missing folders have no limit.
    parts = [p for p in path.split("/") if p not in ("", "..")]
    folders = [root.joinpath(*parts[:n]) for n in range(len(parts) + 1)]
    return [limit for limit in map(read, folders) if limit is not None]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else quota / period
