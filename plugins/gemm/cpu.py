"""GEMM on CPUs: the SKU's dot product decides the arithmetic; all else is shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from pelton.builder.kernels import MAX_WORKERS, Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Gemm
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import (
    constant,
    cpp_config,
    cpp_count,
    cpp_kernel,
    cpp_members,
    cpp_type,
    expect,
    refuse_target,
)
from .tactics import TILE_DEPTH, AmxTactic, GemmTactic

#: What AmxTactic leaves no choice in: two tiles of rows, two panels.
_AMX_TILES = {"kTileRows": 32, "kTilePanels": 2}
_REDUNDANT_ROWS = 4  # rows that every worker stages for itself (cpp/kernels/gemm_rows.h: kRedundantRows)


@dataclass(frozen=True)
class CpuGemm:
    """``dot`` names the 16-bit dot product used, "none" = widen to fp32 and fused multiply-add.

    ``tactic`` None leaves the choice to the model of the SKU; "amx_bf16" takes an AmxTactic, the others a GemmTactic.
    """

    name: str
    vector_bits: int
    dot: str
    op: type[Op] = Gemm
    generic: bool = False
    tactic: GemmTactic | AmxTactic | None = None

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        reason = refuse_target(target, self.vector_bits)
        if reason or target.sku is None:
            return reason
        op = expect(Gemm, call.op)
        dot = target.sku.dot if op.compute is DType.BF16 else "none"
        if dot != self.dot:
            return f"{op.compute.value} on {target.sku.name} uses dot product {dot!r}, this kernel uses {self.dot!r}"
        if call.inputs[1].layout not in ("panel16", "packed12") or call.inputs[0].layout != "rows":
            return f"needs x in rows and w in panel16 or packed12, got {call.inputs[0]} and {call.inputs[1]}"
        if not call.inputs[0].dtype.is_float or not op.dtype.is_float or not op.compute.is_float:
            return "takes floats only"
        return None

    def variants(self, call: KernelCall, target: Target) -> tuple[CpuGemm, ...]:
        if self.tactic is not None:
            return (self,)
        k, compute, rows = constant(call.inputs[1].shape[1]), expect(Gemm, call.op).compute, _most_rows(call)
        if self.dot == "amx_bf16":
            return tuple(replace(self, tactic=tactic) for tactic in AmxTactic.candidates(k, rows))
        candidates = GemmTactic.candidates(k, compute, self.vector_bits, rows, widened=self._widens(compute))
        return tuple(replace(self, tactic=tactic) for tactic in candidates)

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        op = expect(Gemm, call.op)
        staged = DType.F32 if self.dot == "none" else DType.BF16
        x = call.inputs[0]
        k = constant(x.shape[-1])
        tiles = self.dot == "amx_bf16"
        step = TILE_DEPTH if tiles else 1 if op.compute is DType.F32 else 2
        if op.prologue == "none" and x.dtype == staged == op.compute and k % step == 0:  # gemm_rows.h: kDirect
            return 0
        line = 64 // staged.itemsize
        stride = -(-(-(-k // step) * step) // line) * 64
        stride += 64 if stride % (128 if tiles else 1024) == 0 else 0
        return max(MAX_WORKERS * _REDUNDANT_ROWS, _most_rows(call)) * stride

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(Gemm, call.op)
        x, w = call.inputs[:2]
        activation = "v" if op.activation == "none" else f"pelton::{op.activation}(v)"
        config = cpp_config(
            f"{symbol}_config",
            {"In": cpp_type(x.dtype), "Compute": cpp_type(op.compute), "Out": cpp_type(op.dtype)},
            {
                "kN": constant(w.shape[0]),
                "kK": constant(w.shape[1]),
                "kOut": op.out_features,
                "kPacked": w.layout == "packed12",
                "kNorm": op.prologue == "rms_norm",
                "kEps": op.eps,
                "kBias": op.bias,
                "kGated": op.gated,
                "kSoftcap": op.softcap,
                "kScale": op.scale,
                "kResidual": op.residual,
                **(_AMX_TILES if self.dot == "amx_bf16" else {}),
                **cpp_members(self.tactic or self._choose(constant(w.shape[1]), op.compute)),
            },
            f"static PELTON_INLINE pelton::F32 activation(pelton::F32 v) {{ return {activation}; }}",
        )
        rows = cpp_count(x.shape[:-1])
        name = "gemm_amx" if self.dot == "amx_bf16" else "gemm"
        return cpp_kernel(symbol, f"{name}.h", f"pelton::{name}<{symbol}_config>(args, worker, {rows});", config)

    def _choose(self, k: int, compute: DType) -> GemmTactic | AmxTactic:
        if self.dot == "amx_bf16":
            return AmxTactic.choose(k)
        return GemmTactic.choose(k, compute, self.vector_bits, widened=self._widens(compute))

    def _widens(self, compute: DType) -> bool:
        return self.dot == "none" and compute.itemsize == 2


def _most_rows(call: KernelCall) -> int:
    """Rows of x at the largest step."""
    return prod(call.inputs[0].max_shape(call.ranges.symbols())[:-1])


KERNELS: tuple[Kernel, ...] = (
    CpuGemm("cpu.gemm.amx_bf16", 512, "amx_bf16"),
    CpuGemm("cpu.gemm.avx512_bf16", 512, "avx512_bf16"),
    CpuGemm("cpu.gemm.avx512", 512, "none"),
    CpuGemm("cpu.gemm.avx2", 256, "none"),
)
