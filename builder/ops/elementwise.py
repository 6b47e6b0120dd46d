"""Elementwise ops, with numpy broadcasting between operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import Dim, TensorType
from .base import Op, StepContext, register
from .checks import need_count


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Numpy's rule, with symbolic dims: a symbol meets itself or 1. Raises GraphError otherwise."""
    rank = max(len(s) for s in shapes)
    result: list[Dim] = []
    for axis in range(rank):
        dims = {s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0} - {1}
        if len(dims) > 1:
            raise GraphError(f"shapes {shapes} do not broadcast: dim {axis} is {sorted(map(str, dims))}")
        result.append(dims.pop() if dims else 1)
    return tuple(result)


def _erf(x: np.ndarray) -> np.ndarray:
    from math import erf

    return np.asarray(np.vectorize(erf, otypes=[np.float64])(x.astype(np.float64)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + e), e / (1 + e)))


#: Meaning of each unary kind on fp32.
UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "floor": np.floor,
    "not": np.logical_not,
}

BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or"}


@register
@dataclass(frozen=True)
class Unary(Op):
    """y = kind(x); float kinds compute in fp32 and round to x's dtype."""

    name: ClassVar[str] = "unary"
    kind: str

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        if self.kind not in UNARY:
            raise GraphError(f"unary: unknown kind {self.kind!r}")
        return (TensorType(inputs[0].dtype, inputs[0].shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        (x,) = inputs
        value = x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype != np.bool_ else x
        return (np.asarray(UNARY[self.kind](value)).astype(x.dtype),)


@register
@dataclass(frozen=True)
class Binary(Op):
    """y = kind(a, b); operands have one dtype; comparisons give bool."""

    name: ClassVar[str] = "binary"
    kind: str

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 2)
        a, b = inputs
        if self.kind not in BINARY:
            raise GraphError(f"binary: unknown kind {self.kind!r}")
        if a.dtype != b.dtype:
            raise GraphError(f"binary {self.kind}: dtypes {a.dtype.value} and {b.dtype.value} differ; cast first")
        dtype = DType.BOOL if self.kind in _COMPARISONS else a.dtype
        return (TensorType(dtype, broadcast_shapes(a.shape, b.shape)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        a, b = inputs
        if a.dtype.itemsize < 4 and a.dtype != np.bool_ and self.kind not in _COMPARISONS:
            return (BINARY[self.kind](a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)
        result = BINARY[self.kind](a, b)
        return (result if self.kind in _COMPARISONS else result.astype(a.dtype),)


@register
@dataclass(frozen=True)
class Where(Op):
    """y = a where condition else b."""

    name: ClassVar[str] = "where"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 3)
        condition, a, b = inputs
        if condition.dtype != DType.BOOL or a.dtype != b.dtype:
            raise GraphError(f"where: needs (bool, x, x), got {[i.dtype.value for i in inputs]}")
        return (TensorType(a.dtype, broadcast_shapes(condition.shape, a.shape, b.shape)),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.where(*inputs),)


@register
@dataclass(frozen=True)
class Cast(Op):
    """Convert to another dtype; floats round to nearest even, float to int truncates."""

    name: ClassVar[str] = "cast"
    dtype: DType

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        need_count(self.name, inputs, 1)
        return (TensorType(self.dtype, inputs[0].shape),)

    def reference(self, ctx: StepContext, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return (inputs[0].astype(self.dtype.numpy),)
