"""TensorSpec: a stored tensor's name and type."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType
from .tensor_type import TensorType


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an engine. ``shape`` is logical; the bytes lie as ``layout`` says (tensor_type.LAYOUTS)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: str = "rows"

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape, self.layout)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Shape of the array that holds the bytes."""
        return self.type.storage_shape()

    @property
    def nbytes(self) -> int:
        """Bytes stored, with the layout's padding."""
        return self.type.nbytes()
