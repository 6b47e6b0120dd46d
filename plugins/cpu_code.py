"""What every CPU kernel's emitter needs: C++ spellings of types, numbers and dims, and common refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pelton.builder.kernels import KernelCall
from pelton.builder.ops.base import Op
from pelton.builder.target import Sku, Target
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import Dim, TensorType

_CPP = {
    DType.F32: "float",
    DType.F16: "pelton::f16",
    DType.BF16: "pelton::bf16",
    DType.I64: "int64_t",
    DType.I32: "int32_t",
    DType.U32: "uint32_t",
    DType.I8: "int8_t",
    DType.U8: "uint8_t",
    DType.BOOL: "uint8_t",
}
_SYMBOLS = {"T": "num_tokens", "S": "num_seqs", "R": "num_rows", "C": "row_count"}


AnyOp = TypeVar("AnyOp", bound=Op)


def expect(kind: type[AnyOp], op: Op) -> AnyOp:
    """The op as the type a kernel was registered for."""
    if not isinstance(op, kind):
        raise TypeError(f"a kernel for {kind.name} was given {op}")
    return op


def constant(dim: Dim) -> int:
    """A dim that ``infer`` has already found to be constant."""
    if isinstance(dim, str):
        raise TypeError(f"the symbolic dim {dim} must be constant here")
    return dim


def cpp_type(dtype: DType) -> str:
    """The C++ element type of a dtype."""
    return _CPP[dtype]


def cpp_float(value: float) -> str:
    """A float literal with exactly the fp32 value nearest to ``value``."""
    if value != value:
        return '__builtin_nanf("")'
    if value in (float("inf"), float("-inf")):
        return ("-" if value < 0 else "") + "__builtin_huge_valf()"
    return f"{float(value).hex()}f"


def cpp_count(dims: Sequence[Dim]) -> str:
    """The product of dims as an int64_t expression over ``step``."""
    constant = 1
    factors = []
    for dim in dims:
        if isinstance(dim, int):
            constant *= dim
        else:
            factors.append(f"step->{_SYMBOLS[dim]}")
    return " * ".join([f"int64_t{{{constant}}}", *factors])


def cpp_config(
    name: str, types: Mapping[str, str], values: Mapping[str, int | bool | float | None], *functions: str
) -> str:
    """A struct that a kernel template takes: type aliases, static constexpr members (None = 0.0f), functions."""
    lines = [f"struct {name} {{"]
    lines += [f"  {function}" for function in functions]
    lines += [f"  using {alias} = {spelling};" for alias, spelling in types.items()]
    for member, value in values.items():
        if isinstance(value, bool):
            lines.append(f"  static constexpr bool {member} = {'true' if value else 'false'};")
        elif isinstance(value, int):
            lines.append(f"  static constexpr int64_t {member} = {value};")
        else:
            lines.append(f"  static constexpr float {member} = {cpp_float(value if value is not None else 0.0)};")
    return "\n".join([*lines, "};"])


def cpp_members(tactic: Any) -> dict[str, int]:
    """The integer fields of a dataclass as members of a config: block_rows -> kBlockRows."""
    values = dataclasses.asdict(tactic)
    return {"k" + name.title().replace("_", ""): int(value) for name, value in values.items()}


def cpp_kernel(symbol: str, header: str, body: str, prelude: str = "") -> str:
    """A kernel's source: the header it instantiates, declarations, and the exported function."""
    return (
        f'#include "pelton/abi.h"\n#include "{header}"\n{prelude}\n'
        f'extern "C" void {symbol}(const pelton_step *step, void *const *args, pelton_worker *worker) {{\n'
        f"  {body}\n}}\n"
    )


def refuse_target(target: Target, vector_bits: int | None = None) -> str | None:
    """None if the target is a CPU (with vectors of this many bits, if given)."""
    if target.kind != "cpu" or target.sku is None:
        return f"target {target} is not a CPU"
    if vector_bits is not None and target.sku.vector_bits != vector_bits:
        return f"needs {vector_bits}-bit vectors, {target.sku.name} has {target.sku.vector_bits}"
    return None


def sku_of(target: Target) -> Sku:
    """The SKU of a target that ``refuse_target`` took."""
    if target.sku is None:
        raise TypeError(f"target {target} has no SKU")
    return target.sku


class WrittenKernel:
    """What most kernels written for one op are: for any CPU, without scratch. A kernel that is not says so itself."""

    generic: ClassVar[bool] = False

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        """None on any CPU."""
        return refuse_target(target)

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        """None needed."""
        return 0


def refuse_floats(types: Sequence[TensorType]) -> str | None:
    """None if every operand holds floats (tokens aside)."""
    for type_ in types:
        if not type_.dtype.is_float and type_.dtype is not DType.TOKEN:
            return f"operand {type_} is not a float tensor"
    return None


__all__ = [
    "WrittenKernel",
    "constant",
    "cpp_config",
    "cpp_count",
    "cpp_float",
    "cpp_kernel",
    "cpp_members",
    "cpp_type",
    "expect",
    "refuse_floats",
    "refuse_target",
    "sku_of",
]
