"""How much memory this process could still take."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int:
    """Bytes this process could still take: free memory of the machine, or of its container where that is less."""
    free = 8 << 30
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        values = [line for path in (limit, used) for line in _lines(path)[:1]]
        if len(values) == 2 and all(value.isdigit() for value in values):
            free = min(free, max(0, int(values[0]) - int(values[1])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
