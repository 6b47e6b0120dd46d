"""A profile as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .costs import Cost
from .profile import TimedStep, kernel_label
from .session import Session

_PROCESS = 1
_STEPS, _LAUNCHES, _WAITS = 1, 2, 3  # tracks


def trace_events(session: Session, steps: Sequence[TimedStep]) -> list[dict[str, Any]]:
    """Trace events: one slice for each step, each launch and each wait at a barrier; times in microseconds from 0."""
    names = {_STEPS: "steps", _LAUNCHES: "launches (worker 0)", _WAITS: "waiting at barriers (worker 0)"}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": f"pelton {session.path.name}"}}
    ]
    for track, name in names.items():
        common = {"ph": "M", "pid": _PROCESS, "tid": track}
        events.append({"name": "thread_name", **common, "args": {"name": name}})
        events.append({"name": "thread_sort_index", **common, "args": {"sort_index": track}})
    origin = min((step.record.begin for step in steps), default=0)
    for index, step in enumerate(steps):
        shape = step.record.shape
        sizes = {"tokens": shape.tokens, "sequences": len(shape.counts), "rows": shape.rows}
        events.append(_slice(f"step {index}", _STEPS, step.record.begin - origin, step.record.end - origin, sizes))
        for launch, row_start, begin, kernel_end, end in step.timings.tolist():
            cost = session.costs.launch(launch, shape, row_start)
            details = _details(session, launch, row_start, cost, end - begin)
            name = kernel_label(session, launch)
            events.append(_slice(name, _LAUNCHES, begin - origin, kernel_end - origin, details))
            if session.plan.launches[launch].barrier:
                events.append(_slice("wait", _WAITS, kernel_end - origin, end - origin, {"after": name}))
    return events


def encode_trace(events: list[dict[str, Any]]) -> bytes:
    """The JSON that trace viewers read."""
    return msgspec.json.encode({"displayTimeUnit": "ns", "traceEvents": events})


def _slice(name: str, track: int, begin: int, end: int, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "pid": _PROCESS,
        "tid": track,
        "args": details,
    }


def _details(session: Session, launch: int, row_start: int, cost: Cost, nanoseconds: int) -> dict[str, Any]:
    time = max(nanoseconds, 1)
    return {
        "launch": launch,
        "origin": session.plan.launches[launch].origin,
        "row_start": row_start,
        "weight_bytes": cost.weight_bytes,
        "kv_read_bytes": cost.kv_read_bytes,
        "flops": cost.flops,
        "read_gb_s": round(cost.read_bytes / time, 2),
        "gflop_s": round(cost.flops / time, 2),
    }
