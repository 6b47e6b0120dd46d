"""From a plan's tables to sizes and addresses, and the checks that make a plan safe to bind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...._core import Limits, NativeError, Region
from ...errors import DriverError
from ...format.plan import STEP_INPUTS, Operand, Plan, StateSpec, WeightRef
from ...format.tensor_type import TensorType

ALIGNMENT = 64  # bytes: every operand starts on a cache line


class EngineSections(Protocol):
    """What the driver reads of an engine (``EngineFile`` has it)."""

    def plan(self, key: str) -> Plan: ...

    def code(self, key: str) -> memoryview: ...

    def tensor(self, name: str) -> NDArray[np.generic]: ...


@contextmanager
def native_errors(doing: str) -> Iterator[None]:
    """Turn the native core's errors into DriverErrors that say what was being done."""
    try:
        yield
    except NativeError as error:
        raise DriverError(f"{doing}: {error}") from None


def check_plan(plan: Plan) -> None:
    """Raise DriverError if a launch names something that the plan lacks, or memory outside the arena."""
    sizes = {
        "buffer": len(plan.buffers),
        "weight": len(plan.weights),
        "state": len(plan.states),
        "input": len(STEP_INPUTS),
        "none": 1,
    }
    for number, launch in enumerate(plan.launches):
        scratch = (Operand("buffer", launch.scratch),) if launch.scratch >= 0 else ()
        for operand in (*launch.inputs, *launch.outputs, *launch.states, *scratch):
            if not 0 <= operand.index < sizes[operand.space]:
                raise DriverError(f"plan: launch {number} ({launch.origin}) names {operand.space} {operand.index}")
        if not 0 <= launch.kernel < len(plan.kernels):
            raise DriverError(f"plan: launch {number} ({launch.origin}) names kernel {launch.kernel}")
    for buffer in plan.buffers:
        if buffer.offset < 0 or buffer.offset % ALIGNMENT or not 0 <= buffer.nbytes <= plan.arena_bytes - buffer.offset:
            raise DriverError(f"plan: buffer {buffer.name} lies outside the arena, or off its {ALIGNMENT}-byte grid")
    for state in plan.states:
        if state.kind == "paged_kv" and (state.layout != "kv16" or not 0 <= state.group < len(plan.kv_groups)):
            raise DriverError(f"plan: state {state.name} has layout {state.layout}, KV group {state.group}")
    if not 0 <= plan.tail_start <= len(plan.launches):
        raise DriverError(f"plan: tail_start {plan.tail_start} of {len(plan.launches)} launches")


def block_bytes(spec: StateSpec, plan: Plan) -> int:
    """Bytes of one block of one layer (layout kv16: K and V of tokens_per_block tokens)."""
    kv_heads, head_dim = spec.shape
    return 2 * kv_heads * plan.ranges.tokens_per_block * head_dim * spec.dtype.itemsize


def state_bytes(spec: StateSpec, plan: Plan, num_blocks: tuple[int, ...], num_slots: int) -> int:
    """Bytes of a state's whole storage."""
    if spec.kind == "paged_kv":
        return num_blocks[spec.group] * block_bytes(spec, plan)
    return num_slots * TensorType(spec.dtype, spec.shape).nbytes()


def limits(plan: Plan, num_blocks: tuple[int, ...], num_slots: int) -> Limits:
    """What the native core checks every step against."""
    result = Limits()
    ranges = plan.ranges
    result.max_num_tokens = ranges.max_num_tokens
    result.max_batch_size = ranges.max_batch_size
    result.max_seq_len = ranges.max_seq_len
    result.max_logits_rows = ranges.max_logits_rows
    result.logits_chunk = ranges.logits_chunk
    result.tokens_per_block = ranges.tokens_per_block
    result.max_logprobs = ranges.max_logprobs
    result.vocab_size = plan.vocab_size
    result.num_slots = num_slots
    result.num_blocks = list(num_blocks)
    result.windows = [group.window or 0 for group in plan.kv_groups]
    return result


class Weights:
    """Addresses of a plan's weights, and whatever keeps them valid."""

    def __init__(self, engine: EngineSections, refs: tuple[WeightRef, ...], *, copy: bool) -> None:
        self._views = [_view(engine, ref) for ref in refs]
        self.addresses = [view.ctypes.data for view in self._views]
        # A valid engine file has page-aligned tensors; anything else is brought onto the grid.
        moved = [i for i, address in enumerate(self.addresses) if copy or address % ALIGNMENT]
        self._region = Region(sum(_padded(self._views[i].nbytes) for i in moved))
        offset = 0
        for i in moved:
            size = self._views[i].nbytes
            self._region.bytes()[offset : offset + size] = self._views[i]
            self.addresses[i] = self._region.address + offset
            self._views[i] = self._region.bytes()[offset : offset + size]
            offset += _padded(size)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(engine: EngineSections, ref: WeightRef) -> NDArray[np.uint8]:
    """A weight's bytes, where the engine has them."""
    array = engine.tensor(ref.name)
    expected = TensorType(ref.dtype, ref.shape, ref.layout).nbytes()
    if array.nbytes != expected or not array.flags.c_contiguous:
        raise DriverError(
            f"tensor {ref.name} has {array.nbytes} bytes, the plan wants {expected} "
            f"({ref.dtype.value}{list(ref.shape)} {ref.layout}); the engine contradicts itself, rebuild it"
        )
    return array.reshape(-1).view(np.uint8)
