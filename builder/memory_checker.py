"""Check a plan's memory by following its launches, knowing nothing of how offsets were chosen.

It tracks which buffers still hold what was written to them. A write destroys every buffer that shares a byte with it.
Launches between two barriers may run in any order or at once. The tail is followed twice, because it loops.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.errors import BuildError
from ..runtime.format.plan import Buffer, Launch, Plan
from ..runtime.format.tensor_type import TensorType

_ALIGNMENT = 64


def require_sound_memory(plan: Plan) -> None:
    """Raises BuildError with the first few problems of the plan's memory."""
    problems = memory_problems(plan)
    if problems:
        listing = "\n".join(f"  {p}" for p in problems[:5])
        raise BuildError(f"the memory plan is unsound ({len(problems)} problems); please report this:\n{listing}")


def memory_problems(plan: Plan) -> list[str]:
    """What is wrong with the plan's buffers, barriers and their use; empty if nothing is."""
    return [*_placement(plan), *_barriers(plan), *_contents(plan)]


def _placement(plan: Plan) -> Iterator[str]:
    symbols = plan.ranges.symbols()
    for buffer in plan.buffers:
        needed = TensorType(buffer.dtype, buffer.shape).nbytes(symbols)
        if buffer.nbytes < needed:
            yield f"buffer {buffer.name} has {buffer.nbytes} bytes and needs {needed}"
        if buffer.offset < 0 or buffer.offset % _ALIGNMENT or buffer.offset + buffer.nbytes > plan.arena_bytes:
            yield f"buffer {buffer.name} at {buffer.offset} is misaligned or leaves the arena"


def _barriers(plan: Plan) -> Iterator[str]:
    """The tail is entered and left behind a barrier."""
    for index in {plan.tail_start - 1, len(plan.launches) - 1}:
        if 0 <= index < len(plan.launches) and not plan.launches[index].barrier:
            yield f"launch {index} must end with a barrier: the tail or the step ends there"


def _contents(plan: Plan) -> Iterator[str]:
    """Every read finds what was written, in whatever order the launches of a phase run."""
    head = list(enumerate(plan.launches))[: plan.tail_start]
    tail = list(enumerate(plan.launches))[plan.tail_start :]
    intact: set[int] = set()
    for phase in _phases([*head, *tail, *tail]):
        for index, launch in phase:
            for read in sorted(_reads(launch) - intact):
                name = plan.buffers[read].name
                yield f"launch {index} ({launch.origin}) reads buffer {name}, which was overwritten or never written"
        yield from _conflicts(plan, phase)
        for _, launch in phase:
            for written in _writes(launch):
                intact -= {i for i in intact if _overlap(plan.buffers[i], plan.buffers[written])}
            intact |= {o.index for o in launch.outputs if o.space == "buffer"}


def _conflicts(plan: Plan, phase: list[tuple[int, Launch]]) -> Iterator[str]:
    """No launch of a phase writes what another one (or itself) touches; none shares state with another."""
    accesses = [(i, launch, written) for i, launch in phase for written in _writes(launch)]
    for number, (index, launch, written) in enumerate(accesses):
        touched = [(i, other) for i, other_launch in phase for other in _reads(other_launch)]
        touched += [(i, other) for i, _, other in accesses[number + 1 :]]
        for other_index, other in touched:
            if _overlap(plan.buffers[written], plan.buffers[other]):
                names = f"{plan.buffers[written].name} and {plan.buffers[other].name}"
                yield f"launches {index} and {other_index} ({launch.origin}) touch {names} at once, which overlap"
    seen: set[int] = set()
    for index, launch in phase:
        states = {operand.index for operand in launch.states}
        if states & seen:
            yield f"launch {index} ({launch.origin}) shares a state with an earlier launch and no barrier between"
        seen |= states


def _phases(launches: list[tuple[int, Launch]]) -> Iterator[list[tuple[int, Launch]]]:
    phase: list[tuple[int, Launch]] = []
    for index, launch in launches:
        phase.append((index, launch))
        if launch.barrier:
            yield phase
            phase = []
    if phase:
        yield phase


def _reads(launch: Launch) -> set[int]:
    return {operand.index for operand in launch.inputs if operand.space == "buffer"}


def _writes(launch: Launch) -> list[int]:
    """Buffers that a launch writes: results, and its scratch."""
    found = [operand.index for operand in launch.outputs if operand.space == "buffer"]
    return found + ([launch.scratch] if launch.scratch >= 0 else [])


def _overlap(a: Buffer, b: Buffer) -> bool:
    return a.nbytes > 0 and b.nbytes > 0 and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
