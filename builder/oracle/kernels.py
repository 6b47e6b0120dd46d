"""The reference target's kernels: one for each op, all of them the op's own reference meaning."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.errors import BuildError
from ..kernels import KernelCall
from ..ops import OPS, Op
from ..target import Target


@dataclass(frozen=True)
class ReferenceKernel:
    """Stands for ``op.reference`` in a plan; the reference driver looks the op up by name."""

    op: type[Op]
    generic: bool = False

    @property
    def name(self) -> str:
        return f"reference.{self.op.name}"

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        return None if target.kind == "reference" else "it runs on the reference target only"

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        return 0

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        raise BuildError(f"{self.name} has no code; the reference driver runs op meanings")


REFERENCE_KERNELS: tuple[ReferenceKernel, ...] = tuple(ReferenceKernel(op) for op in OPS.values())
