"""The launch plan: what a driver executes for one step, as plain data.

A plan belongs to one target. Kernels are named by symbol (looked up in the target's
code object) and also carry the op they implement, so the reference driver can run the very
same plan from op meanings. All structs are msgspec Structs: immutable, validated on decode,
encoded to JSON in a fixed field order (same plan, same bytes).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .decode import decoded
from .dtypes import DType
from .tensor_type import Dim


class Ranges(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was built for. Names follow TensorRT-LLM's build flags."""

    max_batch_size: int  # sequences in one step (S)
    max_num_tokens: int  # tokens in one step (T)
    max_seq_len: int  # prompt + output of one sequence
    opt_num_tokens: int  # the T that tile choices are tuned for
    max_logits_rows: int  # rows with logits in one step (R)
    logits_chunk: int  # rows the head computes at a time (C)
    tokens_per_block: int  # tokens in one KV block; a multiple of 16
    max_logprobs: int  # most top-logprobs a request may ask for

    def symbols(self) -> dict[str, int]:
        """Largest value of every symbolic dim."""
        return {
            "T": self.max_num_tokens,
            "S": self.max_batch_size,
            "R": self.max_logits_rows,
            "C": self.logits_chunk,
        }

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_seq_len // self.tokens_per_block)


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share block tables. ``window`` is None, or how many latest tokens are attended."""

    name: str
    window: int | None


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of memory that outlives a step; the driver owns it.

    kind "paged_kv": K and V of one attention layer in pages. One page (block) of this layer holds
      ``tokens_per_block`` tokens; ``group`` indexes ``Plan.kv_groups`` (whose block table to use);
      ``shape`` = (kv_heads, head_dim). Byte layout inside a block is the target's own ("kv16": see
      cpp/include/pelton/kv_layout.h).
    kind "slot": per-sequence storage indexed by the sequence's slot; ``shape`` is one slot's shape.
      State "history" (i32 [max_seq_len]) holds each sequence's token ids by position.
    """

    name: str
    kind: Literal["paged_kv", "slot"]
    dtype: DType
    shape: tuple[int, ...]
    group: int = 0
    layout: str = "rows"


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of the arena, valid while the values it holds are live."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    offset: int  # bytes from the arena's start, a multiple of 64
    nbytes: int  # at the largest symbol values


class WeightRef(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the engine file that launches read (weights and constants alike)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: str


class Operand(msgspec.Struct, frozen=True, array_like=True):
    """One argument of a launch: ``space`` and an index into that space's table.

    buffer -> Plan.buffers, weight -> Plan.weights, state -> Plan.states,
    input -> a step input by its position in ``STEP_INPUTS``, none -> absent (index 0; token edges).
    """

    space: Literal["buffer", "weight", "state", "input", "none"]
    index: int


class KernelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled function, and the op whose meaning it has."""

    symbol: str
    kernel: str  # the Kernel's name in the registry, e.g. "cpu.gemm.avx512_bf16"
    op: str  # op name
    attributes: dict[str, Any]  # op fields, as plain JSON values
    input_types: tuple[str, ...]  # str(TensorType) of each operand, for people and for the reference driver
    output_types: tuple[str, ...]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Run one kernel on these operands. Operand order for the kernel: inputs, outputs, states, scratch."""

    kernel: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    states: tuple[Operand, ...] = ()
    scratch: int = -1  # index into Plan.buffers, or -1
    barrier: bool = True  # all workers meet before the next launch
    origin: str = ""  # module path in the model, for profiles and errors


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a driver needs, besides weights and code.

    ``launches[:tail_start]`` run once a step. ``launches[tail_start:]`` (row gather, final norm,
    head, sampling) run once for each chunk of at most ``ranges.logits_chunk`` rows of R.
    """

    ranges: Ranges
    kv_groups: tuple[KVGroup, ...]
    states: tuple[StateSpec, ...]
    weights: tuple[WeightRef, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    kernels: tuple[KernelSpec, ...]
    launches: tuple[Launch, ...]
    tail_start: int
    vocab_size: int


#: Step inputs a launch may name directly (the rest reach kernels through the step descriptor).
STEP_INPUTS = ("token_ids", "positions")


def encode_plan(plan: Plan) -> bytes:
    """Canonical JSON of a plan."""
    return msgspec.json.encode(plan, order="deterministic")


def decode_plan(data: bytes | memoryview, what: str = "the plan") -> Plan:
    """Read a plan back; raises EngineFormatError that ``what`` is damaged, naming the field."""
    return decoded(what, data, Plan)
