"""The machine that timings were taken on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ..runtime.drivers.cpu.threads import default_threads

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides which tactic is fast: the CPU, its caches, and how many threads share the work."""

    cpu: str
    caches: tuple[str, ...]
    threads: int

    @property
    def id(self) -> str:
        """A short name that equal machines share."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.cpu}, {self.threads} threads"


def this_machine(cpuinfo: Path = _CPUINFO, caches: Path = _CACHES) -> Machine:
    """The machine we are on; what the system does not tell is left out."""
    fields = _fields(cpuinfo)
    name = fields.get("model name") or "unknown CPU"
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields]
    cpu = f"{name} ({', '.join(numbers)})" if numbers else name
    return Machine(cpu=cpu, caches=tuple(sorted(_caches(caches))), threads=default_threads())


def _fields(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first CPU."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = [line.partition(":") for line in first.splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _caches(folder: Path) -> list[str]:
    """Data caches as "L2 1024K"."""
    found = []
    for index in folder.glob("index*"):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return found
