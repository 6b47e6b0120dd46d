"""The CPU driver: binds a launch plan to memory and code, and runs it in the native core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...._core import MAX_WORKERS, CodeObject, NativeError, Region, Runner, Team, request_tile_permission
from ...errors import DriverError
from ...format.manifest import TargetEntry
from ...format.plan import Launch, Operand, Plan
from ...step import FinishedStep, StepInputs
from ..base import check_allocation, empty_outputs
from .binding import EngineSections, block_bytes, check_states, limits, native_errors, state_bytes
from .nearby import memory_of
from .threads import CLAIMS, cpu_list, default_threads
from .weights import WeightPlace, Weights, place_weights

#: Argument kinds of the native runner (cpp/runtime/runner.h): an address, or _INPUT + index in STEP_INPUTS.
_MEMORY, _INPUT = 0, 1


class CpuDriver:
    """Runs one engine on this machine's CPUs; implements ``runtime.drivers.base.Driver``.

    threads: size of the thread team, the calling thread included; None takes the CPUs that affinity and cgroup allow.
    weights: "background" starts on the engine file's mapping and moves the weights to huge pages while steps run, if
      memory is not short; "map" stays on the mapping (shared, evictable); "copy" moves all of them now.

    Raises DriverError. A driver does not survive a fork: load the engine in the child.
    """

    def __init__(
        self,
        engine: EngineSections,
        target: TargetEntry,
        *,
        threads: int | None = None,
        weights: WeightPlace = "background",
    ) -> None:
        self.plan = engine.plan(target.key)
        check_states(self.plan)
        with native_errors(f"target {target.key}"):
            if "amx_tile" in target.features:
                request_tile_permission()
            code = CodeObject(engine.code(target.key))
            for spec in self.plan.kernels:
                code.kernel(spec.symbol)
            arena, team = Region(self.plan.arena_bytes), PinnedTeam(threads)
            try:
                placed = place_weights(engine, self.plan.weights, weights, team.native)
            except BaseException:
                team.close()
                raise
            self._bound: _Bound | None = _Bound(engine, code, placed, arena, team)
        self._running: _Running | None = None

    @property
    def threads(self) -> int:
        """Size of the thread team."""
        return self._alive().team.native.size

    @property
    def moving_bytes(self) -> int:
        """Bytes of weights that are still to move from the engine file's mapping into memory of their own."""
        return self._alive().weights.moving_bytes

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        """Make state storage: ``num_blocks[g]`` blocks of each KV group, ``num_slots`` sequences' slots. Once."""
        bound, plan = self._alive(), self.plan
        if self._running is not None:
            raise DriverError("allocate was called twice; close the driver and load the engine again")
        check_allocation(plan, num_blocks, num_slots)
        with native_errors("allocate"):
            states = [Region(state_bytes(spec, plan, num_blocks, num_slots)) for spec in plan.states]
            paged = [
                (spec.group, region.address, block_bytes(spec, plan))
                for spec, region in zip(plan.states, states, strict=True)
                if spec.kind == "paged_kv"
            ]
            launches = [
                (plan.kernels[launch.kernel].symbol, _arguments(plan, launch, bound, states), launch.barrier)
                for launch in plan.launches
            ]
            bounds = limits(plan, num_blocks, num_slots)
            runner = Runner(
                bound.team.native, bound.code, launches, plan.tail_start, bounds, paged, bound.weights.native
            )
            self._running = _Running(bound, states, runner)

    def block_bytes(self, group: int) -> int:
        """Bytes that one block of this KV group takes over all its layers."""
        return sum(block_bytes(s, self.plan) for s in self.plan.states if s.kind == "paged_kv" and s.group == group)

    def execute(self, inputs: StepInputs) -> FinishedStep:
        """Run a step. Raises DriverError, with nothing run, if the inputs do not fit the plan or the state.

        Raises EngineFormatError if the check of the weights, which goes on in the background, has found damage.
        """
        running = self._running  # holds the memory during the step, whatever another thread closes
        if running is None:
            running = self._ready()
        running.bound.engine.raise_problems()
        try:
            finished = running.runner.execute(inputs)
            if finished is None:
                rows = inputs.num_rows
                finished = FinishedStep(empty_outputs(self.plan, rows, inputs.want_logits), [-1] * rows)
                running.runner.execute(inputs, finished)
        except NativeError as error:
            raise DriverError(str(error)) from None
        return finished

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        """Copy whole blocks in every layer of a group, in list order, before the next step."""
        running = self._ready()
        with native_errors("copy_blocks"):
            running.runner.copy_blocks(group, source, target)

    def hold_near(self, objects: Iterable[object]) -> None:
        """Fetch these, and what ``execute`` itself goes through, when a step ends: its weights have displaced them."""
        running = self._ready()
        own = (CpuDriver.execute, type(running.bound.engine).raise_problems, self, running, running.bound, FinishedStep)
        running.runner.fetch_at_end(memory_of((*objects, *own)))

    def set_timing(self, on: bool) -> None:
        """Record the time of every launch of the coming steps, or stop recording."""
        self._ready().runner.set_timing(on)

    def take_timings(self) -> NDArray[np.int64]:
        """Timings since the last call, [n, 5]: launch index, row_start, begin, kernel end, end; ns on worker 0."""
        return self._ready().runner.take_timings()

    @property
    def last_span(self) -> tuple[int, int]:
        """The last step in the native core, from entering to leaving it: ns of the monotonic clock."""
        return self._ready().runner.last_span

    def buffer(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a plan's buffer as the last step left them, a view: for tools that look at a single kernel."""
        spec = self.plan.buffers[index]
        return self._alive().arena.bytes()[spec.offset : spec.offset + spec.nbytes]

    def close(self) -> None:
        """Give memory and threads back; a second close does nothing, any other call is an error."""
        self._running = None
        if self._bound is not None:
            self._bound.weights.close()
            self._bound.team.close()
            self._bound = None

    def _alive(self) -> _Bound:
        if self._bound is None:
            raise DriverError("the driver is closed; load the engine again")
        return self._bound

    def _ready(self) -> _Running:
        self._alive()
        if self._running is None:
            raise DriverError("the driver has no state yet; call allocate before the first step")
        return self._running


def _arguments(plan: Plan, launch: Launch, bound: _Bound, states: Sequence[Region]) -> list[tuple[int, int]]:
    """(kind, address) of each argument, in the kernel's order: inputs, outputs, states, scratch."""
    operands = [*launch.inputs, *launch.outputs, *launch.states]
    if launch.scratch >= 0:
        operands.append(Operand("buffer", launch.scratch))
    return [_argument(plan, operand, bound, states) for operand in operands]


def _argument(plan: Plan, operand: Operand, bound: _Bound, states: Sequence[Region]) -> tuple[int, int]:
    match operand.space:
        case "buffer":
            return _MEMORY, bound.arena.address + plan.buffers[operand.index].offset
        case "weight":
            return _MEMORY, bound.weights.addresses[operand.index]
        case "state":
            return _MEMORY, states[operand.index].address
        case "input":
            return _INPUT + operand.index, 0
        case "none":
            return _MEMORY, 0


class PinnedTeam:
    """A thread team and the CPUs it holds: each thread but the caller's is bound to one, if there are enough."""

    def __init__(self, threads: int | None) -> None:
        size = min(default_threads(), MAX_WORKERS) if threads is None else threads
        if isinstance(size, bool) or not isinstance(size, int):
            raise DriverError(f"threads: got {size!r}; allowed: an integer from 1 to {MAX_WORKERS}")
        cpus = cpu_list()
        self._cpus = CLAIMS.take(size - 1, cpus) if 1 < size <= len(cpus) else []
        try:
            self.native = Team(size, self._cpus)
        except NativeError:
            self._release()
            raise

    def close(self) -> None:
        """Let go of the CPUs; the threads end with the last reference to the team."""
        self._release()

    def _release(self) -> None:
        CLAIMS.give_back(self._cpus)
        self._cpus = []


@dataclass(frozen=True)
class _Bound:
    """What lives from load to close."""

    engine: EngineSections
    code: CodeObject
    weights: Weights
    arena: Region
    team: PinnedTeam


@dataclass(frozen=True)
class _Running:
    """What lives from allocate to close: the runner, and all memory that its launches point to."""

    bound: _Bound
    states: list[Region]
    runner: Runner
