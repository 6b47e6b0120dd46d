"""RMS norm on CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import RMSNorm
from pelton.builder.target import Target

from ..cpu_code import (
    WrittenKernel,
    constant,
    cpp_config,
    cpp_count,
    cpp_kernel,
    cpp_type,
    expect,
    refuse_floats,
    refuse_target,
)


@dataclass(frozen=True)
class CpuRMSNorm(WrittenKernel):
    name: str = "cpu.rms_norm"
    op: type[Op] = RMSNorm

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        return refuse_target(target) or refuse_floats([*call.inputs, *call.outputs])

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(RMSNorm, call.op)
        x = call.inputs[0]
        config = cpp_config(
            f"{symbol}_config",
            {"In": cpp_type(x.dtype), "Out": cpp_type(op.dtype)},
            {"kN": constant(x.shape[-1]), "kEps": op.eps, "kResidual": op.residual},
        )
        body = f"pelton::rms_norm<{symbol}_config>(args, worker, {cpp_count(x.shape[:-1])});"
        return cpp_kernel(symbol, "norm.h", body, config)


KERNELS: tuple[Kernel, ...] = (CpuRMSNorm(),)
