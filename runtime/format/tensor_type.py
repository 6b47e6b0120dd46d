"""Types of values: element type, shape with symbolic dims, storage layout."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import EngineFormatError
from .dtypes import DType
from .packed12 import BLOCK_K, MAX_K, PANEL_ROWS, panel_bytes

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
#:   packed12  a bf16 [N, K] GEMM weight in panels of 32 outputs of about 12 bits a value, K % 8 == 0 (packed12.py)
LAYOUTS = ("rows", "panel16", "packed12")


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
        """The shape of the array that holds the bytes (differs from shape if packed)."""
        shape = self.max_shape(symbols or {})
        if self.layout == "rows":
            return shape
        n, k = shape
        if self.layout == "packed12":
            return (-(-n // PANEL_ROWS), panel_bytes(k) // self.dtype.itemsize)
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


def layout_problem(type_: TensorType) -> str | None:
    """Why no value can be of this type, if it is for its layout."""
    if type_.layout not in LAYOUTS:
        return f"unknown weight layout {type_.layout!r}; known: {', '.join(LAYOUTS)}"
    if type_.layout == "panel16" and (type_.rank != 2 or not type_.dtype.is_float):
        return "layout panel16 takes a float matrix [N, K]"
    if type_.layout == "packed12" and not _takes_packed12(type_):
        return (
            f"layout packed12 takes a bf16 matrix [N, K] with K a multiple of {BLOCK_K} from {BLOCK_K} to below 2**20"
        )
    return None


def _takes_packed12(type_: TensorType) -> bool:
    if type_.rank != 2 or type_.dtype is not DType.BF16:
        return False
    n, k = type_.shape
    return isinstance(n, int) and isinstance(k, int) and 0 < k < MAX_K and k % BLOCK_K == 0


_TYPE = re.compile(r"(\w+)\[([^\[\]]*)\](?:@(\w+))?", re.ASCII)
_DIM = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)


def parse_type(text: str) -> TensorType:
    """The inverse of ``str(TensorType)``. Raises EngineFormatError for what is none: unknown dtype, dim or layout."""
    match = _TYPE.fullmatch(text)
    if match is None or match[1] not in {dtype.value for dtype in DType}:
        raise EngineFormatError(f"{text[:60]!r} is not a type")
    words = match[2].split(",") if match[2] else []
    dims: list[Dim] = []
    for word in words:
        if word not in SYMBOLS and not _DIM.fullmatch(word):
            raise EngineFormatError(f"{text[:60]!r} is not a type: {word!r} is not a dim")
        dims.append(word if word in SYMBOLS else int(word))
    type_ = TensorType(DType(match[1]), tuple(dims), match[3] or "rows")
    if problem := layout_problem(type_):
        raise EngineFormatError(f"{text[:60]!r} is not a type: {problem}")
    return type_


TOKEN_TYPE = TensorType(DType.TOKEN, ())
