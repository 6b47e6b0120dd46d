"""Reports as one HTML file each: tables and plots, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from .latency import LatencyResult, summary
from .report import Report, Roofline, moved_text
from .stats import Percentiles
from .svg import Bar, Line, bar_chart, cumulative, line_chart
from .throughput import ThroughputResult

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #59636e; --rule: #d8dee4; --card: #f6f8fa;
  --c0: #0b6bcb; --c1: #c4531a; --c2: #1a7f37; --c3: #8250df; --c4: #b35900; --c5: #bf3989; --roof: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0d1117; --fg: #e6edf3; --soft: #9198a1; --rule: #30363d; --card: #161b22;
    --c0: #58a6ff; --c1: #ff9b6a; --c2: #56d364; --c3: #bc8cff; --c4: #e3b341; --c5: #ff7bca; --roof: #ff7b72; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, figcaption { color: var(--soft); }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--rule); }
td { white-space: nowrap; }
th:first-child, td:first-child, .facts td { text-align: left; }
.facts td { white-space: normal; word-break: break-word; }
.facts td:first-child { white-space: nowrap; } thead th { color: var(--soft); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem;
  align-items: start; }
.wide { overflow-x: auto; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .75rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 13px; }
figure { overflow-x: auto; } figure svg { min-width: 24rem; }
.grid { stroke: var(--rule); stroke-width: 1; } .line { fill: none; stroke-width: 1.75; }
.roof { stroke: var(--roof); stroke-width: 2.5; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
.line { stroke: var(--c); } .dot, .bar { fill: var(--c); } .swatch { background: var(--c); }
.key { display: inline-block; white-space: nowrap; margin-right: 1rem; color: var(--soft); font-size: .85rem; }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .35rem; }
"""


def latency_page(results: Sequence[LatencyResult]) -> str:
    """One page for a latency run or a sweep of them."""
    reports = [result.report for result in results]
    parts = [_head(reports[0], f"{reports[0].engine.model}: latency")]
    parts.append(_table(list(_SWEEP_COLUMNS), [_sweep_row(result) for result in results]))
    parts.append(f'<div class="plots">{"".join(_latency_plots(results))}</div>')
    for result in results:
        options = result.options
        title = f"batch {options.batch_size}, {options.input_len} tokens in, {options.output_len} out"
        parts.append(f"<h2>{escape(title)}</h2>")
        parts.append(_percentile_table(result.report))
        parts.append(_placements(result.report.roofline))
    parts.append(_sections(reports[0]))
    return _page(f"{reports[0].engine.model}: latency", parts)


def throughput_page(result: ThroughputResult) -> str:
    """One page for a throughput run."""
    report = result.report
    p, r = report.performance, report.request_info
    facts = [
        ["requests", str(r.num_requests)],
        ["at once, on average", _number(r.avg_num_concurrent_requests)],
        ["requests/s", _number(p.request_throughput_req_s)],
        ["output tokens/s", _number(p.system_output_throughput_tok_s)],
        ["all tokens/s", _number(p.system_total_throughput_tok_s)],
        ["output tokens/s of one user", _number(p.output_throughput_per_user_tok_s)],
        ["the whole run, s", _number(p.total_latency_ms / 1e3)],
    ]
    parts = [_head(report, f"{report.engine.model}: throughput"), _table(["", ""], facts)]
    parts.append(_percentile_table(report))
    parts.append(f'<div class="plots">{"".join(_throughput_plots(result))}</div>')
    parts.append(_sections(report))
    return _page(f"{report.engine.model}: throughput", parts)


_SWEEP_COLUMNS = (
    "batch",
    "tokens in",
    "tokens out",
    "first token, ms",
    "between tokens, p50, ms",
    "between tokens, p99, ms",
    "prefill, tokens/s",
    "prefill, of peak",
    "decode, tokens/s",
    "decode, of reading",
    "decode, of peak",
    "Python, µs a step",
)


def _sweep_row(result: LatencyResult) -> list[str]:
    s = summary(result)
    return [
        *map(str, (s.batch_size, s.input_len, s.output_len)),
        *map(_number, (s.ttft_ms, s.itl_p50_ms, s.itl_p99_ms)),
        *(_number(s.prefill_tokens_per_s), _percent(s.prefill_share_of_peak)),
        *(_number(s.decode_tokens_per_s), _percent(s.decode_share_of_read), _percent(s.decode_share_of_peak)),
        _number(s.python_us),
    ]


_PLACEMENT_COLUMNS = (
    "CPUs' round trip, ns",
    "runs",
    "reading, GB/s",
    "prefill, tokens/s",
    "prefill, of peak",
    "decode, tokens/s",
    "decode, of reading",
    "decode, of peak",
)


def _placements(line: Roofline | None) -> str:
    """Runs left out as CPUs moved, and rates by placement where there are several."""
    if line is None:
        return ""
    moved = moved_text(line)
    text = f"<p>{escape(moved)}</p>" if moved else ""
    if len(line.placements) < 2:
        return text
    rows = []
    for place in line.placements:
        p, d = place.prefill, place.decode
        cells = [_number(place.core_round_trip_ns), str(place.runs), _number(place.read_gb_s)]
        cells += ["-", "-"] if p is None else [_number(p.tokens_per_s), _percent(p.share_of_peak)]
        cells += (
            ["-"] * 3 if d is None else [_number(d.tokens_per_s), *map(_percent, (d.share_of_read, d.share_of_peak))]
        )
        rows.append(cells)
    return text + _table(_PLACEMENT_COLUMNS, rows)


def _latency_plots(results: Sequence[LatencyResult]) -> list[str]:
    plots = [_roof_bars(results)]
    curves = []
    for result in results:
        options = result.options
        series = [t.itl for run in result.runs for t in run.timelines]
        length = min((len(s) for s in series), default=0)
        middle = [sorted(s[i] for s in series)[len(series) // 2] * 1e3 for i in range(length)]
        name = f"{options.batch_size} x ({options.input_len} + {options.output_len})"
        curves.append((name, middle, [gap * 1e3 for s in series for gap in s]))
    plots.append(
        line_chart(
            "Time to each token after the first (median)",
            [Line(name, list(enumerate(middle, 2))) for name, middle, _ in curves],
            "which output token",
            "time since the one before, ms",
        )
    )
    plots.append(
        line_chart(
            "Times between tokens, cumulative",
            [Line(name, cumulative(gaps)) for name, _, gaps in curves if gaps],
            "time since the token before, ms",
            "% of tokens",
        )
    )
    if len({result.options.batch_size for result in results}) > 1:
        plots.append(_batch_plot(results))
    return plots


def _roof_bars(results: Sequence[LatencyResult]) -> str:
    """Share of the roof that bounds each phase: reading for one sequence's decoding, arithmetic otherwise."""
    bars = []
    for result in results:
        options, roofline = result.options, result.report.roofline
        name = f"{options.batch_size} x ({options.input_len} + {options.output_len})"
        if roofline is not None and roofline.prefill is not None:
            bars.append(Bar(f"prefill, peak: {name}", 100 * roofline.prefill.share_of_peak, 100.0))
        if roofline is not None and roofline.decode is not None:
            decode = roofline.decode
            which = "reading" if decode.share_of_read >= decode.share_of_peak else "peak"
            bars.append(Bar(f"decode, {which}: {name}", 100 * max(decode.share_of_read, decode.share_of_peak), 100.0))
    return bar_chart("Share of the machine's roof (the nearer one for decoding)", bars, "%")


def _batch_plot(results: Sequence[LatencyResult]) -> str:
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for result in results:
        options, roofline = result.options, result.report.roofline
        if roofline is not None and roofline.decode is not None:
            point = (float(options.batch_size), roofline.decode.tokens_per_s)
            groups.setdefault((options.input_len, options.output_len), []).append(point)
    lines = [Line(f"{i} + {o} tokens", sorted(points)) for (i, o), points in groups.items()]
    return line_chart("Decode rate by batch size", lines, "sequences at once", "tokens/s")


def _throughput_plots(result: ThroughputResult) -> list[str]:
    timelines = result.timelines
    moments = sorted(at for t in timelines for at in t.tokens)
    width = max(moments[-1] / 60, 1e-9)
    counts = [0] * 61
    for at in moments:
        counts[min(60, int(at / width))] += 1
    rate = [((i + 0.5) * width, count / width) for i, count in enumerate(counts[:60])]
    changes = sorted([(t.arrival, 1) for t in timelines] + [(t.tokens[-1], -1) for t in timelines])
    running, steps = 0, []
    for at, change in changes:
        running += change
        steps.append((at, float(running)))
    return [
        line_chart("Output tokens a second", [Line("output", rate)], "time since the start, s", "tokens/s"),
        line_chart(
            "Requests that have arrived and not ended",
            [Line("requests", steps, steps=True)],
            "time since the start, s",
            "requests",
        ),
        line_chart(
            "Time to first token, cumulative",
            [Line("requests", cumulative([t.ttft * 1e3 for t in timelines]))],
            "time to first token, ms",
            "% of requests",
        ),
        line_chart(
            "Times between tokens, cumulative",
            [Line("tokens", cumulative([gap * 1e3 for t in timelines for gap in t.itl]))],
            "time since the token before, ms",
            "% of tokens",
        ),
    ]


def _percentile_table(report: Report) -> str:
    metrics = report.streaming_metrics
    rows: list[tuple[str, Percentiles | None]] = [
        ("time to first token, ms", metrics.ttft_percentiles),
        ("between tokens, ms", metrics.itl_percentiles),
        ("per output token, ms", metrics.tpot_percentiles),
        ("generation, ms", metrics.generation_latency_percentiles),
        ("request latency, ms", report.performance.request_latency_percentiles_ms),
        ("tokens/s of one user", metrics.gen_tps_percentiles),
    ]
    columns = ["", "mean", "p50", "p90", "p95", "p99", "least", "most"]
    cells = [
        [name, *(_number(x) for x in (p.average, p.p50, p.p90, p.p95, p.p99, p.minimum, p.maximum))]
        for name, p in rows
        if p is not None
    ]
    return _table(columns, cells)


def _head(report: Report, title: str) -> str:
    engine, machine = report.engine, report.machine
    facts = (
        f"{engine.weight_bytes / 1e6:.1f} MB of weights, products in {engine.dtype}, {engine.backend}; "
        f"{machine.name}, {machine.threads} threads of {machine.cpus} CPUs; pelton {engine.version}"
    )
    return f"<h1>{escape(title)}</h1><p>{escape(facts)}</p>" + _roofs(report.roofline)


def _roofs(roofline: Roofline | None) -> str:
    if roofline is None:
        return ""
    roofs = roofline.roofs
    peaks = "; ".join(
        f"{kind} {rate:.0f} G operations/s ({roofs.instructions.get(kind, '')})"
        for kind, rate in roofs.peaks_gop_s.items()
    )
    trip = f", CPUs' round trip {roofs.core_round_trip_ns:.0f} ns" if roofs.core_round_trip_ns else ""
    text = f"Roofs measured in turns with the runs (medians): reading {roofs.read_gb_s:.1f} GB/s{trip}; {peaks}."
    return f"<p>{escape(text)}</p>"


def _sections(report: Report) -> str:
    """Everything about engine, machine and data, for the record."""
    parts = []
    for name in ("engine", "machine", "request_info", "dataset"):
        section: dict[str, Any] = msgspec.to_builtins(getattr(report, name))
        rows = [_fact(key, value) for key, value in section.items() if not isinstance(value, dict)]
        parts.append(f"<h2>{name.replace('_', ' ')}</h2>{_table(['', ''], rows, 'facts')}")
    return "".join(parts)


#: What a field's name leaves out.
_UNITS = {"avg_input_length": "tokens", "avg_output_length": "tokens", "max_sequence_length": "tokens"}


def _fact(key: str, value: object) -> list[str]:
    """A field's name and value for people: bytes as MB, lengths as tokens."""
    name = key.removesuffix("_bytes").replace("_", " ")
    if key.endswith("_bytes") and isinstance(value, int):
        return [name, f"{value / 1e6:.1f} MB"]
    return [name, f"{_value(value)} {_UNITS.get(key, '')}".rstrip()]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    header = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="wide"><table class="{kind}">{header}<tbody>{body}</tbody></table></div>'


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )
