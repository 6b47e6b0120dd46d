"""Types of values: element type, shape with symbolic dims, storage layout."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType

#: A dimension: a constant, or one of the step's symbols.
#:   T  tokens in the step (all sequences packed in one row)
#:   S  sequences in the step
#:   R  rows whose logits are wanted in the step
#:   C  rows in the current chunk of R (the plan's tail loops over chunks)
Dim = int | str
SYMBOLS = ("T", "S", "R", "C")

#: How a tensor's bytes lie.
#:   rows      row-major
#:   panel16   a [N, K] GEMM weight in panels of 16 outputs, K in pairs for 16-bit types:
#:             bf16/f16 [ceil(N/16)][ceil(K/2)][16][2], f32 [ceil(N/16)][K][16]; padding is zero
LAYOUTS = ("rows", "panel16")


@dataclass(frozen=True)
class TensorType:
    """The type of a graph value or of a launch operand. ``shape`` is the logical shape."""

    dtype: DType
    shape: tuple[Dim, ...]
    layout: str = "rows"

    @property
    def rank(self) -> int:
        return len(self.shape)

    def max_shape(self, symbols: dict[str, int]) -> tuple[int, ...]:
        """The shape with every symbol replaced by its value (KeyError if one is missing)."""
        return tuple(symbols[d] if isinstance(d, str) else d for d in self.shape)

    def storage_shape(self, symbols: dict[str, int] | None = None) -> tuple[int, ...]:
        """The shape of the array that holds the bytes (differs from shape for panel16)."""
        shape = self.max_shape(symbols or {})
        if self.layout == "rows":
            return shape
        n, k = shape
        if self.dtype.itemsize == 4:
            return (-(-n // 16), k, 16)
        return (-(-n // 16), -(-k // 2), 16, 2)

    def nbytes(self, symbols: dict[str, int] | None = None) -> int:
        """Bytes of storage at the given symbol values."""
        count = self.dtype.itemsize
        for dim in self.storage_shape(symbols):
            count *= dim
        return count

    def __str__(self) -> str:
        dims = ",".join(str(d) for d in self.shape)
        suffix = "" if self.layout == "rows" else f"@{self.layout}"
        return f"{self.dtype.value}[{dims}]{suffix}"


TOKEN_TYPE = TensorType(DType.TOKEN, ())
