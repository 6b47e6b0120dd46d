"""`pelton targets`: what engines can be built for, and what this machine runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

HELP = "List the targets and what this machine can run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


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

    from rich.console import Console
    from rich.table import Table

    table = Table(title="targets")
    for column in ("target", "runs here", "16-bit dot product", "missing on this machine"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["target"], "yes" if row["runs_here"] else "no", row["dot"], " ".join(row["missing"]))
    console = Console()
    console.print(table)
    console.print(f"host = cpu:{best.name}" if best else "host: no target in the table runs here")
    return 0
