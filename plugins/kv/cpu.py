"""Writing keys and values into paged state on CPUs (layout kv16, see cpp/include/pelton/kv_layout.h)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import KVWrite, QKVRopeWrite
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import WrittenKernel, cpp_config, cpp_kernel, cpp_type, expect, refuse_target


def refuse_kv(dtype: DType, head_dim: int, tokens_per_block: int) -> str | None:
    """None if layout kv16 can hold these heads."""
    if not dtype.is_float:
        return f"keys and values of type {dtype.value} are not supported"
    if head_dim % 2 or head_dim > 1024:
        return f"head_dim {head_dim} must be even and at most 1024"
    if tokens_per_block % 16:
        return f"tokens_per_block {tokens_per_block} is not a multiple of 16"
    return None


@dataclass(frozen=True)
class CpuKVWrite(WrittenKernel):
    name: str = "cpu.kv_write"
    op: type[Op] = KVWrite

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        op = expect(KVWrite, call.op)
        return refuse_target(target) or refuse_kv(op.dtype, op.head_dim, call.ranges.tokens_per_block)

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(KVWrite, call.op)
        config = cpp_config(
            f"{symbol}_config",
            {"Kv": cpp_type(op.dtype)},
            {
                "kKvHeads": op.kv_heads,
                "kDim": op.head_dim,
                "kTokens": call.ranges.tokens_per_block,
                "kGroup": call.kv_group,
            },
        )
        return cpp_kernel(symbol, "kv.h", f"pelton::kv_write<{symbol}_config>(step, args, worker);", config)


@dataclass(frozen=True)
class CpuQKVRopeWrite(WrittenKernel):
    name: str = "cpu.qkv_rope_write"
    op: type[Op] = QKVRopeWrite

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        op = expect(QKVRopeWrite, call.op)
        return refuse_target(target) or refuse_kv(op.kv_dtype, op.head_dim, call.ranges.tokens_per_block)

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(QKVRopeWrite, call.op)
        config = cpp_config(
            f"{symbol}_config",
            {"Kv": cpp_type(op.kv_dtype), "Q": cpp_type(op.compute)},
            {
                "kHeads": op.heads,
                "kKvHeads": op.kv_heads,
                "kDim": op.head_dim,
                "kTokens": call.ranges.tokens_per_block,
                "kGroup": call.kv_group,
                "kRotary": op.rotary_dim,
                "kInterleaved": op.interleaved,
                "kNorm": op.qk_norm,
                "kEps": op.qk_eps,
            },
        )
        return cpp_kernel(symbol, "kv.h", f"pelton::qkv_rope_write<{symbol}_config>(step, args, worker);", config)


KERNELS: tuple[Kernel, ...] = (CpuKVWrite(), CpuQKVRopeWrite())
