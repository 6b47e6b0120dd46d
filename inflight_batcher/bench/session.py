"""An engine opened for measuring: its driver recorded, its roofs at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ...runtime.drivers.cpu.driver import CpuDriver
from ...runtime.drivers.cpu.host import select_target
from ...runtime.drivers.cpu.roofs import RoofMeter
from ...runtime.errors import DriverError, RequestError
from ...runtime.format.engine_reader import EngineFile
from ...runtime.format.plan import Plan
from ..llm import LLM
from ..loading import load_engine
from ..request import Request, make_request
from ..sampling_params import SamplingParams
from ..scheduler import SchedulerConfig
from ..step_loop import StepLoop
from .costs import CostModel, main_compute
from .recorder import RecordingDriver
from .workload import Job


class Session:
    """Opens an engine file, checks and moves its weights (which in the background would disturb), records every step.

    threads: of the driver and of the roofs. max_kv_tokens: size of the KV cache; None as for serving.
    roof_bytes: see RoofMeter. Raises what LLM raises.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None = None,
        max_kv_tokens: int | None = None,
        scheduler: SchedulerConfig | None = None,
        roof_bytes: int | None = None,
    ) -> None:
        self.path = path
        parts = load_engine(
            path, threads=threads, weights="copy", trust="any", verify_weights="before", public_key=None
        )
        driver = parts.driver
        # Of the native core, so that the driver's own Python counts as Python.
        span = (lambda: driver.last_span) if isinstance(driver, CpuDriver) else None
        self.recorder = RecordingDriver(driver, span)
        parts.driver = self.recorder
        # On failure the LLM closes the parts.
        self.llm = LLM(parts, max_kv_tokens=max_kv_tokens, scheduler=scheduler)
        try:
            if not isinstance(driver, CpuDriver) or not isinstance(parts.opened, EngineFile):
                raise DriverError("benchmarks measure the cpu driver only; choose an engine with a cpu target")
            self.driver: CpuDriver = driver
            self.engine: EngineFile = parts.opened
            self.threads = driver.threads
            self.target = select_target(parts.opened.manifest.targets).key
            self.plan: Plan = driver.plan
            self.costs = CostModel(self.plan)
            self.compute = main_compute(self.plan)
            self.meter = RoofMeter(self.threads, read_bytes=roof_bytes)
            self._parts = parts
        except BaseException:
            self.llm.close()
            raise
        self._count = 0

    @property
    def encode(self) -> Callable[[str], list[int]] | None:
        """The engine's tokenizer, if it has one."""
        tokenizer = self._parts.text()
        return None if tokenizer is None else tokenizer.encode

    @property
    def loop(self) -> StepLoop:
        return self.llm.loop

    def request(self, job: Job, *, arrival: float | None = None) -> Request:
        """A greedy request of exactly ``output_tokens`` tokens; RequestError if the engine cannot serve it."""
        self._count += 1
        # Text is left out: what is measured is the same for engines with a tokenizer and without.
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True, detokenize=False)
        request = make_request(f"bench-{self._count}", job.token_ids, params, self.plan.ranges, self.plan.vocab_size)
        if arrival is not None:
            request.metrics.arrival = arrival
        return request

    def check_batch(self, batch_size: int, input_len: int, output_len: int) -> None:
        """Raise RequestError unless so many sequences of these lengths can run at once."""
        for name, value in (("batch-size", batch_size), ("input-len", input_len), ("output-len", output_len)):
            if value < 1:
                raise RequestError(f"{name}: got {value}; allowed: at least 1")
        scheduler = self.loop.scheduler
        if batch_size > scheduler.config.max_batch_size:
            raise RequestError(
                f"batch-size: got {batch_size}; this engine was built for at most {scheduler.config.max_batch_size}. "
                f"Rebuild it with --max-batch-size {batch_size}"
            )
        request = self.request(Job(0, np.zeros(input_len, np.int32), output_len))
        for group, need in zip(scheduler.kv.groups, scheduler.kv.peak(request.stored_tokens), strict=True):
            if batch_size * need > group.pool.num_blocks:
                raise RequestError(
                    f"{batch_size} sequences of {input_len} + {output_len} tokens need {batch_size * need} KV blocks "
                    f"at once, but the pool has {group.pool.num_blocks}; give it more (--max-kv-tokens) or ask for less"
                )

    def run(self, requests: list[Request], after_step: Callable[[], Any] | None = None) -> None:
        """Add requests and step until all have ended; ``after_step`` is called after each step."""
        for request in requests:
            self.loop.add(request)
        while self.loop.has_work:
            self.loop.step()
            if after_step is not None:
                after_step()

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
