"""`pelton bench`: how fast an engine is here, beside what this machine can do."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import RequestError
from .measuring import check_outputs, number, percent, progress, roof_text, write

if TYPE_CHECKING:
    from ..inflight_batcher.bench.latency import LatencyResult, Summary
    from ..inflight_batcher.bench.report import Placement, Report
    from ..inflight_batcher.bench.session import Session
    from ..inflight_batcher.bench.workload import Job

HELP = "Measure latency or throughput of an engine, beside what this machine can do."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    text = "A fixed batch of random prompts, again and again, in turns with the machine's roofs."
    latency = kinds.add_parser("latency", help=text, description=text, allow_abbrev=False)
    latency.add_argument("engine", type=Path, help="engine file")
    latency.add_argument("--batch-size", default="1", metavar="N[,N...]", help="sequences at once (default 1)")
    latency.add_argument("--input-len", default="128", metavar="N[,N...]", help="prompt tokens (default 128)")
    latency.add_argument("--output-len", default="64", metavar="N[,N...]", help="tokens to generate (default 64)")
    latency.add_argument("--iterations", type=int, default=5, metavar="N", help="measured runs (default 5)")
    latency.add_argument("--warmup", type=int, default=1, metavar="N", help="runs before, unmeasured (default 1)")
    _common(latency)
    text = "Many requests through the step loop: from a dataset, or random."
    throughput = kinds.add_parser("throughput", help=text, description=text, allow_abbrev=False)
    throughput.add_argument("engine", type=Path, help="engine file")
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
    _print_throughput(result.report)
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
    from ..inflight_batcher.bench.report import moved_text
    from .console import print_line, print_table, stdout_console

    console, name = stdout_console(), results[0].report.engine.model
    counts = sorted({len(result.runs) for result in results})
    runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if len(results) > 1:
        rows = [_sweep_row(summary) for summary in _summaries(results)]
        print_table(console, f"{name}: latency, medians of {runs} runs", _SWEEP_COLUMNS, rows, numbers=True)
    for result in results:
        options, line = result.options, result.report.roofline
        point = f"batch {options.batch_size}, {options.input_len} tokens in, {options.output_len} out"
        if len(results) == 1:
            rows = _times(result.report)
            print_table(console, f"{name}: {point}, {runs} runs", _TIME_COLUMNS, rows, numbers=True)
            (summary,) = _summaries(results)
            print_table(console, "rates, beside the roofs", _RATE_COLUMNS, _rates(summary), numbers=True)
            print_line(console, f"Python between two steps: {number(summary.python_us)} µs")
        if line is not None:
            print_line(console, f"roofs beside {point}: {roof_text(line.roofs)}")
            if moved := moved_text(line):
                print_line(console, moved)
            if len(line.placements) > 1:
                rows = [_placement_row(place) for place in line.placements]
                print_table(console, "by where the CPUs were", _PLACEMENT_COLUMNS, rows, numbers=True)


def _summaries(results: Sequence[LatencyResult]) -> list[Summary]:
    from ..inflight_batcher.bench.latency import summary

    return [summary(result) for result in results]


_TIME_COLUMNS = ("ms", "mean", "p50", "p90", "p95", "p99", "most")
_RATE_COLUMNS = ("", "tokens/s", "GB/s", "of reading", "GFLOP/s", "of peak")
_SWEEP_COLUMNS = (
    "batch", "in", "out", "first token ms", "itl p50 ms", "p90", "p95", "p99", "request ms",
    "prefill tokens/s", "GFLOP/s", "of peak", "decode tokens/s", "GB/s", "of reading", "GFLOP/s", "of peak",
    "Python µs",
)  # fmt: skip
_PLACEMENT_COLUMNS = (
    "CPUs' round trip", "runs", "reading GB/s", "prefill tokens/s", "of peak", "decode tokens/s", "of reading",
    "of peak",
)  # fmt: skip


def _sweep_row(s: Summary) -> list[str]:
    cells: list[Any] = [s.batch_size, s.input_len, s.output_len, s.ttft_ms]
    cells += [s.itl_p50_ms, s.itl_p90_ms, s.itl_p95_ms, s.itl_p99_ms, s.latency_ms]
    cells += [s.prefill_tokens_per_s, s.prefill_gflop_s, percent(s.prefill_share_of_peak)]
    cells += [s.decode_tokens_per_s, s.decode_read_gb_s, percent(s.decode_share_of_read)]
    return [*map(number, [*cells, s.decode_gflop_s, percent(s.decode_share_of_peak), s.python_us])]


def _rates(s: Summary) -> list[list[str]]:
    prefill = [s.prefill_tokens_per_s, None, None, s.prefill_gflop_s, percent(s.prefill_share_of_peak)]
    decode = [s.decode_tokens_per_s, s.decode_read_gb_s, percent(s.decode_share_of_read)]
    decode += [s.decode_gflop_s, percent(s.decode_share_of_peak)]
    return [["prefill", *map(number, prefill)], ["decode", *map(number, decode)]]


def _placement_row(place: Placement) -> list[str]:
    prefill, decode = place.prefill, place.decode
    cells: list[Any] = [place.runs, place.read_gb_s]
    cells += [None] * 2 if prefill is None else [prefill.tokens_per_s, percent(prefill.share_of_peak)]
    cells += [None] * 3 if decode is None else [
        decode.tokens_per_s, percent(decode.share_of_read), percent(decode.share_of_peak)
    ]  # fmt: skip
    return [f"{place.core_round_trip_ns:.0f} ns", *map(number, cells)]


def _times(report: Report) -> list[list[str]]:
    """Percentiles of token and request times."""
    metrics = report.streaming_metrics
    rows = (
        ("first token", metrics.ttft_percentiles),
        ("between tokens", metrics.itl_percentiles),
        ("request", report.performance.request_latency_percentiles_ms),
    )
    return [
        [name, *map(number, (p.average, p.p50, p.p90, p.p95, p.p99, p.maximum))] for name, p in rows if p is not None
    ]


def _print_throughput(report: Report) -> None:
    from .console import print_table, stdout_console

    speed, info = report.performance, report.request_info
    rows: list[tuple[str, float]] = [
        ("requests/s", speed.request_throughput_req_s),
        ("output tokens/s", speed.system_output_throughput_tok_s),
        ("all tokens/s", speed.system_total_throughput_tok_s),
        ("output tokens/s of one user", speed.output_throughput_per_user_tok_s),
        ("requests at once, on average", info.avg_num_concurrent_requests),
        ("input tokens, on average", info.avg_input_length),
        ("output tokens, on average", info.avg_output_length),
        ("whole run, s", speed.total_latency_ms / 1e3),
    ]
    console = stdout_console()
    title = f"{report.engine.model}: throughput, {info.num_requests} requests"
    print_table(console, title, ("", "value"), [(name, number(value)) for name, value in rows], numbers=True)
    print_table(console, "times", _TIME_COLUMNS, _times(report), numbers=True)
