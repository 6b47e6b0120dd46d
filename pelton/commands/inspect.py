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
    parser.add_argument("engine", type=Path, help="engine file")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for programs")
    parser.add_argument("--tensors", action="store_true", help="list every stored tensor")
    parser.add_argument("--launches", metavar="TARGET", help="list the launch plan of one target")


def execute(arguments: argparse.Namespace) -> int:
    engine = EngineFile.open(arguments.engine, verify_weights="off")
    try:
        document = describe(engine)
        if arguments.launches:
            document["launches"] = _launches(engine.plan(_target_key(engine, arguments.launches)))
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
    packed = [spec for spec in engine.tensors.values() if spec.layout == "packed12"]
    size = engine.path.stat().st_size
    document: dict[str, Any] = {
        "engine": str(engine.path),
        "identity": engine.identity,
        "bytes": {
            "file": size,
            "weights": weights,
            "other": size - weights,
            "packed12": sum(spec.nbytes for spec in packed),
            "packed12_elements": sum(math.prod(spec.shape) for spec in packed),
        },
        "manifest": msgspec.to_builtins(engine.manifest),
        "report": _report(engine),
        "plans": {},
        "tensors": tensors,
    }
    for target in engine.manifest.targets:
        plan = engine.plan(target.key)
        document["plans"][target.key] = _plan_summary(engine, target.key, plan)
    return document


class _Kernel(msgspec.Struct):
    """What is shown of a kernel in the build report."""

    kernel: str
    launches: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    refused: dict[str, str]


class _Target(msgspec.Struct):
    kernels: tuple[_Kernel, ...]


class _Report(msgspec.Struct):
    targets: dict[str, _Target] = {}


def _report(engine: EngineFile) -> dict[str, Any]:
    """The build report with all that it says, once what is shown of it has been found in place."""
    if not engine.has_section("report"):
        return {}
    engine.json_section("report", _Report)
    return engine.json_section("report", dict[str, Any])


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


def _target_key(engine: EngineFile, name: str) -> str:
    """A target's key; its SKU alone will do, as for build-engine."""
    keys = {target.sku: target.key for target in engine.manifest.targets if target.sku}
    return keys.get(name, name)


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
    from .console import print_line, print_table, stdout_console

    console = stdout_console()
    manifest, sizes = document["manifest"], document["bytes"]
    model = manifest["model"]
    print_line(console, f"{document['engine']}  {sizes['file'] / 1e6:.1f} MB  schema {manifest['schema']}")
    print_line(console, f"identity   {document['identity']}")
    print_line(
        console,
        f"model      {model['name']} ({model['architecture']}), {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, {model['num_heads']} heads / {model['num_kv_heads']} KV heads of "
        f"{model['head_dim']}, vocabulary {model['vocab_size']}",
    )
    weights, other = sizes["weights"] / 1e6, sizes["other"] / 1e6
    print_line(console, f"precision  {model['dtype']}; weights {weights:.1f} MB, all else {other:.2f} MB")
    if sizes["packed12"]:
        packed, plain = sizes["packed12"] / 1e6, 2 * sizes["packed12_elements"] / 1e6
        print_line(
            console,
            f"packing    {packed:.1f} MB of the weights in 12 bits an element, every value as it was "
            f"(bfloat16: {plain:.1f} MB)",
        )
    print_line(console, "ranges     " + ", ".join(f"{k} {v}" for k, v in manifest["ranges"].items()))
    for note in manifest["notes"]:
        print_line(console, f"note       {note}")
    _print_targets(console, document)
    for key, report in document["report"].get("targets", {}).items():
        _print_kernels(console, key, report)
    print_table(console, "provenance", ("what", "value"), list(manifest["provenance"].items()))
    if "launches" in document:
        rows = [(r["index"], r["part"], r["kernel"], r["origin"], " ".join(r["weights"])) for r in document["launches"]]
        print_table(console, "launch plan", ("#", "part", "kernel", "origin", "weights"), rows)
    if tensors:
        rows = [(t["name"], t["dtype"], t["shape"], t["layout"], t["bytes"]) for t in document["tensors"]]
        print_table(console, "tensors", ("name", "dtype", "shape", "layout", "bytes"), rows)


def _print_targets(console: Any, document: dict[str, Any]) -> None:
    from .console import print_line, print_table

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
            )
        )
    columns = ("target", "launches", "kernels", "code", "arena (of sum of buffers)", "KV a token")
    print_table(console, "targets", columns, rows)
    for compiler in sorted({target["compiler"] for target in document["manifest"]["targets"]} - {""}):
        print_line(console, f"compiler   {compiler}")


def _print_kernels(console: Any, key: str, report: dict[str, Any]) -> None:
    from .console import print_table

    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for kernel in report["kernels"]:
        grouped[kernel["kernel"]].append(kernel)
    rows = []
    for name, kernels in grouped.items():
        for kernel in kernels:
            why = "; ".join(f"not {k}: {r}" for k, r in kernel["refused"].items()) or "first choice"
            rows.append((name, kernel["launches"], " ".join(kernel["inputs"]), " ".join(kernel["outputs"]), why))
    print_table(console, f"kernels of {key}", ("kernel", "launches", "inputs", "outputs", "why"), rows)
    tactics = [
        (k["kernel"], " ".join(k["inputs"]), k["tactic"], k["tactic_by"]) for k in report["kernels"] if k.get("tactic")
    ]
    if tactics:
        print_table(console, f"tactics of {key}", ("kernel", "inputs", "tactic", "chosen by"), tactics)
