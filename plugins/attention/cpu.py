"""Paged attention on CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import PagedAttention
from pelton.builder.target import Target

from ..cpu_code import cpp_config, cpp_kernel, cpp_type, expect, refuse_floats, refuse_target
from ..kv.cpu import refuse_kv

# As in cpp/kernels/attention.h.
_SPLIT_KEYS = 256
_TILE_ROWS = 32
_LANES = 16
_LEAST_PARTS = 64  # partial results (one query, one split, one kv head) that scratch always has room for


@dataclass(frozen=True)
class CpuPagedAttention:
    name: str = "cpu.paged_attention"
    op: type[Op] = PagedAttention
    generic: bool = False

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        op = expect(PagedAttention, call.op)
        reason = refuse_target(target) or refuse_kv(op.kv_dtype, op.head_dim, call.ranges.tokens_per_block)
        if reason:
            return reason
        if op.heads % op.kv_heads:
            return f"{op.heads} heads do not divide into {op.kv_heads} kv heads"
        if op.window is not None and op.window < 1:
            return f"window {op.window} is not positive"
        if op.softcap is not None and not op.softcap > 0:
            return f"softcap {op.softcap} is not positive"
        return refuse_floats([*call.inputs, *call.outputs])

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        op = expect(PagedAttention, call.op)
        group = op.heads // op.kv_heads
        tile_heads = min(group, _TILE_ROWS)
        pieces = op.kv_heads * -(-group // tile_heads)
        row_floats = _LANES + -(-op.head_dim // _LANES) * _LANES
        return self._parts(call) * pieces * tile_heads * row_floats * 4

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(PagedAttention, call.op)
        config = cpp_config(
            f"{symbol}_config",
            {"Compute": cpp_type(op.compute), "Kv": cpp_type(op.kv_dtype), "Out": cpp_type(op.dtype)},
            {
                "kHeads": op.heads,
                "kKvHeads": op.kv_heads,
                "kDim": op.head_dim,
                "kTokens": call.ranges.tokens_per_block,
                "kGroup": call.kv_group,
                "kWindow": op.window or 0,
                "kScale": op.scale,
                "kSoftcap": op.softcap,
                "kParts": self._parts(call),
            },
        )
        body = f"pelton::paged_attention<{symbol}_config>(step, args, worker);"
        return cpp_kernel(symbol, "attention.h", body, config)

    @staticmethod
    def _parts(call: KernelCall) -> int:
        """Splits that may be in flight at once: those of one longest sequence, or a few short ones."""
        return max(_LEAST_PARTS, -(-call.ranges.max_seq_len // _SPLIT_KEYS) + 1)


KERNELS: tuple[Kernel, ...] = (CpuPagedAttention(),)
