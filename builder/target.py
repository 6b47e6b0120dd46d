"""Targets: what an engine section is compiled for, and the SKU table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.drivers.cpu.host import host_features
from ..runtime.errors import BuildError


@dataclass(frozen=True)
class Sku:
    """A class of CPUs by features. ``features`` are the names in /proc/cpuinfo that the code needs.

    ``dot``: the bf16 dot product of GEMM and attention ("none" widens to fp32 FMA).
    """

    name: str
    vector_bits: int
    features: tuple[str, ...]
    compiler_flags: tuple[str, ...]
    dot: str = "none"  # none | avx512_bf16 | amx_bf16
    rank: int = 0  # the runtime picks the highest rank that the host supports


@dataclass(frozen=True)
class Target:
    """kind "cpu" with a SKU, or kind "reference" (runs anywhere, by op meanings)."""

    kind: str
    sku: Sku | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.sku.name}" if self.sku else self.kind


_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_V3_FLAGS = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mmovbe", "-mlzcnt")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_V4_FLAGS = (*_V3_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_BF16 = (*_V4, "avx512_vnni", "avx512_bf16")
_BF16_FLAGS = (*_V4_FLAGS, "-mavx512vnni", "-mavx512bf16")
_SPR = (*_BF16, "amx_tile", "amx_int8", "amx_bf16", "avx512_fp16")
_SPR_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512fp16")

CPU_SKUS: dict[str, Sku] = {
    sku.name: sku
    for sku in (
        Sku("x86-64-v3", 256, _V3, _V3_FLAGS, "none", 30),
        Sku("x86-64-v4", 512, _V4, _V4_FLAGS, "none", 40),
        Sku("x86-64-v4+vnni+bf16", 512, _BF16, _BF16_FLAGS, "avx512_bf16", 50),
        Sku("sapphirerapids", 512, _SPR, _SPR_FLAGS, "amx_bf16", 60),
    )
}


def host() -> Target:
    """The best target this machine can run; BuildError if it can run none."""
    features = host_features()
    fitting = [sku for sku in CPU_SKUS.values() if features.issuperset(sku.features)]
    if not fitting:
        raise BuildError(
            "--target host: this CPU has no SKU in the table (x86-64-v3 is the least). "
            f"Name the machine the engine is for: --target {{{','.join(CPU_SKUS)}}}"
        )
    return Target("cpu", max(fitting, key=lambda sku: sku.rank))


def resolve_targets(names: Sequence[str]) -> tuple[Target, ...]:
    """Targets by name ("host", "reference", a SKU, or "cpu:SKU"), each once, in the order given."""
    found: dict[str, Target] = {}
    for name in names:
        sku = name.removeprefix("cpu:")
        if name == "host":
            target = host()
        elif name == "reference":
            target = Target("reference")
        elif sku in CPU_SKUS:
            target = Target("cpu", CPU_SKUS[sku])
        else:
            raise BuildError(f"unknown target {name!r}; choose from host, reference, {', '.join(CPU_SKUS)}")
        found[str(target)] = target
    if not found:
        raise BuildError("no target given; --target host is the default")
    return tuple(found.values())
