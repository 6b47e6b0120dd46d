"""TensorSource: named tensors that are read lazily, a row range at a time.

A checkpoint folder, a GGUF file and a dict of arrays all look the same to weight evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import CheckpointError
from .dtypes import DType


@dataclass(frozen=True)
class TensorInfo:
    """Element type and shape of a tensor, known without reading it."""

    dtype: DType
    shape: tuple[int, ...]


@runtime_checkable
class TensorSource(Protocol):
    """Read access to named tensors. Every method raises CheckpointError for an unknown name."""

    def names(self) -> Sequence[str]:
        """All tensor names, in a stable order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Type and shape; reads no data."""
        ...

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The whole tensor in its storage dtype (``DType.numpy``), a zero-copy view where possible."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows ``start:stop`` along axis 0 of a tensor of rank 1 or more."""
        ...

    def release(self, name: str) -> None:
        """Let go of resident pages or caches of this tensor. Arrays already handed out stay valid."""
        ...


class DictSource:
    """A TensorSource over arrays in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = dict(arrays)

    def names(self) -> Sequence[str]:
        return list(self._arrays)

    def info(self, name: str) -> TensorInfo:
        array = self.read(name)
        return TensorInfo(DType.from_numpy(array.dtype), array.shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise CheckpointError(f"tensor {name!r} is not in the source, which has: {_some(self._arrays)}") from None

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self.read(name)[start:stop]

    def release(self, name: str) -> None:
        self.read(name)


def _some(names: Mapping[str, object]) -> str:
    """The first few names, for an error message."""
    listed = ", ".join(list(names)[:5])
    return f"{listed}, ... ({len(names)} in all)" if len(names) > 5 else listed or "(nothing)"
