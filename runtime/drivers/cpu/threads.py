"""How many threads a team has, and on which CPUs they run."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path


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


class CpuClaims:
    """CPUs that this process's teams are pinned to, so that two engines do not crowd the same ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: Counter[int] = Counter()

    def take(self, count: int, cpus: Sequence[int]) -> list[int]:
        """``count`` of ``cpus``, least used first; the first CPU comes last, it is left to the calling thread."""
        order = [*cpus[1:], *cpus[:1]]
        with self._lock:
            chosen = sorted(order, key=lambda cpu: self._used[cpu])[:count]
            self._used.update(chosen)
        return chosen

    def give_back(self, cpus: Sequence[int]) -> None:
        with self._lock:
            self._used.subtract(cpus)


CLAIMS = CpuClaims()
