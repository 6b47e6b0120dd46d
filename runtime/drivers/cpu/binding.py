"""From a plan's tables to sizes, limits and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ...._core import Limits, NativeError
from ...errors import DriverError
from ...format.plan import Plan, StateSpec
from ...format.tensor_type import TensorType
from .weights import WeightSource


class EngineSections(WeightSource, Protocol):
    """What the driver reads of an engine (``EngineFile`` has it)."""

    def plan(self, key: str) -> Plan:
        """The target's plan, all of its references within its own tables and arena."""
        ...

    def code(self, key: str) -> memoryview:
        """The target's code object, whose hash has been checked."""
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
