"""`pelton bench`: how fast an engine is here, beside what this machine can do."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import RequestError

if TYPE_CHECKING:
    from ..inflight_batcher.bench.latency import LatencyResult
    from ..inflight_batcher.bench.report import RoofInfo
    from ..inflight_batcher.bench.session import Session
    from ..inflight_batcher.bench.throughput import ThroughputResult
    from ..inflight_batcher.bench.workload import Job

HELP = "Measure latency or throughput of an engine, beside what this machine can do."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    text = "A fixed batch of random prompts, again and again, in turns with the machine's roofs."
    latency = kinds.add_parser("latency", help=text, description=text, allow_abbrev=False)
    latency.add_argument("engine", type=Path)
    latency.add_argument("--batch-size", default="1", metavar="N[,N...]", help="sequences at once (default 1)")
    latency.add_argument("--input-len", default="128", metavar="N[,N...]", help="prompt tokens (default 128)")
    latency.add_argument("--output-len", default="64", metavar="N[,N...]", help="tokens to generate (default 64)")
    latency.add_argument("--iterations", type=int, default=5, metavar="N", help="measured runs (default 5)")
    latency.add_argument("--warmup", type=int, default=1, metavar="N", help="runs before, unmeasured (default 1)")
    _common(latency)
    text = "Many requests through the step loop: from a dataset, or random."
    throughput = kinds.add_parser("throughput", help=text, description=text, allow_abbrev=False)
    throughput.add_argument("engine", type=Path)
    source = throughput.add_argument_group("requests (default: 64 random ones of 128 and 64 tokens)")
    source.add_argument(
        "--dataset", type=Path, metavar="FILE", help="JSON lines: task_id, prompt or input_ids, output_tokens"
    )
    source.add_argument("--num-requests", type=int, metavar="N", help="random requests, or how many of the dataset's")
    source.add_argument("--input-len", metavar="MEAN[,DEV]", help="prompt tokens: mean, standard deviation")
    source.add_argument("--output-len", metavar="MEAN[,DEV]", help="tokens to generate")
    load = throughput.add_argument_group("load")
    load.add_argument("--concurrency", type=int, metavar="N", help="most requests at once (default: all)")
    load.add_argument(
        "--request-rate", type=float, metavar="X", help="random arrivals a second (default: all at the start)"
    )
    throughput.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="requests before, unmeasured (default 2)"
    )
    _common(throughput)  # fmt: skip


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="default: the CPUs this process may use")
    parser.add_argument("--max-kv-tokens", type=int, metavar="N", help="size of the KV cache")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report with plots")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def execute(arguments: argparse.Namespace) -> int:
    check_outputs(arguments.json, arguments.html)
    return _latency(arguments) if arguments.kind == "latency" else _throughput(arguments)


def _latency(arguments: argparse.Namespace) -> int:
    from ..inflight_batcher.bench.html import latency_page
    from ..inflight_batcher.bench.latency import LatencyOptions, measure_latency
    from ..inflight_batcher.bench.report import sweep_document, to_json

    lists = [_numbers(name, getattr(arguments, name.replace("-", "_")))
             for name in ("batch-size", "input-len", "output-len")]  # fmt: skip
    points = [
        LatencyOptions(batch, inputs, outputs, arguments.iterations, arguments.warmup, arguments.seed)
        for batch, inputs, outputs in itertools.product(*lists)
    ]
    with _session(arguments) as session:
        for point in points:
            point.check()
            session.check_batch(point.batch_size, point.input_len, point.output_len)
        results = []
        for point in points:
            say = progress(arguments.quiet, f"batch {point.batch_size}, {point.input_len}+{point.output_len}: ")
            results.append(measure_latency(session, point, say))
    _print_latency(results)
    write(arguments.json, lambda: to_json(sweep_document([result.report for result in results])))
    write(arguments.html, lambda: latency_page(results).encode())
    return 0


def _throughput(arguments: argparse.Namespace) -> int:
    from ..inflight_batcher.bench.html import throughput_page
    from ..inflight_batcher.bench.report import to_json
    from ..inflight_batcher.bench.throughput import ThroughputOptions, measure_throughput

    options = ThroughputOptions(arguments.concurrency, arguments.request_rate, arguments.warmup, arguments.seed)
    options.check()
    with _session(arguments) as session:
        jobs, source = _jobs(arguments, session)
        result = measure_throughput(session, jobs, options, source, progress(arguments.quiet, ""))
    _print_throughput(result)
    write(arguments.json, lambda: to_json(result.report))
    write(arguments.html, lambda: throughput_page(result).encode())
    return 0


def _session(arguments: argparse.Namespace) -> Session:
    from ..inflight_batcher.bench.session import Session

    return Session(arguments.engine, threads=arguments.threads, max_kv_tokens=arguments.max_kv_tokens)


def _jobs(arguments: argparse.Namespace, session: Session) -> tuple[list[Job], str]:
    """The requests, and where they come from."""
    from ..inflight_batcher.bench.workload import Length, random_jobs, read_dataset

    count = arguments.num_requests
    if arguments.dataset is not None:
        if arguments.input_len is not None or arguments.output_len is not None:
            raise RequestError("--dataset has the lengths: leave --input-len and --output-len out")
        if count is not None and count < 1:
            raise RequestError(f"--num-requests: got {count}; allowed: at least 1")
        return read_dataset(arguments.dataset, session.encode)[:count], str(arguments.dataset)
    inputs = Length.parse(arguments.input_len or "128", "--input-len")
    outputs = Length.parse(arguments.output_len or "64", "--output-len")
    jobs = random_jobs(64 if count is None else count, inputs, outputs, session.plan.vocab_size, arguments.seed)
    return jobs, f"random, seed {arguments.seed}"


def _numbers(name: str, text: str) -> list[int]:
    """A list of whole numbers, as in 1,8,64."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--{name}: got {text!r}; allowed: a number, or several as in 1,8,64") from None
    return values


def _print_latency(results: Sequence[LatencyResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..inflight_batcher.bench.latency import summary

    first = results[0].report
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{first.engine.model}: latency, medians of {results[0].options.iterations} runs")
    for column in (
        "batch", "in", "out", "first token ms", "itl p50 ms", "p90", "p95", "p99", "e2e ms",
        "prefill tok/s", "GFLOP/s", "of peak", "decode tok/s", "GB/s", "of read", "GFLOP/s", "of peak", "Python µs",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for s in map(summary, results):
        cells: list[Any] = [s.batch_size, s.input_len, s.output_len, s.ttft_ms]
        cells += [s.itl_p50_ms, s.itl_p90_ms, s.itl_p95_ms, s.itl_p99_ms, s.latency_ms]
        cells += [s.prefill_tokens_per_s, s.prefill_gflop_s, percent(s.prefill_share_of_peak)]
        cells += [s.decode_tokens_per_s, s.decode_read_gb_s, percent(s.decode_share_of_read)]
        cells += [s.decode_gflop_s, percent(s.decode_share_of_peak), s.python_us]
        table.add_row(*map(number, cells))
    console.print(table)
    for result in results:
        line, options = result.report.roofline, result.options
        if line is not None:
            where = f"beside batch {options.batch_size}, {options.input_len}+{options.output_len}"
            console.print(f"roofs {where}: {roof_text(line.roofs)}")


def _print_throughput(result: ThroughputResult) -> None:
    from rich.console import Console
    from rich.table import Table

    report = result.report
    speed, info, metrics = report.performance, report.request_info, report.streaming_metrics
    table = Table(title=f"{report.engine.model}: throughput, {info.num_requests} requests", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("requests/s", speed.request_throughput_req_s),
        ("output tokens/s", speed.system_output_throughput_tok_s),
        ("all tokens/s", speed.system_total_throughput_tok_s),
        ("output tokens/s of one user", speed.output_throughput_per_user_tok_s),
        ("requests at once, on average", info.avg_num_concurrent_requests),
        ("input, output tokens on average", f"{info.avg_input_length:.1f}, {info.avg_output_length:.1f}"),
        ("whole run, s", speed.total_latency_ms / 1e3),
    ):
        table.add_row(name, number(value))
    console = Console()
    console.print(table)
    table = Table()
    for column in ("ms", "mean", "p50", "p90", "p95", "p99", "most"):
        table.add_column(column, justify="right")
    for name, p in (
        ("first token", metrics.ttft_percentiles),
        ("between tokens", metrics.itl_percentiles),
        ("request", speed.request_latency_percentiles_ms),
    ):
        if p is not None:
            table.add_row(name, *map(number, (p.average, p.p50, p.p90, p.p95, p.p99, p.maximum)))
    console.print(table)


# --- shared with `pelton profile` ---


def progress(quiet: bool, prefix: str) -> Any:
    """A function that says one line on standard error, or nothing."""
    return (lambda line: None) if quiet else (lambda line: print(f"{prefix}{line}", file=sys.stderr, flush=True))


def check_outputs(*paths: Path | None) -> None:
    """Raise RequestError for a file that could not be written, before anything is measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise RequestError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}"
            )


def write(path: Path | None, content: Any) -> None:
    """Write what ``content()`` gives, if a path was given; RequestError when it cannot be written."""
    if path is None:
        return
    data = content()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error


def roof_text(roofs: RoofInfo) -> str:
    """The roofs in a line."""
    peaks = ", ".join(f"{kind} {rate:.0f}" for kind, rate in roofs.peaks_gop_s.items())
    against = roofs.compute_peak or "none"
    return f"reading {roofs.read_gb_s:.1f} GB/s; G operations/s: {peaks} (products held against {against})"


def number(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def percent(value: float | None) -> str | None:
    """A share as a cell."""
    return None if value is None else f"{100 * value:.1f} %"
