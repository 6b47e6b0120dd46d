"""GEMM on CPUs: one template; the SKU's dot product decides the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

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

_REDUNDANT_ROWS = 4  # rows that every worker stages for itself (cpp/kernels/gemm.h: kRedundantRows)
_LINE = 64  # bytes that 16 outputs take in one step of the dot product, whatever the type


@dataclass(frozen=True)
class GemmTactic:
    """How a GEMM over many rows is blocked (fewer rows than a tile's stream the panels); results do not depend on it.

    ``tile_rows`` x ``tile_panels`` vectors of 16 outputs are accumulated in registers. The panels of a tile stay in
    the L2 cache for ``super_rows`` rows, ``block_steps`` steps of the dot product at a time.
    """

    tile_rows: int
    tile_panels: int
    super_rows: int
    block_steps: int

    @staticmethod
    def choose(k: int, compute: DType, vector_bits: int) -> GemmTactic:
        """Registers: 32 of 512 bits hold 8 x 2 sums beside their operands, 16 of 256 bits (two to a vector) 6 x 1.

        L2 (1 MiB with AVX-512, 512 KiB on older cores): three quarters hold the panels in use and those read ahead.
        Rows: 256 of them are few enough for the L3 share of a core, and many enough for each read of a panel.
        """
        rows, panels, l2 = (8, 2, 1 << 20) if vector_bits >= 512 else (6, 1, 512 << 10)
        steps = -(-k * compute.itemsize // 4)
        most = l2 * 3 // 4 // (2 * panels * _LINE)
        return GemmTactic(rows, panels, 256, -(-steps // -(-steps // most)))


@dataclass(frozen=True)
class CpuGemm:
    """``dot`` names the 16-bit dot product used, "none" = widen to fp32 and fused multiply-add.

    ``tactic`` None leaves the choice to the model of the SKU.
    """

    name: str
    vector_bits: int
    dot: str
    op: type[Op] = Gemm
    generic: bool = False
    tactic: GemmTactic | None = None

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        reason = refuse_target(target, self.vector_bits)
        if reason or target.sku is None:
            return reason
        op = expect(Gemm, call.op)
        dot = target.sku.dot if op.compute is DType.BF16 else "none"
        if dot != self.dot:
            return f"{op.compute.value} on {target.sku.name} uses dot product {dot!r}, this kernel uses {self.dot!r}"
        if call.inputs[1].layout != "panel16" or call.inputs[0].layout != "rows":
            return f"needs x in rows and w in panel16, got {call.inputs[0]} and {call.inputs[1]}"
        if not call.inputs[0].dtype.is_float or not op.dtype.is_float or not op.compute.is_float:
            return "takes floats only"
        return None

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        op = expect(Gemm, call.op)
        staged = DType.BF16 if self.dot == "avx512_bf16" else DType.F32
        x = call.inputs[0]
        k = constant(x.shape[-1])
        step = 1 if op.compute is DType.F32 else 2
        if op.prologue == "none" and x.dtype == staged == op.compute and k % step == 0:
            return 0
        rows = 1
        for dim in x.max_shape(call.ranges.symbols())[:-1]:
            rows *= dim
        line = 64 // staged.itemsize
        stride = -(-(-(-k // step) * step) // line) * 64
        stride += 64 if stride % 1024 == 0 else 0
        return max(MAX_WORKERS * _REDUNDANT_ROWS, rows) * stride

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
                "kNorm": op.prologue == "rms_norm",
                "kEps": op.eps,
                "kBias": op.bias,
                "kGated": op.gated,
                "kSoftcap": op.softcap,
                "kScale": op.scale,
                "kResidual": op.residual,
                **cpp_members(self.tactic or GemmTactic.choose(constant(w.shape[1]), op.compute, self.vector_bits)),
            },
            f"static PELTON_INLINE pelton::F32 activation(pelton::F32 v) {{ return {activation}; }}",
        )
        rows = cpp_count(x.shape[:-1])
        return cpp_kernel(symbol, "gemm.h", f"pelton::gemm<{symbol}_config>(args, worker, {rows});", config)


KERNELS: tuple[Kernel, ...] = (
    CpuGemm("cpu.gemm.avx512_bf16", 512, "avx512_bf16"),
    CpuGemm("cpu.gemm.avx512", 512, "none"),
    CpuGemm("cpu.gemm.avx2", 256, "none"),
)
