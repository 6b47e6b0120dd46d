"""Where a step's time goes: by kernel and by layer, beside the roofs."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...runtime.drivers.cpu.roofs import Roofs, median_roofs
from ...runtime.errors import RequestError
from .costs import Cost
from .recorder import StepRecord, gaps_us
from .report import EngineInfo, MachineInfo, RoofInfo, engine_info, machine_info, roof_info
from .session import Session
from .stats import median
from .workload import Length, random_jobs

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class ProfileOptions:
    """``steps``: measured decode steps, or prefills of the whole batch. One more of each runs before, unmeasured."""

    phase: Phase
    batch_size: int = 1
    input_len: int = 128
    steps: int = 10
    seed: int = 0


@dataclass(frozen=True)
class TimedStep:
    """A step and its launches [n, 5]: launch, row_start, begin, kernel end, end (ns of the monotonic clock, worker 0).

    ``turn``: which repetition it belongs to; steps of one turn add up (a long prompt takes several steps).
    """

    turn: int
    record: StepRecord
    timings: NDArray[np.int64]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Launches that belong together. Times are of one turn (a decode step, or a prefill of the batch), on worker 0."""

    name: str
    launches: int
    time_us: float  # kernel and waiting
    wait_us: float  # at the barrier after it: imbalance, and meeting itself
    share: float  # of the turn
    read_gb_s: float  # weights and K/V
    activation_gb_s: float
    gflop_s: float
    share_of_read: float
    share_of_peak: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineInfo
    machine: MachineInfo
    roofs: RoofInfo
    phase: str
    batch_size: int
    input_len: int
    turns: int
    turn_us: float  # median time inside the driver
    outside_launches_us: float  # of it: checks, results, waking the team
    python_between_steps_us: float | None
    kernels: tuple[Row, ...]  # longest first
    layers: tuple[Row, ...]  # in the plan's order
    total: Row


def measure_profile(session: Session, options: ProfileOptions) -> tuple[Profile, list[TimedStep]]:
    """Time every launch. Raises RequestError if the engine cannot run such a batch."""
    if options.steps < 1:
        raise RequestError(f"steps: got {options.steps}; allowed: at least 1")
    decode = options.phase == "decode"
    # The first token comes from the prefill; one decode step warms up.
    outputs = options.steps + 2 if decode else 1
    session.check_batch(options.batch_size, options.input_len, outputs)
    roofs = [session.meter.sample()]
    try:
        steps = (_decode if decode else _prefill)(session, options, roofs)
    finally:
        session.driver.set_timing(False)
        session.driver.take_timings()
    roofs.append(session.meter.sample())
    return _summary(session, options, steps, roofs), steps


def _decode(session: Session, options: ProfileOptions, roofs: list[Roofs]) -> list[TimedStep]:
    # Sequences that were prefilled first have more tokens by the time the last one starts; all must last to the end.
    tokens = options.batch_size * options.input_len
    prompts_a_step = max(1, session.loop.scheduler.config.max_num_tokens - options.batch_size)
    outputs = options.steps + 3 + -(-tokens // prompts_a_step)
    session.check_batch(options.batch_size, options.input_len, outputs)
    jobs = random_jobs(
        options.batch_size, Length(options.input_len), Length(outputs), session.plan.vocab_size, options.seed
    )
    steps: list[TimedStep] = []
    warm: list[StepRecord] = []
    # Now and then the roofs again, as the machine drifts; seldom, as the step after them finds the team asleep.
    turn = max(4, options.steps // 5)

    def after_step() -> None:
        record = session.recorder.take()[-1]
        if len(record.shape.counts) != options.batch_size or not record.decodes_only or min(record.shape.starts) == 0:
            return
        if warm and len(steps) < options.steps:
            steps.append(TimedStep(len(steps), record, session.driver.take_timings()))
            if len(steps) % turn == 0:
                roofs.append(session.meter.sample())
        if not warm:
            session.driver.set_timing(True)
            warm.append(record)

    session.recorder.take()
    session.run([session.request(job) for job in jobs], after_step)
    if len(steps) < options.steps:
        raise RequestError(
            f"only {len(steps)} steps in which all {options.batch_size} sequences decode; ask for a smaller batch"
        )
    return steps


def _prefill(session: Session, options: ProfileOptions, roofs: list[Roofs]) -> list[TimedStep]:
    steps: list[TimedStep] = []
    for turn in range(options.steps + 1):
        jobs = random_jobs(
            options.batch_size, Length(options.input_len), Length(1), session.plan.vocab_size, options.seed + turn
        )
        session.recorder.take()
        session.driver.set_timing(turn > 0)

        def after_step(turn: int = turn) -> None:
            record = session.recorder.take()[-1]
            if turn > 0:
                steps.append(TimedStep(turn - 1, record, session.driver.take_timings()))

        session.run([session.request(job) for job in jobs], after_step)
        roofs.append(session.meter.sample())
    return steps


def layer_of(origin: str) -> str:
    """The layer that a module path lies in ("model.layers.3.mlp.up" -> "model.layers.3"), or the path itself."""
    match = re.match(r"(.*?\.\d+)(?:\.|$)", origin)
    return match[1] if match else origin or "(step)"


class _Sums:
    """Times and costs that belong to one row, by turn."""

    def __init__(self, turns: int) -> None:
        self.time = np.zeros(turns)
        self.wait = np.zeros(turns)
        self.launches = np.zeros(turns, np.int64)
        self.cost = [Cost() for _ in range(turns)]

    def add(self, turn: int, time: int, wait: int, cost: Cost) -> None:
        self.time[turn] += time
        self.wait[turn] += wait
        self.launches[turn] += 1
        self.cost[turn] += cost

    def row(self, name: str, turn_ns: float, read_roof: float, peak_roof: float) -> Row:
        """Medians over the turns; rates from each turn's own time."""

        def rate(of: Callable[[Cost], int]) -> float:
            pairs = zip(self.cost, self.time.tolist(), strict=True)
            return statistics.median(of(cost) / time if time > 0 else 0.0 for cost, time in pairs)

        read, flops = rate(lambda c: c.read_bytes), rate(lambda c: c.flops)
        return Row(
            name=name,
            launches=int(np.median(self.launches)),
            time_us=float(np.median(self.time)) / 1e3,
            wait_us=float(np.median(self.wait)) / 1e3,
            share=float(np.median(self.time)) / turn_ns,
            read_gb_s=read,
            activation_gb_s=rate(lambda c: c.activation_bytes),
            gflop_s=flops,
            share_of_read=read / read_roof if read_roof else 0.0,
            share_of_peak=flops / peak_roof if peak_roof else 0.0,
        )


def _summary(
    session: Session, options: ProfileOptions, steps: Sequence[TimedStep], samples: Sequence[Roofs]
) -> Profile:
    plan = session.plan
    roofs = roof_info(median_roofs(samples), samples[0].peak_of(session.compute)[0])
    turns = 1 + max(step.turn for step in steps)
    kernels: dict[str, _Sums] = defaultdict(lambda: _Sums(turns))
    layers: dict[str, _Sums] = defaultdict(lambda: _Sums(turns))
    total = _Sums(turns)
    inside = np.zeros(turns)
    for step in steps:
        inside[step.turn] += step.record.end - step.record.begin
        for launch, row_start, begin, kernel_end, end in step.timings.tolist():
            cost = session.costs.launch(launch, step.record.shape, row_start)
            for sums in (kernels[kernel_label(session, launch)], layers[layer_of(plan.launches[launch].origin)], total):
                sums.add(step.turn, end - begin, end - kernel_end, cost)
    turn_ns = float(np.median(inside))
    limits = (turn_ns, roofs.read_gb_s, roofs.peaks_gop_s.get(roofs.compute_peak, 0.0))
    rows = [sums.row(name, *limits) for name, sums in kernels.items()]
    return Profile(
        engine=engine_info(session),
        machine=machine_info(session.threads),
        roofs=roofs,
        phase=options.phase,
        batch_size=options.batch_size,
        input_len=options.input_len,
        turns=turns,
        turn_us=turn_ns / 1e3,
        outside_launches_us=float(np.median(inside - total.time)) / 1e3,
        python_between_steps_us=median(gaps_us([step.record for step in steps])) if options.phase == "decode" else None,
        kernels=tuple(sorted(rows, key=lambda row: -row.time_us)),
        layers=tuple(sums.row(name, *limits) for name, sums in layers.items()),
        total=total.row("all launches", *limits),
    )


def kernel_label(session: Session, launch: int) -> str:
    """A kernel with the module that it computes, layer numbers left out: "cpu.gemm: mlp.down_proj"."""
    plan = session.plan
    spec, origin = plan.kernels[plan.launches[launch].kernel], plan.launches[launch].origin
    inner = origin.removeprefix(layer_of(origin)).lstrip(".") or origin
    return f"{spec.kernel}: {inner}" if inner else spec.kernel
