"""From a plan's tables to sizes, limits and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...._core import Limits, NativeError, Region
from ...errors import DriverError
from ...format.plan import Plan, StateSpec, WeightRef
from ...format.tensor_type import TensorType

ALIGNMENT = 64  # bytes: every operand starts on a cache line


class EngineSections(Protocol):
    """What the driver reads of an engine (``EngineFile`` has it)."""

    def plan(self, key: str) -> Plan:
        """The target's plan, all of its references within its own tables and arena."""
        ...

    def code(self, key: str) -> memoryview:
        """The target's code object, whose hash has been checked."""
        ...

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor's storage, valid as long as the array lives."""
        ...

    def raise_problems(self) -> None:
        """Raise EngineFormatError if weights were found damaged since the engine was opened; costs next to nothing."""
        ...


@contextmanager
def native_errors(doing: str) -> Iterator[None]:
    """Turn the native core's errors into DriverErrors that say what was being done."""
    try:
        yield
    except NativeError as error:
        raise DriverError(f"{doing}: {error}") from None


def check_states(plan: Plan) -> None:
    """Raise DriverError for a state that this driver cannot hold."""
    for state in plan.states:
        if state.kind == "paged_kv" and (state.layout != "kv16" or len(state.shape) != 2):
            raise DriverError(
                f"plan: KV state {state.name} has layout {state.layout!r} and shape {state.shape}; the cpu driver "
                'knows "kv16" with (kv_heads, head_dim); rebuild the engine with this version of pelton'
            )


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
