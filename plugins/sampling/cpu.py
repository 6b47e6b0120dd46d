"""CPU kernels of ResolveTokens and Sample (cpp/kernels/sample.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pelton.builder.kernels import MAX_WORKERS, Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import ResolveTokens, Sample
from pelton.builder.target import Target

from ..cpu_code import WrittenKernel, cpp_kernel, expect, refuse_target

#: Weights of 2^30 times this many tokens stay exact in fp64.
_MAX_VOCAB = 1 << 22


@dataclass(frozen=True)
class ResolveTokensKernel(WrittenKernel):
    """Fills in token ids that an earlier step sampled; workers take tokens in turns."""

    name: ClassVar[str] = "cpu.resolve_tokens"
    op: ClassVar[type[Op]] = ResolveTokens

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Instantiate pelton::resolve_tokens."""
        body = f"pelton::resolve_tokens<{call.ranges.max_seq_len}>(step, args, worker);"
        return cpp_kernel(symbol, "sample.h", body)


@dataclass(frozen=True)
class SampleKernel(WrittenKernel):
    """Logits to tokens and logprobs; each row is one worker's. Greedy rows need no scratch."""

    name: ClassVar[str] = "cpu.sample"
    op: ClassVar[type[Op]] = Sample

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        """None on any CPU, for vocabularies up to 2^22."""
        op = expect(Sample, call.op)
        if op.vocab_size > _MAX_VOCAB:
            return f"the vocabulary {op.vocab_size} is larger than {_MAX_VOCAB}"
        return refuse_target(target)

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        """Adjusted logits and two id arrays for each row that can be in work at once."""
        room = (12 * expect(Sample, call.op).vocab_size + 63) // 64 * 64
        return room * min(MAX_WORKERS, call.ranges.logits_chunk)

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Instantiate pelton::sample."""
        op = expect(Sample, call.op)
        constants = f"{op.vocab_size}, {op.max_logprobs}, {call.ranges.max_seq_len}"
        return cpp_kernel(symbol, "sample.h", f"pelton::sample<{constants}>(step, args, worker);")


KERNELS: tuple[Kernel, ...] = (ResolveTokensKernel(), SampleKernel())
