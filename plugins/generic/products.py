"""Generic CPU kernels of reductions and products: reduce, softmax, matmul, linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.generic import Linear, MatMul, Reduce, Softmax
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import constant, cpp_kernel, cpp_type, expect
from .base import GenericKernel, operand_pointers
from .space import Extent, Space, broadcast, product, row_major

_FLOAT_STEP = {
    "sum": "total + x",
    "mean": "total + x",
    "max": "(total > x) | (total != total) ? total : x",
    "min": "(total < x) | (total != total) ? total : x",
}
_INT_STEP = {
    "sum": "pelton::wrap_add(total, x)",
    "mean": "pelton::wrap_add(total, x)",
    "max": "total > x ? total : x",
    "min": "total < x ? total : x",
}
_BOOL_STEP = {"sum": "E(total | x)", "mean": "E(total | x)", "max": "E(total | x)", "min": "E(total & x)"}


@dataclass(frozen=True)
class GenericReduce(GenericKernel):
    """One output at a time, in index order; floats accumulate in fp32."""

    name: ClassVar[str] = "cpu.generic.reduce"
    op: ClassVar[type[Op]] = Reduce

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Nested loops over the reduced axes inside the space of the kept ones."""
        op, (x,) = expect(Reduce, call.op), call.inputs
        own = row_major(x.shape)
        reduced = sorted(a % x.rank for a in op.axes)
        kept = [a for a in range(x.rank) if a not in reduced]
        space = Space.make([x.shape[a] for a in kept], [own[a] for a in kept], row_major([x.shape[a] for a in kept]))
        loops = "".join(f"for (int64_t i{a} = 0; i{a} < {x.shape[a]}; ++i{a}) " for a in reduced)
        place = " + ".join(["at[0]", *(f"i{a} * {own[a].cpp}" for a in reduced)])
        count = product([Extent.of(constant(x.shape[a])) for a in reduced]).constant
        body = f"""{operand_pointers(call)}
  using E = {cpp_type(x.dtype)};
  {space.declare(outer_only=False)}
  pelton::for_points(worker, dims, strides, [&](const int64_t *at) {{
      bool first = true;
      {"float" if x.dtype.is_float else "E"} total = 0;
      {loops}{{
        const auto x = {"pelton::to_float" if x.dtype.is_float else ""}(a0[{place}]);
        total = first ? x : {_step(op.kind, x.dtype)};
        first = false;
      }}
      a1[at[1]] = {_finish(op.kind, x.dtype, count)};
  }});"""
        return cpp_kernel(symbol, "generic.h", body)


def _step(kind: str, dtype: DType) -> str:
    return (_FLOAT_STEP if dtype.is_float else _BOOL_STEP if dtype is DType.BOOL else _INT_STEP)[kind]


def _finish(kind: str, dtype: DType, count: int) -> str:
    if dtype.is_float:
        return f"pelton::round_to<E>(total{f' / {count}.0f' if kind == 'mean' else ''})"
    if kind == "mean" and dtype is not DType.BOOL:
        return f"static_cast<E>(static_cast<int64_t>(static_cast<double>(total) / {count}.0))"
    return "total"


@dataclass(frozen=True)
class GenericSoftmax(GenericKernel):
    """One line at a time, at any stride."""

    name: ClassVar[str] = "cpu.generic.softmax"
    op: ClassVar[type[Op]] = Softmax

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """The space of the other axes; input and output have the same strides."""
        op, (x,) = expect(Softmax, call.op), call.inputs
        own = row_major(x.shape)
        axis = op.axis % x.rank
        kept = [a for a in range(x.rank) if a != axis]
        space = Space.make([x.shape[a] for a in kept], [own[a] for a in kept])
        body = f"""{operand_pointers(call)}
  {space.declare(outer_only=False)}
  pelton::for_points(worker, dims, strides, [&](const int64_t *at) {{
      const int64_t stride = {own[axis].cpp};
      pelton::softmax_line(a0 + at[0], a1 + at[0], {x.shape[axis]}, stride, stride);
  }});"""
        return cpp_kernel(symbol, "generic.h", body)


@dataclass(frozen=True)
class GenericMatMul(GenericKernel):
    """One output row at a time; terms are added in index order, each step rounded to fp32."""

    name: ClassVar[str] = "cpu.generic.matmul"
    op: ClassVar[type[Op]] = MatMul

    def refuse_call(self, call: KernelCall) -> str | None:
        if not call.inputs[0].dtype.is_float:
            return f"matmul of {call.inputs[0].dtype.value} is not supported, only floats"
        return None

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """The space of batch dims and output rows."""
        a, b = call.inputs
        shape = call.outputs[0].shape
        rows, zero = shape[:-1], Extent(0)
        k, n = constant(a.shape[-1]), Extent.of(shape[-1])
        a_strides = broadcast(a.shape, (*rows, k))[:-1]
        b_strides = (*broadcast(b.shape, (*shape[:-2], *b.shape[-2:]))[:-2], zero)
        space = Space.make(rows, a_strides, b_strides, row_major(shape)[:-1])
        body = f"""{operand_pointers(call)}
  {space.declare(outer_only=False)}
  const int64_t n = {n.cpp};
  pelton::for_points(worker, dims, strides, [&](const int64_t *at) {{
      pelton::matmul_row(a0 + at[0], a1 + at[1], a2 + at[2], n, {k}, n);
  }});"""
        return cpp_kernel(symbol, "generic.h", body)


@dataclass(frozen=True)
class GenericLinear(GenericKernel):
    """Dot products over rows-layout weights, 16 lanes each in a fixed order."""

    name: ClassVar[str] = "cpu.generic.linear"
    op: ClassVar[type[Op]] = Linear

    def refuse_call(self, call: KernelCall) -> str | None:
        for type_ in call.inputs:
            if not type_.dtype.is_float:
                return f"operand {type_} is not a float tensor"
        return None

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Workers take outputs; every weight row is read once."""
        op, (x, w) = expect(Linear, call.op), call.inputs[:2]
        n, k = (constant(d) for d in w.shape)
        rows = product([Extent.of(d) for d in x.shape[:-1]])
        bias, out = ("a2", "a3") if op.bias else ("static_cast<const float *>(nullptr)", "a2")
        body = f"""{operand_pointers(call)}
  pelton::linear<{n}, {k}>(worker, {rows.cpp}, a0, a1, {bias}, {out});"""
        return cpp_kernel(symbol, "generic.h", body)


KERNELS: tuple[Kernel, ...] = (GenericReduce(), GenericSoftmax(), GenericMatMul(), GenericLinear())
