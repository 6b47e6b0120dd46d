"""Embedding lookup and row gather on CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Embedding, GatherRows
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
class CpuEmbedding(WrittenKernel):
    name: str = "cpu.embedding"
    op: type[Op] = Embedding

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        return refuse_target(target) or refuse_floats([call.inputs[1], *call.outputs])

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        op = expect(Embedding, call.op)
        ids, table = call.inputs
        config = cpp_config(
            f"{symbol}_config",
            {"Id": cpp_type(ids.dtype), "Table": cpp_type(table.dtype), "Out": cpp_type(op.dtype)},
            {
                "kRows": constant(table.shape[0]),
                "kWidth": constant(table.shape[1]),
                "kPanels": table.layout == "panel16",
                "kPacked": table.layout == "packed12",
                "kScale": op.scale,
            },
        )
        body = f"pelton::embedding<{symbol}_config>(args, worker, {cpp_count(ids.shape)});"
        return cpp_kernel(symbol, "embedding.h", body, config)


@dataclass(frozen=True)
class CpuGatherRows(WrittenKernel):
    name: str = "cpu.gather_rows"
    op: type[Op] = GatherRows

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        x = call.inputs[0]
        config = cpp_config(f"{symbol}_config", {"T": cpp_type(x.dtype)}, {"kWidth": constant(x.shape[1])})
        body = f"pelton::gather_rows<{symbol}_config>(step, args, worker);"
        return cpp_kernel(symbol, "embedding.h", body, config)


KERNELS: tuple[Kernel, ...] = (CpuEmbedding(), CpuGatherRows())
