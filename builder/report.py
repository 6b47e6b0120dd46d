"""The build report: every decision of the build, for `pelton inspect`; and the timings file beside the engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import BuildError
from ..runtime.format.temporaries import write_atomically
from .autotune import Choice, Tuning
from .kernels import KernelRegistry
from .lower import Lowered
from .output import report_path
from .progress import Stage
from .tactics import label, tactic_of
from .target import Target


@dataclass(frozen=True)
class TargetBuild:
    """What was decided for one target. ``registry``: the kernels there were to choose from."""

    target: Target
    registry: KernelRegistry
    lowered: Lowered
    tuning: Tuning


def build_report(builds: Sequence[TargetBuild], notes: Sequence[str]) -> dict[str, object]:
    """What `pelton inspect` prints: per target the kernels and why, launches, and the memory plan. No timings."""
    return {"notes": list(notes), "targets": {str(built.target): _target_report(built) for built in builds}}


def _target_report(built: TargetBuild) -> dict[str, object]:
    target, low = built.target, built.lowered
    plan = low.plan
    launches = Counter(plan.kernels[launch.kernel].symbol for launch in plan.launches)
    kernels = []
    for symbol, kernel, call in low.emitted:
        tactic = tactic_of(kernel, call, target)
        kernels.append(
            {
                "symbol": symbol,
                "kernel": kernel.name,
                "op": call.op.name,
                "inputs": [str(t) for t in call.inputs],
                "outputs": [str(t) for t in call.outputs],
                "launches": launches[symbol],
                "generic": kernel.generic,
                "refused": built.registry.refusals(call, target),
                "tactic": label(tactic),
                "tactic_by": built.tuning.choices.get(call, Choice(kernel)).reason if tactic else "",
            }
        )
    return {
        "kernels": kernels,
        "launches": len(plan.launches),
        "tail_launches": len(plan.launches) - plan.tail_start,
        "arena_bytes": plan.arena_bytes,
        "buffers": len(plan.buffers),
        "buffer_bytes_without_reuse": sum(b.nbytes for b in plan.buffers),
    }


def write_timings(out: Path, stages: Sequence[Stage], engine_bytes: int, builds: Sequence[TargetBuild]) -> float:
    """Write OUT.report.json, which is no part of the engine; returns total seconds.

    It has seconds and bytes of each stage, and where each tactic came from, with the timings that decided.
    """
    total = sum(stage.seconds for stage in stages)
    document = {
        "engine": out.name,
        "engine_bytes": engine_bytes,
        "seconds": round(total, 3),
        "stages": [{"name": s.name, "seconds": round(s.seconds, 3), "bytes": s.bytes} for s in stages],
        "tactics": [tactic for built in builds for tactic in _tactics(built)],
    }
    path = report_path(out)
    try:
        write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        raise BuildError(
            f"{out} is complete, but its timings cannot be written to {path}: {error.strerror}; make room there"
        ) from error
    return total


def _tactics(built: TargetBuild) -> list[dict[str, Any]]:
    """The tactic of each kernel that has one: from the "model", "timed" in this build, or from the timing "cache"."""
    found = []
    for symbol, kernel, call in built.lowered.emitted:
        tactic = tactic_of(kernel, call, built.target)
        if tactic:
            choice = built.tuning.choices.get(call, Choice(kernel))
            found.append(
                {
                    "target": str(built.target),
                    "symbol": symbol,
                    "kernel": kernel.name,
                    "tactic": label(tactic),
                    "source": choice.source,
                    "workloads": list(map(str, choice.workloads)),
                    "seconds": {str(machine): seconds for machine, seconds in choice.timings},
                }
            )
    return found
