"""Generic CPU kernels of the elementwise ops: unary, binary, where, cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pelton.builder.kernels import Kernel, KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.ops.elementwise import Binary, Cast, Unary, Where
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import cpp_kernel, cpp_type
from .base import GenericKernel, operand_pointers
from .space import Space, broadcast, row_major

#: 16 floats at a time, in fp32.
_FLOAT_UNARY = {
    **{kind: f"pelton::{kind}(x)" for kind in ("abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin")},
    **{kind: f"pelton::{kind}(x)" for kind in ("cos", "tanh", "erf", "sigmoid", "silu", "relu", "floor")},
    **{kind: f"pelton::{kind}(x)" for kind in ("gelu_erf", "gelu_tanh")},
    "neg": "-x",
    "not": "pelton::is_zero(x)",
}
_FLOAT_BINARY = {
    **{kind: f"x {sign} y" for kind, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
    "pow": "pelton::power(x, y)",
    "max": "pelton::maximum(x, y)",
    "min": "pelton::minimum(x, y)",
}
#: One element at a time. E is the element type.
_INT_UNARY = {
    "neg": "pelton::wrap_sub(E{0}, x)",
    "abs": "x < 0 ? pelton::wrap_sub(E{0}, x) : x",
    "square": "pelton::wrap_mul(x, x)",
    "relu": "x < 0 ? E{0} : x",
    "floor": "x",
    "not": "E(x == 0)",
}
_INT_BINARY = {
    "add": "pelton::wrap_add(x, y)",
    "sub": "pelton::wrap_sub(x, y)",
    "mul": "pelton::wrap_mul(x, y)",
    "div": "pelton::cut_div(x, y)",
    "pow": "pelton::wrap_pow(x, y)",
    "max": "x < y ? y : x",
    "min": "y < x ? y : x",
}
_BOOL_UNARY = {"not": "E(x == 0)"}
_BOOL_BINARY = {"add": "E(x | y)", "mul": "E(x & y)", "max": "E(x | y)", "min": "E(x & y)"}
#: On elements of any type, floats widened.
_COMPARISONS = {
    **{kind: f"x {sign} y" for kind, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="))},
    **{kind: f"x {sign} y" for kind, sign in (("gt", ">"), ("ge", ">="))},
    "and": "(x != 0) & (y != 0)",
    "or": "(x != 0) | (y != 0)",
}


def _space(call: KernelCall) -> Space:
    shape = call.outputs[0].shape
    return Space.make(shape, *(broadcast(t.shape, shape) for t in call.inputs), row_major(shape))


def _lane_loop(call: KernelCall, symbol: str, expression: str) -> str:
    """A kernel that computes ``expression`` over x (and y), 16 lanes of fp32 at a time."""
    space = _space(call)
    count = len(call.inputs)
    loads = "".join(
        f"        const pelton::F32 {v} = pelton::load_strided(a{k} + at[{k}] + i * inner[{k}], inner[{k}], lanes);\n"
        for k, v in zip(range(count), "xy", strict=False)
    )
    body = f"""{operand_pointers(call)}
  {space.declare(outer_only=True)}
  pelton::for_rows(worker, dims, strides, length, inner, [&](const int64_t *at, int64_t n) {{
      for (int64_t i = 0; i < n; i += pelton::kLanes) {{
        const int lanes = pelton::lanes_left(n, i);
{loads}        pelton::store_strided(a{count} + at[{count}] + i * inner[{count}], {expression}, inner[{count}], lanes);
      }}
  }});"""
    return cpp_kernel(symbol, "generic.h", body)


def _element_loop(call: KernelCall, symbol: str, names: str, expression: str, widen: bool = False) -> str:
    """A kernel that computes ``expression`` over one element of each operand (E: the last input's type)."""
    space = _space(call)
    count = len(call.inputs)
    wrap = "pelton::to_float(" if widen else "("
    loads = "".join(f"        const auto {v} = {wrap}a{k}[at[{k}] + i * inner[{k}]]);\n" for k, v in enumerate(names))
    body = f"""{operand_pointers(call)}
  using E [[maybe_unused]] = {cpp_type(call.inputs[-1].dtype)};
  {space.declare(outer_only=True)}
  pelton::for_rows(worker, dims, strides, length, inner, [&](const int64_t *at, int64_t n) {{
      for (int64_t i = 0; i < n; ++i) {{
{loads}        a{count}[at[{count}] + i * inner[{count}]] = {expression};
      }}
  }});"""
    return cpp_kernel(symbol, "generic.h", body)


@dataclass(frozen=True)
class GenericUnary(GenericKernel):
    """Any unary kind that makes sense for its dtype."""

    name: ClassVar[str] = "cpu.generic.unary"
    op: ClassVar[type[Op]] = Unary

    def refuse_call(self, call: KernelCall) -> str | None:
        if _kind(call) not in _unary_table(call):
            return f"unary {_kind(call)} has no meaning for {call.inputs[0].dtype.value}"
        return None

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Vectors for floats, elements for the rest."""
        expression = _unary_table(call)[_kind(call)]
        if call.inputs[0].dtype.is_float:
            return _lane_loop(call, symbol, expression)
        return _element_loop(call, symbol, "x", expression)


@dataclass(frozen=True)
class GenericBinary(GenericKernel):
    """Any binary kind that makes sense for its dtype, with broadcasting."""

    name: ClassVar[str] = "cpu.generic.binary"
    op: ClassVar[type[Op]] = Binary

    def refuse_call(self, call: KernelCall) -> str | None:
        if _kind(call) not in _COMPARISONS and _kind(call) not in _binary_table(call):
            return f"binary {_kind(call)} has no meaning for {call.inputs[0].dtype.value}"
        return None

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Vectors for float arithmetic, elements for the rest."""
        kind, is_float = _kind(call), call.inputs[0].dtype.is_float
        if kind in _COMPARISONS:
            return _element_loop(call, symbol, "xy", f"uint8_t({_COMPARISONS[kind]})", widen=is_float)
        expression = _binary_table(call)[kind]
        return _lane_loop(call, symbol, expression) if is_float else _element_loop(call, symbol, "xy", expression)


@dataclass(frozen=True)
class GenericWhere(GenericKernel):
    """Selection, on any dtype."""

    name: ClassVar[str] = "cpu.generic.where"
    op: ClassVar[type[Op]] = Where

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Elements are moved, not computed with."""
        return _element_loop(call, symbol, "cxy", "c != 0 ? x : y")


@dataclass(frozen=True)
class GenericCast(GenericKernel):
    """Any dtype to any dtype."""

    name: ClassVar[str] = "cpu.generic.cast"
    op: ClassVar[type[Op]] = Cast

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """Vectors between float types, elements for the rest."""
        to = call.outputs[0].dtype
        if to.is_float and call.inputs[0].dtype.is_float:
            return _lane_loop(call, symbol, "x")
        to_bool = "true" if to is DType.BOOL else "false"
        return _element_loop(call, symbol, "x", f"pelton::convert<{cpp_type(to)}, {to_bool}>(x)")


def _kind(call: KernelCall) -> str:
    if not isinstance(call.op, Unary | Binary):
        raise TypeError(f"an elementwise kernel was given {call.op}")
    return call.op.kind


def _unary_table(call: KernelCall) -> dict[str, str]:
    return _table(call, _FLOAT_UNARY, _INT_UNARY, _BOOL_UNARY)


def _binary_table(call: KernelCall) -> dict[str, str]:
    return _table(call, _FLOAT_BINARY, _INT_BINARY, _BOOL_BINARY)


def _table(
    call: KernelCall, floats: dict[str, str], integers: dict[str, str], booleans: dict[str, str]
) -> dict[str, str]:
    dtype = call.inputs[0].dtype
    return floats if dtype.is_float else booleans if dtype is DType.BOOL else integers


KERNELS: tuple[Kernel, ...] = (GenericUnary(), GenericBinary(), GenericWhere(), GenericCast())
