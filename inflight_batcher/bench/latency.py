"""A fixed batch of sequences of fixed lengths, again and again, in turns with the roofs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...runtime.drivers.cpu.roofs import Roofs, by_placement, median_roofs
from ...runtime.errors import RequestError
from ...runtime.format.dtypes import DType
from .costs import Cost
from .recorder import StepRecord, gaps_us
from .report import PhaseRates, Placement, Report, Roofline, engine_info, machine_info, roof_info
from .session import Session
from .stats import median
from .timeline import Timeline, dataset_info, performance, request_info, streaming_metrics
from .workload import Length, random_jobs


@dataclass(frozen=True)
class LatencyOptions:
    """``iterations`` runs are measured after ``warmup`` that are not; prompts depend on ``seed`` and the run.

    A run in which the CPUs moved is left out and another made, so that there may be twice as many.
    """

    batch_size: int
    input_len: int
    output_len: int
    iterations: int = 5
    warmup: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a number that makes no sense, whatever the engine."""
        if self.iterations < 1 or self.warmup < 0:
            raise RequestError(
                f"iterations {self.iterations}, warmup {self.warmup}; allowed: iterations from 1, warmup from 0"
            )


@dataclass(frozen=True)
class Run:
    """One iteration: the steps, and when each sequence's tokens came (seconds of the performance counter)."""

    start: float
    steps: list[StepRecord]
    timelines: list[Timeline]


@dataclass(frozen=True)
class LatencyResult:
    """``runs``: those that count; see Roofline.moved_runs."""

    options: LatencyOptions
    report: Report
    runs: list[Run]


@dataclass(frozen=True)
class Summary:
    """The numbers of a latency run that fit one row of a table; None where there was nothing to measure."""

    batch_size: int
    input_len: int
    output_len: int
    ttft_ms: float | None = None  # medians, as all times here
    itl_p50_ms: float | None = None
    itl_p90_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    latency_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_gflop_s: float | None = None
    prefill_share_of_peak: float | None = None
    decode_tokens_per_s: float | None = None
    decode_read_gb_s: float | None = None
    decode_share_of_read: float | None = None
    decode_gflop_s: float | None = None
    decode_share_of_peak: float | None = None
    python_us: float | None = None


def summary(result: LatencyResult) -> Summary:
    """A result as one row."""
    options, report = result.options, result.report
    values: dict[str, float | None] = {}
    times = {
        "ttft_ms": report.streaming_metrics.ttft_percentiles,
        "latency_ms": report.performance.request_latency_percentiles_ms,
    }
    values |= {name: p.p50 for name, p in times.items() if p is not None}
    itl = report.streaming_metrics.itl_percentiles
    if itl is not None:
        values |= {f"itl_{name}_ms": getattr(itl, name) for name in ("p50", "p90", "p95", "p99")}
    line = report.roofline
    if line is not None:
        values["python_us"] = line.python_between_steps_us
        for phase, rates in (("prefill", line.prefill), ("decode", line.decode)):
            names = ("tokens_per_s", "gflop_s", "share_of_peak", "read_gb_s", "share_of_read")
            for name in names if phase == "decode" else names[:3]:
                values[f"{phase}_{name}"] = None if rates is None else getattr(rates, name)
    return Summary(options.batch_size, options.input_len, options.output_len, **values)


@dataclass(frozen=True)
class _Phase:
    """A part of a run: what it had to do, and how long it took."""

    seconds: float
    tokens: int
    steps: int
    cost: Cost


@dataclass(frozen=True)
class _Measured:
    """A run, its phases, and the mean of the roofs just before it and after."""

    run: Run
    prefill: _Phase
    decode: _Phase | None
    roofs: Roofs


def measure_latency(
    session: Session, options: LatencyOptions, progress: Callable[[str], None] = lambda line: None
) -> LatencyResult:
    """Run, and hold against the roofs. Raises RequestError if the engine cannot run such a batch."""
    options.check()
    session.check_batch(options.batch_size, options.input_len, options.output_len)
    for index in range(options.warmup):
        run_once(session, options, index)
    measured: list[_Measured] = []
    steady: list[_Measured] = []
    after = session.meter.sample()
    while len(steady) < options.iterations and len(measured) < 2 * options.iterations:
        run = run_once(session, options, options.warmup + len(measured))
        before, after = after, session.meter.sample()
        measured.append(_Measured(run, _prefill(session, run), _decode(session, run), median_roofs([before, after])))
        if before.placed_like(after):
            steady.append(measured[-1])
            first = run.timelines[0].ttft * 1e3
            progress(f"run {len(steady)} of {options.iterations}: first token after {first:.1f} ms")
        else:
            trips = " to ".join(f"{roofs.round_trip * 1e9:.0f}" for roofs in (before, after))
            progress(f"a run is left out: CPUs moved (round trip {trips} ns)")
    if not steady:
        progress("CPUs moved in every run: all count")
    counted = steady or measured
    return LatencyResult(options, _report(session, options, measured, steady), [one.run for one in counted])


def run_once(session: Session, options: LatencyOptions, index: int) -> Run:
    """One batch from nothing to its last token."""
    length, outputs = Length(options.input_len), Length(options.output_len)
    # Other prompts each time: nothing of an earlier run may be found again.
    jobs = random_jobs(options.batch_size, length, outputs, session.plan.vocab_size, options.seed * 1_000_003 + index)
    requests = [session.request(job) for job in jobs]
    loop = session.loop
    session.recorder.take()
    start = time.perf_counter()
    timelines = {request.request_id: Timeline(start, options.input_len) for request in requests}
    for request in requests:
        loop.add(request)
    while loop.has_work:
        events = loop.step()
        now = time.perf_counter()
        for event in events:
            timelines[event.request_id].tokens.append(now)
    return Run(start, session.recorder.take(), list(timelines.values()))


def _prefill(session: Session, run: Run) -> _Phase:
    """All steps up to the one that gave the last sequence its first token."""
    end = max(t.tokens[0] for t in run.timelines)
    steps = [record for record in run.steps if record.end / 1e9 <= end]
    tokens = sum(t.input_tokens for t in run.timelines)
    return _Phase(end - run.start, tokens, len(steps), _total(session, steps))


def decode_steps(run: Run) -> list[StepRecord]:
    """The steps in which every sequence of the batch takes one more token; the first, of the prompt, is none."""
    size = len(run.timelines)
    return [r for r in run.steps if r.decodes_only and len(r.shape.counts) == size and min(r.shape.starts) > 0]


def _decode(session: Session, run: Run) -> _Phase | None:
    """From the end of the step before the decoding to the end of its last step."""
    steps = decode_steps(run)
    if not steps:
        return None
    before = run.steps[run.steps.index(steps[0]) - 1]
    seconds = (steps[-1].end - before.end) / 1e9
    return _Phase(seconds, len(steps) * len(run.timelines), len(steps), _total(session, steps))


def _total(session: Session, steps: Sequence[StepRecord]) -> Cost:
    return sum((session.costs.step(record.shape) for record in steps), Cost())


def _rates(phases: Sequence[tuple[_Phase | None, Roofs]], compute: DType) -> PhaseRates | None:
    """Medians over runs, each beside its own roofs."""
    there = [(phase, roofs) for phase, roofs in phases if phase is not None and phase.seconds > 0]
    if not there:
        return None
    reads = [phase.cost.read_bytes / phase.seconds for phase, _ in there]
    flops = [phase.cost.flops / phase.seconds for phase, _ in there]
    peaks = [roofs.peak_of(compute)[1] for _, roofs in there]
    return PhaseRates(
        steps=there[0][0].steps,
        tokens_per_s=statistics.median(phase.tokens / phase.seconds for phase, _ in there),
        read_gb_s=statistics.median(reads) / 1e9,
        gflop_s=statistics.median(flops) / 1e9,
        share_of_read=statistics.median(x / roofs.read for x, (_, roofs) in zip(reads, there, strict=True)),
        share_of_peak=statistics.median(x / peak if peak else 0.0 for x, peak in zip(flops, peaks, strict=True)),
    )


def _by_phase(runs: Sequence[_Measured], compute: DType) -> dict[str, PhaseRates | None]:
    """Fields of Roofline and Placement."""
    return {
        "prefill": _rates([(one.prefill, one.roofs) for one in runs], compute),
        "decode": _rates([(one.decode, one.roofs) for one in runs], compute),
    }


def _placements(steady: Sequence[_Measured], compute: DType) -> tuple[Placement, ...]:
    """Runs with like round trips together, nearest CPUs first."""
    result = []
    for group in by_placement(steady, lambda one: one.roofs):
        roofs = median_roofs([one.roofs for one in group])
        result.append(
            Placement(
                core_round_trip_ns=roofs.round_trip * 1e9,
                runs=len(group),
                read_gb_s=roofs.read / 1e9,
                **_by_phase(group, compute),
            )
        )
    return tuple(result)


def _report(session: Session, options: LatencyOptions, measured: list[_Measured], steady: list[_Measured]) -> Report:
    counted, compute = steady or measured, session.compute
    runs = [one.run for one in counted]
    timelines = [timeline for run in runs for timeline in run.timelines]
    # Between runs the roofs were measured: only the runs themselves count.
    seconds = sum(max(t.tokens[-1] for t in run.timelines) - run.start for run in runs)
    roofs = median_roofs([one.roofs for one in counted])
    roofline = Roofline(
        **_by_phase(counted, compute),
        python_between_steps_us=median([gap for run in runs for gap in gaps_us(decode_steps(run))]),
        roofs=roof_info(roofs, roofs.peak_of(compute)[0]),
        moved_runs=len(measured) - len(steady),
        placements=_placements(steady, compute),
    )
    return Report(
        kind="latency",
        engine=engine_info(session),
        machine=machine_info(session.threads),
        request_info=request_info(timelines, seconds),
        performance=performance(timelines, seconds),
        streaming_metrics=streaming_metrics(timelines),
        dataset=dataset_info(f"random, seed {options.seed}", timelines),
        roofline=roofline,
    )
