"""`pelton bench` and `pelton profile` on a tiny engine: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pelton.cli import main

SECTIONS = {"engine", "machine", "request_info", "performance", "streaming_metrics", "dataset"}
PERCENTILES = {"average", "minimum", "maximum", "p50", "p90", "p95", "p99"}


def read_page(path: Path) -> ElementTree.Element:
    """A page is well-formed XML but for its doctype, and loads nothing."""
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    assert "prefers-color-scheme: dark" in text
    return ElementTree.fromstring(text.partition("\n")[2])


def check_sections(report: dict[str, Any], requests: int) -> None:
    assert report.keys() >= SECTIONS
    assert report["request_info"]["num_requests"] == report["dataset"]["num_requests"] == requests
    assert report["performance"].keys() >= {
        "total_latency_ms",
        "request_throughput_req_s",
        "system_output_throughput_tok_s",
        "system_total_throughput_tok_s",
        "request_latency_percentiles_ms",
    }
    metrics = report["streaming_metrics"]
    assert metrics["token_output_speed_tok_s"] > 0
    for name in ("ttft_percentiles", "itl_percentiles", "tpot_percentiles", "generation_latency_percentiles"):
        assert metrics[name].keys() == PERCENTILES
        assert 0 < metrics[name]["minimum"] <= metrics[name]["p50"] <= metrics[name]["p99"] <= metrics[name]["maximum"]
    assert report["engine"]["dtype"] == "f32"
    assert report["machine"]["threads"] == 1


def test_latency_of_one_batch(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    sizes = ["--batch-size", "3", "--input_len", "40", "--output-len", "9", "--iterations", "2", "--threads", "1"]
    assert main(["bench", "latency", str(engine), *sizes, *files]) == 0
    out, err = capsys.readouterr()
    assert "run 2 of 2" in err
    for word in ("first token", "between tokens", "prefill", "decode", "of reading", "Python between two steps"):
        assert word in out
    report = json.loads((tmp_path / "a.json").read_bytes())
    check_sections(report, 6)
    assert report["dataset"]["isl_stats"]["p50"] == 40
    assert report["dataset"]["osl_stats"]["average"] == 9
    line = report["roofline"]
    # 120 tokens of prompt in steps of 64: the first two sequences decode before the last one's prompt is through.
    assert line["prefill"]["steps"] == 2
    assert 1 <= line["decode"]["steps"] <= 8
    assert line["decode"]["tokens_per_s"] > 0
    assert 0 < line["prefill"]["share_of_peak"] < 1
    assert 0 < line["python_between_steps_us"] < 1e5
    assert line["roofs"]["compute_peak"] == "fma_f32"
    page = read_page(tmp_path / "a.html")
    assert len(list(page.iter("figure"))) == 3


def test_latency_sweep(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    sizes = ["--batch-size", "1,4", "--input-len", "8", "--output-len", "1,5", "--iterations", "1", "--warmup", "0"]
    assert main(["bench", "latency", str(engine), *sizes, "--threads", "1", "-q", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("roofs beside batch") == 4
    document = json.loads((tmp_path / "a.json").read_bytes())
    assert document.keys() == {"kind", "engine", "machine", "sweep"}
    points = [(p["request_info"]["num_requests"], p["dataset"]["osl_stats"]["p50"]) for p in document["sweep"]]
    assert points == [(1, 1), (1, 5), (4, 1), (4, 5)]
    # One token out: there is a prefill and nothing else.
    alone = document["sweep"][0]
    assert alone["roofline"]["decode"] is None
    assert alone["streaming_metrics"]["itl_percentiles"] is None
    assert len(list(read_page(tmp_path / "a.html").iter("figure"))) == 4


def test_throughput_of_random_requests(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    load = ["--num-requests", "12", "--input-len", "20,5", "--output-len", "6,2", "--concurrency", "3"]
    assert main(["bench", "throughput", str(engine), *load, "--threads", "1", "-q", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "requests/s" in out
    report = json.loads((tmp_path / "a.json").read_bytes())
    check_sections(report, 12)
    assert report["request_info"]["avg_num_concurrent_requests"] <= 3.01
    assert report["dataset"]["source"] == "random, seed 0"
    assert len(list(read_page(tmp_path / "a.html").iter("figure"))) == 4


def test_throughput_of_a_dataset_that_arrives(engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    lines: list[dict[str, Any]] = [
        {"task_id": i, "prompt": "What is gravity?", "output_tokens": 3 + i} for i in range(4)
    ]
    lines.append({"task_id": "last", "input_ids": [5, 6, 7], "output_tokens": 2})
    path.write_text("\n".join(map(json.dumps, lines)))
    run = ["bench", "throughput", str(engine), "--dataset", str(path), "--request-rate", "200", "--threads", "1", "-q"]
    assert main([*run, "--json", str(tmp_path / "a.json")]) == 0
    report = json.loads((tmp_path / "a.json").read_bytes())
    check_sections(report, 5)
    assert report["dataset"]["source"] == str(path)
    assert report["dataset"]["osl_stats"]["maximum"] == 6
    assert main([*run, "--num-requests", "2", "--json", str(tmp_path / "b.json")]) == 0
    assert json.loads((tmp_path / "b.json").read_bytes())["request_info"]["num_requests"] == 2


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_profile(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--trace", str(tmp_path / "a.trace.json")]
    sizes = ["--batch-size", "3", "--input-len", "40", "--steps", "4", "--threads", "1"]
    assert main(["profile", str(engine), "--phase", phase, *sizes, *files]) == 0
    out = capsys.readouterr().out
    assert "by kernel" in out
    assert "model.layers.1" in out
    profile = json.loads((tmp_path / "a.json").read_bytes())
    assert (profile["phase"], profile["turns"]) == (phase, 4)
    kernels, layers, total = profile["kernels"], profile["layers"], profile["total"]
    assert {row["name"] for row in layers} >= {"model.layers.0", "model.layers.1", "lm_head"}
    assert sum(r["launches"] for r in kernels) == sum(r["launches"] for r in layers) == total["launches"]
    assert [r["time_us"] for r in kernels] == sorted((r["time_us"] for r in kernels), reverse=True)
    # Worker 0 is always in a launch, but for the step's beginning and end.
    assert 0 < total["time_us"] <= profile["turn_us"]
    assert profile["outside_launches_us"] == pytest.approx(profile["turn_us"] - total["time_us"], rel=0.5, abs=50)
    assert (profile["python_between_steps_us"] is None) == (phase == "prefill")
    check_trace(tmp_path / "a.trace.json", 8 if phase == "prefill" else 4, total["launches"])


def check_trace(path: Path, steps: int, launches: int) -> None:
    events = json.loads(path.read_bytes())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    whole = [e for e in slices if e["tid"] == 1]
    assert len(whole) == steps
    assert all(e["dur"] >= 0 for e in slices)
    inner = [e for e in slices if e["tid"] == 2]
    assert len(inner) >= steps // 2 * launches // 2
    for event in inner:
        inside = [s for s in whole if s["ts"] <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"]]
        assert len(inside) == 1
    assert {"origin", "flops", "weight_bytes", "launch"} <= inner[0]["args"].keys()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bench", "latency", "{}", "--batch-size", "9"], "batch-size: got 9"),
        (["bench", "latency", "{}", "--batch-size", "0"], "batch-size: got 0"),
        (["bench", "latency", "{}", "--input-len", "1,x"], "several as in"),
        (["bench", "latency", "{}", "--input-len", "200", "--output-len", "100"], "max_seq_len"),
        (["bench", "latency", "{}", "--iterations", "0"], "iterations"),
        (["bench", "latency", "{}", "--max-kv-tokens", "64", "--input-len", "64"], "KV blocks"),
        (["bench", "latency", "{}", "--json", "/nowhere/a.json"], "cannot write /nowhere/a.json"),
        (["bench", "throughput", "{}", "--concurrency", "0"], "concurrency"),
        (["bench", "throughput", "{}", "--request-rate", "-1"], "request-rate"),
        (["bench", "throughput", "{}", "--num-requests", "0"], "number of requests"),
        (["bench", "throughput", "{}", "--input-len", "1,2,3"], "--input-len"),
        (["bench", "throughput", "{}", "--input-len", "300"], "max_seq_len"),
        (["bench", "throughput", "{}", "--dataset", "/nowhere.jsonl"], "cannot be read"),
        (["bench", "throughput", "{}", "--dataset", "a", "--input-len", "4"], "leave --input-len"),
        (["profile", "{}", "--steps", "0"], "steps: got 0"),
        (["profile", "{}", "--batch-size", "100"], "batch-size: got 100"),
        (["profile", "{}", "--trace", "/"], "it is a folder"),
        (["bench", "latency", "/nowhere.engine"], "/nowhere.engine"),
    ],
)
def test_nonsense_is_refused(
    engine: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(engine) for a in arguments]) == 2
    assert message in capsys.readouterr().err
