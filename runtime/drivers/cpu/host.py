"""What this machine is: its CPU features, and which target of an engine it can run."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ...errors import DriverError, TargetMismatchError
from ...format.manifest import TargetEntry

#: Of a CPU's many features those that choose between targets: vector and matrix instructions.
_TELLING = re.compile(r"avx|amx|fma|f16c|sse4|asimd|sve|bf16|i8mm")


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

    Raises TargetMismatchError that says what the nearest target lacks here, and shows both sides.
    """
    have = frozenset(host_features() if features is None else features)
    fitting = [t for t in targets if t.kind == "cpu" and have.issuperset(t.features)]
    if fitting:
        return max(fitting, key=lambda t: t.rank)
    raise TargetMismatchError(_mismatch(targets, have))


def _mismatch(targets: Sequence[TargetEntry], have: frozenset[str]) -> str:
    """What is missing in the first line, then what the engine has and what this machine has."""
    for_cpus = [t for t in targets if t.kind == "cpu"]
    if for_cpus:
        nearest = min(for_cpus, key=lambda t: len(set(t.features) - have))
        missing = " ".join(sorted(set(nearest.features) - have))
        why = f"{nearest.key} needs {missing}, which this CPU lacks"
    else:
        why = f"it has {', '.join(t.key for t in targets) or 'no target'}, and none for a CPU"
    lines = [
        f"no target of this engine runs here: {why}; rebuild with a --target that fits (pelton targets lists them)",
        "the engine has:",
    ]
    for target in targets:
        needs = " ".join(target.features) if target.kind == "cpu" else f"for {target.kind}, not for a CPU"
        lines.append(f"  {target.key}: {needs}")
    named = {feature for target in targets for feature in target.features}
    shown = sorted(feature for feature in have if feature in named or _TELLING.match(feature))
    others = f" and {len(have) - len(shown)} others" if len(shown) < len(have) else ""
    return "\n".join([*lines, f"this machine ({platform.machine()}) has:", f"  {' '.join(shown)}{others}"])
