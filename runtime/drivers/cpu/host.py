"""What this machine is: its CPU features, and which target of an engine it can run."""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from pathlib import Path

from ...errors import DriverError, TargetMismatchError
from ...format.manifest import TargetEntry


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of the features that every CPU has, as the kernel spells them ("avx512_bf16", on Arm "asimd").

    Raises DriverError where there is no such file (not Linux): a guess would end in an illegal instruction.
    """
    try:
        text = cpuinfo.read_text()
    except OSError as error:
        raise DriverError(
            f"cannot read CPU features from {cpuinfo} ({error}); "
            f"the cpu driver needs Linux, this is {platform.system()}"
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
