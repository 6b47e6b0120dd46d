"""`pelton inspect`: what is in an engine: targets, ranges, kernels and why, memory plan, sizes, provenance."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from ..runtime.format.container import EngineFile
from ..runtime.format.plan import Plan

HELP = "Show what an engine holds."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--tensors", action="store_true", help="list every stored tensor")
    parser.add_argument("--launches", metavar="TARGET", help="list the launch plan of one target")


def execute(arguments: argparse.Namespace) -> int:
    engine = EngineFile.open(arguments.engine, verify_weights="off")
    try:
        document = describe(engine)
        if arguments.launches:
            document["launches"] = _launches(engine.plan(arguments.launches))
        if arguments.json:
            print(json.dumps(document, indent=2))
        else:
            _print(document, tensors=arguments.tensors)
    finally:
        engine.close()
    return 0


def describe(engine: EngineFile) -> dict[str, Any]:
    """All of it as plain data; the keys are stable for programs."""
    tensors = [
        {
            "name": spec.name,
            "dtype": spec.dtype.value,
            "shape": list(spec.shape),
            "layout": spec.layout,
            "bytes": spec.nbytes,
        }
        for spec in engine.tensors.values()
    ]
    weights = sum(spec.nbytes for spec in engine.tensors.values())
    size = engine.path.stat().st_size
    document: dict[str, Any] = {
        "engine": str(engine.path),
        "identity": engine.identity,
        "bytes": {"file": size, "weights": weights, "other": size - weights},
        "manifest": msgspec.to_builtins(engine.manifest),
        "report": msgspec.json.decode(engine.section("report")) if engine.has_section("report") else {},
        "plans": {},
        "tensors": tensors,
    }
    for target in engine.manifest.targets:
        plan = engine.plan(target.key)
        document["plans"][target.key] = _plan_summary(engine, target.key, plan)
    return document


def _plan_summary(engine: EngineFile, key: str, plan: Plan) -> dict[str, Any]:
    paged = [state for state in plan.states if state.kind == "paged_kv"]
    kv_bytes = sum(2 * math.prod(state.shape) * state.dtype.itemsize for state in paged)
    return {
        "launches": len(plan.launches),
        "tail_launches": len(plan.launches) - plan.tail_start,
        "kernels": len(plan.kernels),
        "arena_bytes": plan.arena_bytes,
        "buffer_bytes_without_reuse": sum(b.nbytes for b in plan.buffers),
        "kv_bytes_per_token": kv_bytes,
        "kv_groups": [msgspec.to_builtins(g) for g in plan.kv_groups],
        "code_bytes": len(engine.code(key)) if engine.has_section(f"code/{key}") else 0,
    }


def _launches(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "index": i,
            "part": "tail" if i >= plan.tail_start else "body",
            "kernel": plan.kernels[launch.kernel].kernel,
            "symbol": plan.kernels[launch.kernel].symbol,
            "origin": launch.origin,
            "barrier": launch.barrier,
            "weights": [plan.weights[o.index].name for o in launch.inputs if o.space == "weight"],
        }
        for i, launch in enumerate(plan.launches)
    ]


def _print(document: dict[str, Any], *, tensors: bool) -> None:
    from rich.console import Console

    console = Console()
    manifest, sizes = document["manifest"], document["bytes"]
    model = manifest["model"]
    console.print(f"[bold]{document['engine']}[/bold]  {sizes['file'] / 1e6:.1f} MB  schema {manifest['schema']}")
    console.print(f"identity   {document['identity']}")
    console.print(
        f"model      {model['name']} ({model['architecture']}), {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, {model['num_heads']} heads / {model['num_kv_heads']} KV heads of "
        f"{model['head_dim']}, vocabulary {model['vocab_size']}"
    )
    weights, other = sizes["weights"] / 1e6, sizes["other"] / 1e6
    console.print(f"precision  {model['dtype']}; weights {weights:.1f} MB, all else {other:.2f} MB")
    console.print("ranges     " + ", ".join(f"{k} {v}" for k, v in manifest["ranges"].items()))
    for note in manifest["notes"]:
        console.print(f"note       {note}")
    _print_targets(console, document)
    for key, report in document["report"].get("targets", {}).items():
        _print_kernels(console, key, report)
    _print_rows(console, "provenance", ("what", "value"), list(manifest["provenance"].items()))
    if "launches" in document:
        rows = [(r["index"], r["part"], r["kernel"], r["origin"], " ".join(r["weights"])) for r in document["launches"]]
        _print_rows(console, "launch plan", ("#", "part", "kernel", "origin", "weights"), rows)
    if tensors:
        rows = [(t["name"], t["dtype"], t["shape"], t["layout"], t["bytes"]) for t in document["tensors"]]
        _print_rows(console, "tensors", ("name", "dtype", "shape", "layout", "bytes"), rows)


def _print_targets(console: Any, document: dict[str, Any]) -> None:
    rows = []
    for target in document["manifest"]["targets"]:
        plan = document["plans"][target["key"]]
        rows.append(
            (
                target["key"],
                f"{plan['launches']} ({plan['tail_launches']} per row chunk)",
                plan["kernels"],
                f"{plan['code_bytes'] / 1e3:.0f} kB",
                f"{plan['arena_bytes'] / 1e6:.1f} of {plan['buffer_bytes_without_reuse'] / 1e6:.1f} MB",
                f"{plan['kv_bytes_per_token'] / 1e3:.1f} kB",
                target["compiler"],
            )
        )
    columns = ("target", "launches", "kernels", "code", "arena (of sum of buffers)", "KV a token", "compiler")
    _print_rows(console, "targets", columns, rows)


def _print_kernels(console: Any, key: str, report: dict[str, Any]) -> None:
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for kernel in report["kernels"]:
        grouped[kernel["kernel"]].append(kernel)
    rows = []
    for name, kernels in grouped.items():
        for kernel in kernels:
            why = "; ".join(f"not {k}: {r}" for k, r in kernel["refused"].items()) or "first choice"
            rows.append((name, kernel["launches"], " ".join(kernel["inputs"]), " ".join(kernel["outputs"]), why))
    _print_rows(console, f"kernels of {key}", ("kernel", "launches", "inputs", "outputs", "why"), rows)


def _print_rows(console: Any, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)
