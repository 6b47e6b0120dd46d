"""What the generic CPU kernels share."""

from __future__ import annotations

from typing import ClassVar

from pelton.builder.kernels import KernelCall
from pelton.builder.target import Target
from pelton.runtime.format.dtypes import DType

from ..cpu_code import cpp_type, refuse_target


class GenericKernel:
    """The slow path of one op: any rank, any dims, contiguous operands, no scratch. Slower than a written kernel."""

    generic: ClassVar[bool] = True

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        """None for row-major operands on a CPU, unless the op's own check objects."""
        for type_ in (*call.inputs, *call.outputs):
            if type_.dtype is DType.TOKEN:
                return f"operand {type_} carries no data"
            if type_.layout != "rows":
                return f"operand {type_} has layout {type_.layout}; generic code reads rows only"
        return refuse_target(target) or self.refuse_call(call)

    def refuse_call(self, call: KernelCall) -> str | None:
        """What this op cannot do, beyond the common conditions."""
        return None

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        """None needed."""
        return 0


def operand_pointers(call: KernelCall) -> str:
    """C++ declarations a0, a1, ...: typed pointers to inputs, then outputs."""
    lines = []
    for i, type_ in enumerate((*call.inputs, *call.outputs)):
        spelling = cpp_type(type_.dtype) if i >= len(call.inputs) else f"const {cpp_type(type_.dtype)}"
        lines.append(f"[[maybe_unused]] auto *a{i} = static_cast<{spelling} *>(args[{i}]);")
    return "\n  ".join(lines)
