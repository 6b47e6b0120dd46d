"""Tactics: ways to do a kernel's work that differ in speed only, what they are timed on, and how timings decide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .kernels import Kernel, KernelCall
from .ops.fused import PagedAttention
from .target import Target

NOISE = 0.02  # a tactic must beat the model's by more than this share of its time
_CONTEXT = 1024  # tokens that a timed decode step of attention looks back on, at most
_KV_BYTES = 256 << 20  # and what the K and V of all its sequences may take


@runtime_checkable
class Tunable(Kernel, Protocol):
    """A kernel whose code has a tactic: tile shapes, blockings, whatever changes speed but not a single bit."""

    @property
    def tactic(self) -> Any:
        """A frozen dataclass of integers; None leaves the choice to the kernel's model of the SKU."""
        ...

    def variants(self, call: KernelCall, target: Target) -> Sequence[Tunable]:
        """This kernel with each tactic worth timing, the model's choice first; never empty, no tactic twice."""
        ...


def variants_of(kernel: Kernel, call: KernelCall, target: Target) -> tuple[Tunable, ...]:
    """The variants of a kernel; none of one that has no tactic."""
    return tuple(kernel.variants(call, target)) if isinstance(kernel, Tunable) else ()


def tactic_of(kernel: Kernel, call: KernelCall, target: Target) -> dict[str, int]:
    """The fields of the tactic that a kernel's code has; empty for kernels without."""
    if not isinstance(kernel, Tunable):
        return {}
    chosen = kernel if kernel.tactic is not None else kernel.variants(call, target)[0]
    return {name: int(value) for name, value in dataclasses.asdict(chosen.tactic).items()}


def label(fields: dict[str, int]) -> str:
    """A tactic in one line, as timing caches and people read it: "tile_rows 8, tile_panels 2"."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


@dataclass(frozen=True)
class Workload:
    """A step on which tactics are timed: sequences of ``lengths`` new tokens, each after ``context`` earlier ones."""

    lengths: tuple[int, ...]
    context: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def __str__(self) -> str:
        after = f" after {self.context}" if self.context else ""
        count = len(self.lengths)
        return f"{self.tokens} tokens{after}" if count == 1 else f"{self.tokens} tokens of {count} sequences{after}"


def workloads(call: KernelCall) -> tuple[Workload, ...]:
    """What a call's tactics are timed on: a decode step of ``opt_num_tokens``, and the longest prefill.

    A kernel of the plan's tail sees at most ``logits_chunk`` rows at a time.
    """
    ranges = call.ranges
    dims = {dim for type_ in (*call.inputs, *call.outputs) for dim in type_.shape if isinstance(dim, str)}
    if isinstance(call.op, PagedAttention):
        sequences = min(ranges.opt_num_tokens, ranges.max_batch_size)
        token_bytes = 2 * call.op.kv_heads * call.op.head_dim * call.op.kv_dtype.itemsize
        seen = max(ranges.tokens_per_block, _KV_BYTES // (sequences * token_bytes))
        decode = Workload((1,) * sequences, min(_CONTEXT, seen, ranges.max_seq_len) - 1)
        return decode, Workload(_split(ranges.max_num_tokens, ranges.max_seq_len))
    if not dims & {"T", "S"}:
        rows = {ranges.logits_chunk}
    else:
        rows = {ranges.opt_num_tokens, ranges.max_num_tokens}
    return tuple(Workload(_split(count, ranges.max_seq_len)) for count in sorted(rows))


def _split(tokens: int, most: int) -> tuple[int, ...]:
    """Tokens as sequences of at most ``most``."""
    whole, rest = divmod(tokens, most)
    return (most,) * whole + ((rest,) if rest else ())


def fastest(seconds: Sequence[Sequence[float]]) -> int:
    """Index of the best variant by seconds[variant][workload]; 0, the model's choice, unless that is clearly beaten.

    Variants are compared by the geometric mean, over the workloads, of their time as a share of the model's.
    """
    shares = [math.exp(sum(map(math.log, _quotients(row, seconds[0]))) / len(row)) for row in seconds]
    best = min(range(len(shares)), key=shares.__getitem__)
    return best if shares[best] < 1 - NOISE else 0


def _quotients(row: Sequence[float], base: Sequence[float]) -> list[float]:
    return [time / by for time, by in zip(row, base, strict=True)]
