"""Weight expressions: how a stored tensor comes from checkpoint tensors.

A weight is never loaded while the graph is built; it is an expression over checkpoint tensor
names. The same expression is evaluated at build time (checkpoint -> engine) and at refit. Structs are
immutable and hashable, so two weights with equal expressions are one stored tensor (tied weights).
Evaluation lives in ``weight_eval.py``.
"""

from __future__ import annotations

import msgspec

from .dtypes import DType


class Source(msgspec.Struct, frozen=True, tag="source"):
    """A checkpoint tensor, as stored."""

    name: str
    shape: tuple[int, ...]
    dtype: DType


class CastTo(msgspec.Struct, frozen=True, tag="cast"):
    """Round to another dtype (round to nearest even)."""

    x: WeightExpr
    dtype: DType


class Permute(msgspec.Struct, frozen=True, tag="permute"):
    """Permute axes, numpy order."""

    x: WeightExpr
    axes: tuple[int, ...]


class Reshaped(msgspec.Struct, frozen=True, tag="reshape"):
    """Same elements in row-major order, another shape."""

    x: WeightExpr
    shape: tuple[int, ...]


class Stack(msgspec.Struct, frozen=True, tag="concat"):
    """Concatenate along axis 0 (merged q/k/v)."""

    parts: tuple[WeightExpr, ...]


class Interleave(msgspec.Struct, frozen=True, tag="interleave"):
    """Rows of equally shaped parts in turns of ``rows`` (merged gate/up: 16 gate rows, 16 up rows, ...).

    A last turn shorter than ``rows`` is padded with zero rows, so the result has
    len(parts) * ceil(N / rows) * rows rows.
    """

    parts: tuple[WeightExpr, ...]
    rows: int


class AddScalar(msgspec.Struct, frozen=True, tag="add_scalar"):
    """Add a number, in fp32 (norm weights stored as w - 1)."""

    x: WeightExpr
    value: float


class Pack(msgspec.Struct, frozen=True, tag="pack"):
    """Lay a [N, K] matrix out in a canonical layout (see tensor_type.LAYOUTS)."""

    x: WeightExpr
    layout: str


WeightExpr = Source | CastTo | Permute | Reshaped | Stack | Interleave | AddScalar | Pack
