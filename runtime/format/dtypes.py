"""Element types that a graph, a launch plan or an engine file can name.

Numpy has no bfloat16 of its own; the ``ml_dtypes`` package supplies it, so every
DType here maps to one real numpy dtype and the reference meanings need no special cases.
"""

from __future__ import annotations

import enum
from functools import cache

import numpy as np


class DType(str, enum.Enum):
    """An element type, spelled as in the IR text and the launch plan."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    U32 = "u32"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"
    TOKEN = "token"  # an ordering edge between state effects; occupies no memory

    @property
    def itemsize(self) -> int:
        """Bytes per element (0 for TOKEN)."""
        return _ITEMSIZE[self]

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype; raises KeyError for TOKEN, which has no storage."""
        return _bfloat16() if self is DType.BF16 else _NUMPY[self]

    @property
    def safetensors(self) -> str:
        """The spelling used in a safetensors header."""
        return _SAFETENSORS[self]

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16, DType.BF16)

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> DType:
        for ours, theirs in _NUMPY.items():
            if theirs == dtype:
                return ours
        if dtype == _bfloat16():
            return cls.BF16
        raise KeyError(f"no pelton dtype for numpy dtype {dtype}")

    @classmethod
    def from_safetensors(cls, name: str) -> DType:
        for ours, theirs in _SAFETENSORS.items():
            if theirs == name:
                return ours
        raise KeyError(f"no pelton dtype for safetensors dtype {name!r}")


_NUMPY: dict[DType, np.dtype] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.U32: np.dtype(np.uint32),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}

_ITEMSIZE = {DType.TOKEN: 0, DType.BF16: 2} | {ours: theirs.itemsize for ours, theirs in _NUMPY.items()}


@cache
def _bfloat16() -> np.dtype:
    import ml_dtypes  # a server that computes in native code never needs it

    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return dtype


_SAFETENSORS: dict[DType, str] = {
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.U32: "U32",
    DType.I8: "I8",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
}
