"""Canonical weight layouts: pack a row-major matrix, unpack it again, in numpy (see tensor_type.LAYOUTS)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BuildError
from .dtypes import DType
from .packed12 import PANEL_ROWS, pack_packed12, unpack_packed12
from .tensor_type import TensorType, layout_problem

Array = np.ndarray[Any, Any]

#: Rows of a panel: ranges of rows that start at a multiple of it pack to consecutive parts of the whole.
UNIT_ROWS = {"rows": 1, "panel16": 16, "packed12": PANEL_ROWS}


def pack_type(type_: TensorType, layout: str) -> TensorType:
    """The type of ``pack`` applied to a row-major type. Raises BuildError if the layout does not take it."""
    packed = TensorType(type_.dtype, type_.shape, layout)
    if problem := layout_problem(packed):
        raise BuildError(f"{problem}; the weight is {type_}")
    return packed


def pack(array: Array, layout: str) -> Array:
    """The contiguous storage array of a logical array (shape ``TensorType.storage_shape``); padding is zero.

    Raises BuildError if the layout does not take the array, LayoutOverflow if it does not take its values.
    """
    if layout == "rows":
        return np.asarray(array, order="C")
    type_ = pack_type(TensorType(DType.from_numpy(array.dtype), array.shape), layout)
    if layout == "packed12":
        return pack_packed12(array)
    n, k = array.shape
    panels = -(-n // 16)
    if type_.dtype.itemsize == 4:
        return np.ascontiguousarray(_padded(array, panels * 16, k).reshape(panels, 16, k).transpose(0, 2, 1))
    pairs = -(-k // 2)
    # A K pair moves as one 32-bit word: twice as fast as moving its halves.
    words = _padded(array, panels * 16, pairs * 2).view(np.uint32).reshape(panels, 16, pairs)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(array.dtype).reshape(panels, pairs, 16, 2)


def unpack(storage: Array, type_: TensorType) -> Array:
    """The logical array of a storage array (any shape of the right size). Raises BuildError on a wrong size."""
    shape = type_.storage_shape()
    if storage.dtype != type_.dtype.numpy or storage.nbytes != type_.nbytes():
        raise BuildError(f"storage {storage.dtype}{list(storage.shape)} does not hold a weight of type {type_}")
    storage = storage.reshape(shape)
    if type_.layout == "rows":
        return storage
    n, k = type_.max_shape({})
    if type_.layout == "packed12":
        return unpack_packed12(storage, n, k)
    if type_.dtype.itemsize == 4:
        return np.ascontiguousarray(storage.transpose(0, 2, 1).reshape(shape[0] * 16, k)[:n])
    return np.ascontiguousarray(storage.transpose(0, 2, 1, 3).reshape(shape[0] * 16, shape[1] * 2)[:n, :k])


def _padded(array: Array, rows: int, columns: int) -> Array:
    """``array`` made contiguous, with zeros up to the given size."""
    if array.shape == (rows, columns):
        return np.ascontiguousarray(array)
    out = np.zeros((rows, columns), array.dtype)
    out[: array.shape[0], : array.shape[1]] = array
    return out
