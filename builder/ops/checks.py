"""Checks shared by the ops' ``infer`` methods. Each raises GraphError naming the op and the operand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TOKEN_TYPE, Dim, TensorType


def need_count(op: str, inputs: Sequence[TensorType], *counts: int) -> None:
    """The op takes one of these numbers of operands."""
    if len(inputs) not in counts:
        allowed = " or ".join(map(str, counts))
        raise GraphError(f"{op}: takes {allowed} operands, got {len(inputs)}")


def need(
    op: str, operand: str, type_: TensorType, dtype: DType | None = None, shape: tuple[Dim, ...] | None = None
) -> None:
    """An operand must have this dtype and this shape (None: any), in layout rows."""
    if dtype is not None and type_.dtype != dtype:
        raise GraphError(f"{op}: {operand} must be {dtype.value}, got {type_}")
    if shape is not None and type_.shape != shape:
        raise GraphError(f"{op}: {operand} must have shape [{','.join(map(str, shape))}], got {type_}")
    if type_.layout != "rows":
        raise GraphError(f"{op}: {operand} must have layout rows, got {type_}")


def need_rank(op: str, operand: str, type_: TensorType, least: int, most: int | None = None) -> None:
    """An operand's number of dims must lie in least..most."""
    if type_.rank < least or (most is not None and type_.rank > most):
        bounds = f"{least}" if most == least else f"{least}..{most if most is not None else ''}"
        raise GraphError(f"{op}: {operand} must have {bounds} dims, got {type_}")


def need_float(op: str, operand: str, type_: TensorType) -> None:
    if not type_.dtype.is_float:
        raise GraphError(f"{op}: {operand} must be a float type, got {type_}")


def need_index(op: str, operand: str, type_: TensorType) -> None:
    if type_.dtype not in (DType.I32, DType.I64):
        raise GraphError(f"{op}: {operand} must be i32 or i64, got {type_}")


def need_token(op: str, operand: str, type_: TensorType) -> None:
    if type_ != TOKEN_TYPE:
        raise GraphError(f"{op}: {operand} must be a token, got {type_}")


def need_matrix(op: str, operand: str, type_: TensorType) -> tuple[int, int]:
    """A weight matrix with constant dims, in any layout; returns (N, K)."""
    if type_.rank == 2:
        n, k = type_.shape
        if isinstance(n, int) and isinstance(k, int):
            return n, k
    raise GraphError(f"{op}: {operand} must be a matrix with constant dims, got {type_}")


def constant_dim(op: str, type_: TensorType, axis: int) -> int:
    """The size of a constant axis (negative counts from the end)."""
    if not -type_.rank <= axis < type_.rank:
        raise GraphError(f"{op}: axis {axis} is outside {type_}")
    dim = type_.shape[axis]
    if isinstance(dim, str):
        raise GraphError(f"{op}: axis {axis} of {type_} is the symbolic dim {dim}; only constant dims are allowed")
    return dim


def element_count(shape: Sequence[Dim]) -> tuple[int, list[str]]:
    """Product of the constant dims, and the symbols in order."""
    return math.prod(d for d in shape if isinstance(d, int)), sorted(d for d in shape if isinstance(d, str))
