"""Many requests through the step loop: as fast as it takes them, or as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.errors import RequestError
from .report import Report, engine_info, machine_info
from .session import Session
from .timeline import Timeline, dataset_info, performance, request_info, streaming_metrics
from .workload import Job


@dataclass(frozen=True)
class ThroughputOptions:
    """``concurrency``: most requests at once (None: as many as there are). ``request_rate``: arrivals a second, random
    (Poisson) from ``seed``; None: all at the start. ``warmup``: requests that run before, unmeasured."""

    concurrency: int | None = None
    request_rate: float | None = None
    warmup: int = 2
    seed: int = 0

    def check(self) -> None:
        """Raise RequestError for a number that makes no sense."""
        if self.concurrency is not None and self.concurrency < 1:
            raise RequestError(f"concurrency: got {self.concurrency}; allowed: at least 1")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise RequestError(f"request-rate: got {self.request_rate}; allowed: a number above 0 (requests a second)")
        if self.warmup < 0:
            raise RequestError(f"warmup: got {self.warmup}; allowed: 0 or more")


@dataclass(frozen=True)
class ThroughputResult:
    """``timelines`` in order of arrival; times in seconds from the start."""

    report: Report
    timelines: list[Timeline]


def measure_throughput(
    session: Session,
    jobs: Sequence[Job],
    options: ThroughputOptions,
    source: str,
    progress: Callable[[str], None] = lambda line: None,
) -> ThroughputResult:
    """Run all jobs. RequestError, before anything runs, if the engine cannot serve one of them."""
    options.check()
    for job in jobs:
        try:
            session.loop.scheduler.check_fits(session.request(job).stored_tokens)
        except RequestError as error:
            raise RequestError(f"request {job.task_id}: {error}") from error
    session.run([session.request(job) for job in jobs[: options.warmup]])
    session.recorder.take()
    arrivals = _arrivals(len(jobs), options)
    timelines = _serve(session, jobs, arrivals, options.concurrency or len(jobs), progress)
    seconds = max(t.tokens[-1] for t in timelines) - min(t.arrival for t in timelines)
    report = Report(
        kind="throughput",
        engine=engine_info(session),
        machine=machine_info(session.threads),
        request_info=request_info(timelines, seconds),
        performance=performance(timelines, seconds),
        streaming_metrics=streaming_metrics(timelines),
        dataset=dataset_info(source, timelines),
    )
    return ThroughputResult(report, timelines)


def _arrivals(count: int, options: ThroughputOptions) -> list[float]:
    """Seconds from the start at which each request arrives."""
    if options.request_rate is None:
        return [0.0] * count
    gaps = np.random.default_rng(options.seed).exponential(1 / options.request_rate, count)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]


def _serve(
    session: Session, jobs: Sequence[Job], arrivals: Sequence[float], limit: int, progress: Callable[[str], None]
) -> list[Timeline]:
    """Add each request when it has arrived and there is room, step, and note when tokens come.

    Under a limit alone a request arrives when it is let in; with arrival times, waiting for room counts.
    """
    loop, waits = session.loop, any(arrivals)
    timelines: list[Timeline] = []
    running: dict[str, Timeline] = {}
    start = time.perf_counter()
    reported = start
    while len(timelines) < len(jobs) or running:
        now = time.perf_counter()
        while len(timelines) < len(jobs) and len(running) < limit and arrivals[len(timelines)] <= now - start:
            job = jobs[len(timelines)]
            arrival = arrivals[len(timelines)] if waits else time.perf_counter() - start
            request = session.request(job)
            running[request.request_id] = timeline = Timeline(arrival, job.input_tokens)
            timelines.append(timeline)
            loop.add(request)
        if not loop.has_work:
            time.sleep(max(0.0, arrivals[len(timelines)] - (time.perf_counter() - start)))
            continue
        events = loop.step()
        now = time.perf_counter()
        for event in events:
            running[event.request_id].tokens.append(now - start)
            if event.finish_reason is not None:
                del running[event.request_id]
        if now - reported > 2:
            reported = now
            progress(f"{len(timelines) - len(running)} of {len(jobs)} requests done, {len(running)} running")
    session.recorder.take()
    return timelines
