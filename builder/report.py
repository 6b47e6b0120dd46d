"""The build report: every decision of the build, for `pelton inspect`; and the timings file beside the engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..runtime.errors import BuildError
from ..runtime.format.temporaries import write_atomically
from .kernels import KernelRegistry
from .lower import Lowered
from .output import report_path
from .progress import Stage
from .target import Target


def build_report(targets: Sequence[tuple[Target, KernelRegistry, Lowered]], notes: Sequence[str]) -> dict[str, object]:
    """What `pelton inspect` prints: per target the kernels and why, launches, and the memory plan. No timings."""
    return {
        "notes": list(notes),
        "targets": {str(target): _target_report(target, registry, low) for target, registry, low in targets},
    }


def _target_report(target: Target, registry: KernelRegistry, low: Lowered) -> dict[str, object]:
    plan = low.plan
    launches = Counter(plan.kernels[launch.kernel].symbol for launch in plan.launches)
    kernels = []
    for symbol, kernel, call in low.emitted:
        kernels.append(
            {
                "symbol": symbol,
                "kernel": kernel.name,
                "op": call.op.name,
                "inputs": [str(t) for t in call.inputs],
                "outputs": [str(t) for t in call.outputs],
                "launches": launches[symbol],
                "generic": kernel.generic,
                "refused": registry.refusals(call, target),
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


def write_timings(out: Path, stages: Sequence[Stage], engine_bytes: int) -> float:
    """Write OUT.report.json (seconds and bytes of each stage; not part of the engine); returns total seconds."""
    total = sum(stage.seconds for stage in stages)
    document = {
        "engine": out.name,
        "engine_bytes": engine_bytes,
        "seconds": round(total, 3),
        "stages": [{"name": s.name, "seconds": round(s.seconds, 3), "bytes": s.bytes} for s in stages],
    }
    path = report_path(out)
    try:
        write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        raise BuildError(
            f"{out} is complete, but its timings cannot be written to {path}: {error.strerror}; make room there"
        ) from error
    return total
