"""Rotary tables and rotation on CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Rope, RopeTable
from pelton.builder.target import Target

from ..cpu_code import WrittenKernel, constant, cpp_config, cpp_count, cpp_kernel, expect


@dataclass(frozen=True)
class CpuRopeTable(WrittenKernel):
    name: str = "cpu.rope_table"
    op: type[Op] = RopeTable

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(RopeTable, call.op)
        positions, frequencies = call.inputs
        config = cpp_config(f"{symbol}_config", {}, {"kHalf": constant(frequencies.shape[0]), "kScale": op.scale})
        body = f"pelton::rope_table<{symbol}_config>(args, worker, {cpp_count(positions.shape)});"
        return cpp_kernel(symbol, "rope.h", body, config)


@dataclass(frozen=True)
class CpuRope(WrittenKernel):
    name: str = "cpu.rope"
    op: type[Op] = Rope

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(Rope, call.op)
        tokens, heads, dim = call.inputs[0].shape
        config = cpp_config(
            f"{symbol}_config",
            {},
            {
                "kHeads": constant(heads),
                "kDim": constant(dim),
                "kRotary": op.rotary_dim,
                "kInterleaved": op.interleaved,
            },
        )
        body = f"pelton::rope<{symbol}_config>(args, worker, {cpp_count([tokens])});"
        return cpp_kernel(symbol, "rope.h", body, config)


KERNELS: tuple[Kernel, ...] = (CpuRopeTable(), CpuRope())
