"""Iteration spaces of generic kernels: dims and strides that are products of constants and step symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.runtime.format.tensor_type import Dim

from ..cpu_code import cpp_count


@dataclass(frozen=True)
class Extent:
    """A number known when the step runs: ``constant`` times the values of ``symbols``."""

    constant: int
    symbols: tuple[str, ...] = ()

    @staticmethod
    def of(dim: Dim) -> Extent:
        return Extent(1, (dim,)) if isinstance(dim, str) else Extent(dim)

    def __mul__(self, other: Extent) -> Extent:
        constant = self.constant * other.constant
        return Extent(constant, tuple(sorted(self.symbols + other.symbols)) if constant else ())

    @property
    def cpp(self) -> str:
        """An int64_t expression over ``step``."""
        return cpp_count((self.constant, *self.symbols))


ONE = Extent(1)
ZERO = Extent(0)


def product(dims: Sequence[Extent]) -> Extent:
    """The product of extents (1 for none)."""
    result = ONE
    for dim in dims:
        result = result * dim
    return result


def row_major(shape: Sequence[Dim]) -> tuple[Extent, ...]:
    """Strides, in elements, of a contiguous tensor."""
    dims = [Extent.of(d) for d in shape]
    return tuple(product(dims[i + 1 :]) for i in range(len(dims)))


def broadcast(shape: Sequence[Dim], to: Sequence[Dim]) -> tuple[Extent, ...]:
    """Strides with which a contiguous tensor is read as if it had shape ``to`` (numpy's rule)."""
    own = row_major(shape)
    missing = len(to) - len(shape)
    return tuple(
        ZERO if i < missing or (shape[i - missing] == 1 and to[i] != 1) else own[i - missing] for i in range(len(to))
    )


@dataclass(frozen=True)
class Space:
    """Dims to iterate over in row-major order, and each operand's strides over them."""

    dims: tuple[Extent, ...]
    strides: tuple[tuple[Extent, ...], ...]

    @staticmethod
    def make(shape: Sequence[Dim], *strides: Sequence[Extent]) -> Space:
        """A space over ``shape`` with axes merged wherever all operands allow it; it has one axis at least."""
        dims: list[Extent] = []
        merged: list[list[Extent]] = [[] for _ in strides]
        for axis, size in enumerate(shape):
            dim = Extent.of(size)
            if dim == ONE:
                continue
            step = [s[axis] for s in strides]
            if dims and all(m[-1] == s * dim for m, s in zip(merged, step, strict=True)):
                dims[-1] = dims[-1] * dim
                for m, s in zip(merged, step, strict=True):
                    m[-1] = s
            else:
                dims.append(dim)
                for m, s in zip(merged, step, strict=True):
                    m.append(s)
        if not dims:
            return Space((ONE,), tuple((ZERO,) for _ in strides))
        return Space(tuple(dims), tuple(map(tuple, merged)))

    def declare(self, outer_only: bool) -> str:
        """C++ declarations of dims and strides; ``outer_only`` splits the last axis off as length and inner."""
        dims = list(self.dims[:-1]) if outer_only else list(self.dims)
        strides = [list(s[:-1]) if outer_only else list(s) for s in self.strides]
        if not dims:
            dims, strides = [ONE], [[ZERO] for _ in strides]
        rows = ", ".join(f"{{{_listed(s)}}}" for s in strides)
        lines = [
            f"const int64_t dims[{len(dims)}] = {{{_listed(dims)}}};",
            f"const int64_t strides[{len(strides)}][{len(dims)}] = {{{rows}}};",
        ]
        if outer_only:
            lines.append(f"const int64_t length = {self.dims[-1].cpp};")
            lines.append(f"const int64_t inner[{len(strides)}] = {{{_listed([s[-1] for s in self.strides])}}};")
        return "\n  ".join(lines)


def _listed(extents: Sequence[Extent]) -> str:
    return ", ".join(e.cpp for e in extents)
