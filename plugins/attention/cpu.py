"""Paged attention on CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import PagedAttention
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import cpp_config, cpp_kernel, cpp_members, cpp_type, expect, refuse_floats, refuse_target, sku_of
from ..kv.cpu import refuse_kv

# As in cpp/kernels/attention_tile.h.
_SPLIT_KEYS = 256
_LANES = 16
_LEAST_PARTS = 64  # partial results (one query, one split, one kv head) that scratch always has room for


_TILE_ROWS = 32  # with 64 keys their scores, weights and outputs are about as large as the L1 cache


@dataclass(frozen=True)
class AttentionTactic:
    """How attention is blocked; results do not depend on it.

    A tile has ``tile_queries`` x ``tile_heads`` rows, the heads of one kv head. In registers are ``block_rows`` of
    them times ``block_panels`` vectors of 16 keys or values; ``head_rows`` where only one query's heads are left.
    """

    tile_queries: int
    tile_heads: int
    block_rows: int
    head_rows: int
    block_panels: int

    @staticmethod
    def choose(heads_per_kv: int, vector_bits: int, *, widened: bool = False) -> AttentionTactic:
        """By the register file: rows x panels accumulators, a few registers left for operands.

        32 registers of 512 bits hold 7 x 4 or 8 x 2; 16 of 256 bits, two to a vector, hold 2 x 2, or 4 x 1 where keys
        and values of 16 bits are ``widened`` to two fp32 vectors each.
        """
        heads = min(heads_per_kv, _TILE_ROWS)
        queries = _TILE_ROWS // heads
        if vector_bits < 512:
            rows, panels = (4, 1) if widened else (2, 2)
            return AttentionTactic(queries, heads, rows, min(heads, 2), panels)
        head_rows = -(-heads // -(-heads // 8))  # the heads of a query, in equal blocks
        rows = head_rows if heads > 4 else min((8, 7, 6), key=lambda m: -(-queries * heads // m) * m)
        return AttentionTactic(queries, heads, rows, head_rows, 4 if rows <= 7 else 2)

    @staticmethod
    def candidates(heads_per_kv: int, vector_bits: int, *, widened: bool = False) -> tuple[AttentionTactic, ...]:
        """The model's choice, then other blocks that fit the registers, and tiles of half and of twice the queries."""
        model = AttentionTactic.choose(heads_per_kv, vector_bits, widened=widened)
        blocks = ((8, 2), (7, 4), (6, 4), (4, 4)) if vector_bits >= 512 else ((2, 2), (4, 1), (3, 1))
        found = [model]
        for rows, panels in blocks:
            head_rows = min(model.head_rows, rows)
            found.append(replace(model, block_rows=rows, head_rows=head_rows, block_panels=panels))
        found += [replace(model, tile_queries=n) for n in (model.tile_queries // 2, model.tile_queries * 2) if n]
        return tuple(dict.fromkeys(found))


def _widens(op: PagedAttention, target: Target) -> bool:
    """Whether keys and values have 16 bits and no dot product of their own."""
    dot = sku_of(target).dot if op.kv_dtype is DType.BF16 and op.compute is DType.BF16 else "none"
    return dot == "none" and op.kv_dtype.itemsize == 2


def _on_tiles(op: PagedAttention, target: Target) -> bool:
    """Whether products of keys and of values are AMX's."""
    return sku_of(target).dot == "amx_bf16" and op.kv_dtype is DType.BF16 and op.compute is DType.BF16


@dataclass(frozen=True)
class CpuPagedAttention:
    name: str = "cpu.paged_attention"
    op: type[Op] = PagedAttention
    generic: bool = False
    tactic: AttentionTactic | None = None  # None: by the model of the SKU

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        op = expect(PagedAttention, call.op)
        reason = refuse_target(target) or refuse_kv(op.kv_dtype, op.head_dim, call.ranges.tokens_per_block)
        if reason:
            return reason
        if op.heads % op.kv_heads:
            return f"{op.heads} heads do not divide into {op.kv_heads} kv heads"
        if op.window is not None and op.window < 1:
            return f"window {op.window} is not positive"
        for name, value in (("scale", op.scale), ("softcap", 1.0 if op.softcap is None else op.softcap)):
            if not value > 0:
                return f"{name} {value} is not positive"
        return refuse_floats([*call.inputs, *call.outputs])

    def variants(self, call: KernelCall, target: Target) -> tuple[CpuPagedAttention, ...]:
        op = expect(PagedAttention, call.op)
        if self.tactic is not None:
            return (self,)
        bits, widened = sku_of(target).vector_bits, _widens(op, target)
        candidates = AttentionTactic.candidates(op.heads // op.kv_heads, bits, widened=widened)
        if _on_tiles(op, target):  # which have blocks of their own: only the tile's queries matter
            model = candidates[0]
            candidates = tuple(t for t in candidates if t == replace(model, tile_queries=t.tile_queries))
        return tuple(replace(self, tactic=tactic) for tactic in candidates)

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        op = expect(PagedAttention, call.op)
        tile_heads = self._tactic(op, target).tile_heads
        pieces = op.kv_heads * -(-(op.heads // op.kv_heads) // tile_heads)
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
                "kTiles": _on_tiles(op, target),
                **cpp_members(self._tactic(op, target)),
            },
        )
        body = f"pelton::paged_attention<{symbol}_config>(step, args, worker);"
        return cpp_kernel(symbol, "attention.h", body, config)

    def _tactic(self, op: PagedAttention, target: Target) -> AttentionTactic:
        bits, widened = sku_of(target).vector_bits, _widens(op, target)
        return self.tactic or AttentionTactic.choose(op.heads // op.kv_heads, bits, widened=widened)

    @staticmethod
    def _parts(call: KernelCall) -> int:
        """Splits that may be in flight at once: those of one longest sequence, or a few short ones."""
        return max(_LEAST_PARTS, -(-call.ranges.max_seq_len // _SPLIT_KEYS) + 1)


KERNELS: tuple[Kernel, ...] = (CpuPagedAttention(),)
