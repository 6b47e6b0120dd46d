"""`pelton targets`: what engines can be built for, and what this machine runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "List the targets and what this machine can run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the table as JSON, for programs")


def execute(arguments: argparse.Namespace) -> int:
    from ..builder.target import CPU_SKUS
    from ..runtime.drivers.cpu.host import host_features

    features = host_features()
    rows: list[dict[str, Any]] = [
        {
            "target": f"cpu:{sku.name}",
            "runs_here": features.issuperset(sku.features),
            "missing": sorted(set(sku.features) - features),
            "dot": sku.dot,
            "features": list(sku.features),
            "compiler_flags": list(sku.compiler_flags),
        }
        for sku in CPU_SKUS.values()
    ]
    anywhere = {"target": "reference", "runs_here": True, "missing": [], "dot": "none"}
    rows.append(anywhere | {"features": [], "compiler_flags": []})
    best = max((s for s in CPU_SKUS.values() if features.issuperset(s.features)), key=lambda s: s.rank, default=None)
    if arguments.json:
        print(json.dumps({"host": f"cpu:{best.name}" if best else None, "targets": rows}, indent=2))
        return 0

    from .console import print_line, print_table, stdout_console

    console = stdout_console()
    table = [(r["target"], "yes" if r["runs_here"] else "no", r["dot"], _note(r)) for r in rows]
    print_table(console, "targets", ("target", "runs here", "16-bit dot product", "note"), table)
    print_line(console, f"host = cpu:{best.name}" if best else "host: no target in the table runs here")
    return 0


def _note(row: dict[str, Any]) -> str:
    """What a reader of the table must know about a target."""
    if row["target"] == "reference":
        return "a plan without code, for tests: numpy, not pelton run"
    return f"this machine lacks {' '.join(row['missing'])}" if row["missing"] else ""
