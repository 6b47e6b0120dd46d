"""Generic CPU kernels of the ops that only move elements: reshape, transpose, expand, slice, concat, gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.generic import Concat, Expand, Gather, Reshape, Slice, Transpose
from pelton.builder.target import Target

from ..cpu_code import constant, cpp_kernel, expect
from .base import GenericKernel, operand_pointers
from .space import Extent, Space, broadcast, product, row_major


def _copy(space: Space, source: str, target: str) -> str:
    """A block that copies element by element: operand 0 of the space from ``source`` to operand 1 at ``target``."""
    return f"""{{
  {space.declare(outer_only=True)}
  pelton::for_rows(worker, dims, strides, length, inner, [&](const int64_t *at, int64_t n) {{
      for (int64_t i = 0; i < n; ++i) {target}[at[1] + i * inner[1]] = {source}[at[0] + i * inner[0]];
  }});
  }}"""


def _copy_kernel(call: KernelCall, symbol: str, strides: Sequence[Extent], source: str = "a0") -> str:
    """A kernel whose output element i, j, ... is ``source`` at i, j, ... times ``strides``."""
    shape = call.outputs[0].shape
    space = Space.make(shape, strides, row_major(shape))
    return cpp_kernel(symbol, "generic.h", f"{operand_pointers(call)}\n  {_copy(space, source, 'a1')}")


@dataclass(frozen=True)
class GenericReshape(GenericKernel):
    """A plain copy: elements keep their order."""

    name: ClassVar[str] = "cpu.generic.reshape"
    op: ClassVar[type[Op]] = Reshape

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Both sides are contiguous, so one axis is left."""
        return _copy_kernel(call, symbol, row_major(call.outputs[0].shape))


@dataclass(frozen=True)
class GenericTranspose(GenericKernel):
    """A copy with permuted strides."""

    name: ClassVar[str] = "cpu.generic.transpose"
    op: ClassVar[type[Op]] = Transpose

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Output axis i is input axis axes[i]."""
        op = expect(Transpose, call.op)
        own = row_major(call.inputs[0].shape)
        return _copy_kernel(call, symbol, [own[a] for a in op.axes])


@dataclass(frozen=True)
class GenericExpand(GenericKernel):
    """A copy with strides of 0."""

    name: ClassVar[str] = "cpu.generic.expand"
    op: ClassVar[type[Op]] = Expand

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Repeated axes have stride 0."""
        return _copy_kernel(call, symbol, broadcast(call.inputs[0].shape, call.outputs[0].shape))


@dataclass(frozen=True)
class GenericSlice(GenericKernel):
    """A copy that starts inside and may skip."""

    name: ClassVar[str] = "cpu.generic.slice"
    op: ClassVar[type[Op]] = Slice

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """The axis' stride is multiplied by the step; the start moves the base pointer."""
        op = expect(Slice, call.op)
        strides = list(row_major(call.inputs[0].shape))
        start = strides[op.axis] * Extent(op.start)
        strides[op.axis] = strides[op.axis] * Extent(op.step)
        return _copy_kernel(call, symbol, strides, f"(a0 + {start.cpp})")


@dataclass(frozen=True)
class GenericConcat(GenericKernel):
    """One copy an operand, side by side in the output."""

    name: ClassVar[str] = "cpu.generic.concat"
    op: ClassVar[type[Op]] = Concat

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Blocks follow one another along the axis."""
        axis = expect(Concat, call.op).axis
        out = row_major(call.outputs[0].shape)
        blocks, start = [], 0
        for i, type_ in enumerate(call.inputs):
            space = Space.make(type_.shape, row_major(type_.shape), out)
            place = f"(a{len(call.inputs)} + {(out[axis] * Extent(start)).cpp})"
            blocks.append(_copy(space, f"a{i}", place))
            start += constant(type_.shape[axis])
        return cpp_kernel(symbol, "generic.h", "\n  ".join([operand_pointers(call), *blocks]))


@dataclass(frozen=True)
class GenericGather(GenericKernel):
    """Blocks picked by index; negative indices count from the end, those outside are clamped."""

    name: ClassVar[str] = "cpu.generic.gather"
    op: ClassVar[type[Op]] = Gather

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Every (outer, index) pair copies the axes after the gathered one."""
        data, index = call.inputs
        axis = expect(Gather, call.op).axis % data.rank
        block = product([Extent.of(d) for d in data.shape[axis + 1 :]])
        size = constant(data.shape[axis])
        outer = product([Extent.of(d) for d in data.shape[:axis]])
        count = product([Extent.of(d) for d in index.shape])
        body = f"""{operand_pointers(call)}
  const int64_t block = {block.cpp}, count = {count.cpp};
  const int64_t dims[2] = {{{outer.cpp}, count}};
  const int64_t strides[3][2] = {{{{{size} * block, 0}}, {{0, 1}}, {{count * block, block}}}};
  pelton::for_points(worker, dims, strides, [&](const int64_t *at) {{
      int64_t pick = a1[at[1]];
      if (pick < 0) pick += {size};
      pick = pick < 0 ? 0 : pick >= {size} ? {size - 1} : pick;
      for (int64_t i = 0; i < block; ++i) a2[at[2] + i] = a0[at[0] + pick * block + i];
  }});"""
        return cpp_kernel(symbol, "generic.h", body)


KERNELS: tuple[Kernel, ...] = (
    GenericReshape(),
    GenericTranspose(),
    GenericExpand(),
    GenericSlice(),
    GenericConcat(),
    GenericGather(),
)
