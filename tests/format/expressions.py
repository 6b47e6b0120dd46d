"""Hypothesis strategies for weight expressions over a small in-memory source."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_source import DictSource
from pelton.runtime.format.weight_eval import expr_type
from pelton.runtime.format.weight_expr import (
    AddScalar,
    CastTo,
    Interleave,
    Pack,
    Permute,
    Reshaped,
    Source,
    Stack,
    WeightExpr,
)

FLOATS = (DType.F32, DType.F16, DType.BF16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (33, 5), (16, 4), (48, 8), (1, 17), (5, 3, 2), (2, 0), (17, 1))


def random_source(seed: int = 0) -> DictSource:
    """Every float type in every shape of SHAPES, named "dtype[shape]"."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for dtype in FLOATS:
        for shape in SHAPES:
            values = generator.normal(size=shape).astype(np.float32)
            arrays[f"{dtype.value}{list(shape)}"] = np.asarray(values).astype(dtype.numpy)
    return DictSource(arrays)


def _shape(expr: WeightExpr) -> tuple[int, ...]:
    return expr_type(expr).max_shape({})


@st.composite
def rows_expressions(draw: st.DrawFn, depth: int = 4) -> WeightExpr:
    """A row-major expression of random steps."""
    dtype, shape = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(SHAPES))
    expr: WeightExpr = Source(f"{dtype.value}{list(shape)}", shape, dtype)
    for _ in range(draw(st.integers(0, depth))):
        shape = _shape(expr)
        step = draw(st.sampled_from(("cast", "add", "permute", "reshape", "stack", "interleave")))
        if step == "cast":
            expr = CastTo(expr, draw(st.sampled_from(FLOATS)))
        elif step == "add":
            expr = AddScalar(expr, draw(st.floats(-2, 2, width=32)))
        elif step == "permute":
            expr = Permute(expr, tuple(draw(st.permutations(range(len(shape))))))
        elif step == "reshape":
            expr = Reshaped(expr, draw(st.sampled_from(_factorings(prod(shape)))))
        elif shape and prod(shape) < 2000:
            if step == "stack":
                expr = Stack((expr,) * draw(st.integers(1, 3)))
            else:
                expr = Interleave((expr,) * draw(st.integers(1, 3)), draw(st.integers(1, 20)))
    return expr


@st.composite
def expressions(draw: st.DrawFn) -> WeightExpr:
    """Any expression: row-major, or a matrix packed in panels."""
    expr = draw(rows_expressions())
    shape = _shape(expr)
    if prod(shape) and prod(shape) % 8 == 0 and draw(st.booleans()):
        # Normal values, sums and zeros of theirs: few enough high bytes for packed12.
        return Pack(Reshaped(CastTo(expr, DType.BF16), (prod(shape) // 8, 8)), "packed12")
    if shape and draw(st.booleans()):
        rows = draw(st.sampled_from([d for d in (1, shape[0], prod(shape)) if d and prod(shape) % d == 0] or [0]))
        return Pack(Reshaped(expr, (rows, prod(shape) // rows if rows else 3)), "panel16")
    return expr


def _factorings(size: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(size,), (1, size), (size, 1)]
    shapes += [(d, size // d) for d in (2, 3, 16) if size and size % d == 0]
    return [*shapes, ()] if size == 1 else shapes
