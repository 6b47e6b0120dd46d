"""Kernels as the builder sees them: what each one takes, why it refuses, and the code it emits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..runtime.errors import NoKernelError
from ..runtime.format.plan import Ranges
from ..runtime.format.tensor_type import TensorType
from .ops.base import Op
from .target import Target


@dataclass(frozen=True)
class KernelCall:
    """An op on concrete types, in an engine with these ranges: all that selection and code depend on.

    Layers of equal structure share one kernel, so an op's ``state`` field is empty here and ``states`` holds
    roles ("kv", "history"), not layer names.
    """

    op: Op
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    states: tuple[str, ...]  # roles of the states the launch receives, in order
    ranges: Ranges
    kv_group: int = 0  # which of the step's block tables the "kv" state uses


class Kernel(Protocol):
    """One implementation of one op for one kind of target."""

    @property
    def name(self) -> str:
        """Unique, e.g. "cpu.gemm.avx512_bf16"."""
        ...

    @property
    def op(self) -> type[Op]: ...

    @property
    def generic(self) -> bool:
        """True for the slow path that takes any op of its kind; the build report names its uses."""
        ...

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        """None if the kernel takes the call, else why not (one clause, no full stop)."""
        ...

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        """Bytes of scratch shared by all workers (at most MAX_WORKERS of them) that one launch needs."""
        ...

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        """C++ source of ``extern "C" void symbol(const pelton_step*, void* const*, pelton_worker*)``."""
        ...


MAX_WORKERS = 64  # the largest thread team; kernels size per-worker scratch by it


class KernelRegistry:
    """Ordered kernels; the first that does not refuse wins (put special ones before general ones).

    chosen: kernels that calls have already; what was tuned is selected no more.
    """

    def __init__(self, kernels: Iterable[Kernel], chosen: Mapping[KernelCall, Kernel] | None = None) -> None:
        self._kernels = tuple(kernels)
        self._chosen = dict(chosen or {})
        names = [k.name for k in self._kernels]
        if len(set(names)) != len(names):
            raise ValueError("two kernels share a name")

    def choosing(self, chosen: Mapping[KernelCall, Kernel]) -> KernelRegistry:
        """The same kernels, and these choices."""
        return KernelRegistry(self._kernels, chosen)

    def select(self, call: KernelCall, target: Target) -> Kernel:
        """The kernel for a call; raises NoKernelError with every candidate's reason."""
        if call in self._chosen:
            return self._chosen[call]
        reasons = []
        for kernel, reason in self._tried(call, target):
            if reason is None:
                return kernel
            reasons.append(f"  {kernel.name}: {reason}")
        types = ", ".join(str(t) for t in call.inputs)
        listing = "\n".join(reasons) or "  (no kernel implements this op)"
        raise NoKernelError(f"no kernel for {call.op} on ({types}) for target {target}:\n{listing}")

    def refusals(self, call: KernelCall, target: Target) -> dict[str, str]:
        """Why each kernel tried before the selected one refused, by kernel name (for the build report)."""
        return {kernel.name: reason for kernel, reason in self._tried(call, target) if reason is not None}

    def _tried(self, call: KernelCall, target: Target) -> Iterator[tuple[Kernel, str | None]]:
        """Kernels of the op with their reasons, up to the first that takes the call."""
        for kernel in self._kernels:
            if kernel.op is type(call.op):
                reason = kernel.refuse(call, target)
                yield kernel, reason
                if reason is None:
                    return
