"""Generic kernels: every op on every dtype that has a meaning, against the op's own, over T and workers."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pelton.builder.codegen.cache import ObjectCache
from pelton.builder.codegen.cpu import compile_cpu
from pelton.builder.kernels import Kernel, KernelCall, KernelRegistry, NoKernelError
from pelton.builder.ops.base import Op, StepContext
from pelton.builder.ops.elementwise import BINARY, UNARY, Binary, Cast, Unary, Where
from pelton.builder.ops.generic import (
    Concat,
    Expand,
    Gather,
    Linear,
    MatMul,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    Transpose,
)
from pelton.builder.target import CPU_SKUS, Target
from pelton.plugins import KERNELS
from pelton.plugins.generic.cpu import KERNELS as GENERIC
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import Dim, TensorType

from .harness import BF16, F16, F32, Compiled, Inputs, bits, host_skus, make_call, target_of

I32, I64, U8, BOOL = DType.I32, DType.I64, DType.U8, DType.BOOL
ALL = (F32, F16, BF16, I64, I32, BOOL)
SKUS = sorted({"x86-64-v3", host_skus()[-1]})
TOKENS = (1, 2, 7, 33)


def t(dtype: DType, *shape: Dim) -> TensorType:
    return TensorType(dtype, shape)


def unary_cases() -> Iterator[tuple[Op, tuple[TensorType, ...]]]:
    for kind in UNARY:
        yield Unary(kind), (t(F32, 1, "T", 37),)
        yield Unary(kind), (t(BF16, "T", 16),)
    for kind in ("neg", "abs", "square", "relu", "not"):
        yield Unary(kind), (t(I32, "T", 5),)
    yield Unary("silu"), (t(F16, "T", 3, 5),)
    yield Unary("neg"), (t(I64, "T"),)
    yield Unary("not"), (t(BOOL, "T", 19),)


def binary_cases() -> Iterator[tuple[Op, tuple[TensorType, ...]]]:
    for kind in BINARY:
        yield Binary(kind), (t(F32, "T", 4, 21), t(F32, 4, 1))
        yield Binary(kind), (t(F16, 1, "T", 17), t(F16, "T", 17))
        yield Binary(kind), (t(I32, "T", 3), t(I32, 1, 3))
    for kind in ("add", "mul", "max", "min", "eq", "and", "or"):
        yield Binary(kind), (t(BOOL, "T", 18), t(BOOL, 18))
    yield Binary("mul"), (t(F32, "T", 1), t(F32, 1, 70))
    yield Binary("add"), (t(I64, "T", 6), t(I64))
    yield Binary("add"), (t(F32, "T", 1100), t(F32, "T", 1100))
    yield Binary("sub"), (t(BF16, 2, 1, "T", 1), t(BF16, 3, 1, 8))


def other_cases() -> Iterator[tuple[Op, tuple[TensorType, ...]]]:
    for dtype in ALL:
        yield Where(), (t(BOOL, "T", 1), t(dtype, "T", 9), t(dtype, 9))
        yield from ((Cast(to), (t(dtype, "T", 21),)) for to in ALL)
        yield Reshape((1, "T", 12)), (t(dtype, "T", 3, 4),)
        yield Transpose((2, 0, 1)), (t(dtype, "T", 3, 4),)
        yield Expand((2, "T", 5)), (t(dtype, "T", 1),)
        yield Slice(-1, 3, 10, 2), (t(dtype, "T", 11),)
        yield Concat(1), (t(dtype, "T", 2, 3), t(dtype, "T", 1, 3), t(dtype, "T", 4, 3))
        yield Gather(0), (t(dtype, 13, 6), t(I32, "T", 2))
        yield Reduce("sum", (1,), False), (t(dtype, "T", 7),)
        yield Reduce("max", (-1, 1), True), (t(dtype, "T", 3, 2, 5),)
        yield Reduce("min", (0,), False), (t(dtype, 6, "T"),)
        yield Reduce("mean", (0, 2), False), (t(dtype, 4, "T", 5),)
    yield Cast(U8), (t(I32, "T", 4),)
    yield Transpose((1, 2, 0)), (t(F32, 1, "T", 24),)
    yield Slice(0, 1, 3), (t(F32, 4, "T", 6),)
    yield Slice(1, 2, 2), (t(F32, "T", 4),)
    yield Concat(-1), (t(F32, 1, "T", 16), t(F32, 1, "T", 16))
    yield Gather(1), (t(F32, "T", 9, 4), t(I64, 3))
    yield (
        Gather(-1),
        (
            t(F32, "T", 9),
            t(
                I32,
            ),
        ),
    )
    for dtype in (F32, F16, BF16):
        yield Softmax(-1), (t(dtype, "T", 3, 50),)
        yield Softmax(0), (t(dtype, 20, "T"),)
        yield MatMul(), (t(dtype, 2, "T", 19), t(dtype, 19, 35))
        yield MatMul(), (t(dtype, 3, 4, 5), t(dtype, 2, 1, 5, "T"))
        yield Linear(True), (t(dtype, 1, "T", 37), t(dtype, 11, 37), t(F32, 11))
        yield Linear(), (t(F32, "T", 32), t(dtype, 16, 32))


CASES = [*unary_cases(), *binary_cases(), *other_cases()]
#: Plain vectors, for tests that bring their own operands; compiled together with the cases.
PLAIN: list[tuple[Op, tuple[TensorType, ...]]] = [
    *((Binary(kind), (t(F32, "T"), t(F32, "T"))) for kind in BINARY),
    *((Unary(kind), (t(F32, "T"),)) for kind in UNARY),
    (Gather(0), (t(F32, 5, 2), t(I32, "T"))),
]
EVERY = [*CASES, *PLAIN]


def indices(sku: str) -> range:
    """The cases compiled for a SKU: all for the best one here, a third for the others (compiling takes a while)."""
    return range(len(EVERY)) if sku == SKUS[-1] else range(0, len(CASES), 3)


@functools.cache
def library(sku: str) -> dict[int, tuple[KernelCall, Kernel, Any]]:
    """The SKU's cases compiled into one object: (call, kernel, function) by index in EVERY."""
    target = target_of(sku)
    calls = {i: make_call(EVERY[i][0], *EVERY[i][1]) for i in indices(sku)}
    kernels = {i: KernelRegistry(GENERIC).select(call, target) for i, call in calls.items()}
    sources = [(f"k{i}", kernels[i].emit(call, target, f"k{i}")) for i, call in calls.items()]
    data = compile_cpu(sources, CPU_SKUS[sku], cache=ObjectCache())
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        loaded = ctypes.CDLL(file.name)
    return {i: (call, kernels[i], getattr(loaded, f"k{i}")) for i, call in calls.items()}


def run(sku: str, index: int, arrays: Sequence[np.ndarray], tokens: int, workers: int = 1) -> np.ndarray:
    call, kernel, function = library(sku)[index]
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3
    return Compiled(call, kernel, target_of(sku), function, function)(*arrays, step=Inputs(tokens), workers=workers)[0]


def random_operand(rng: np.random.Generator, op: Op, position: int, type_: TensorType, tokens: int) -> np.ndarray:
    shape = type_.max_shape({"T": tokens})
    if type_.dtype is BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if not type_.dtype.is_float:
        low, high = (1, 5) if getattr(op, "kind", "") in ("pow", "div") else (-9, 9)
        return np.asarray(rng.integers(low, high, shape)).astype(type_.dtype.numpy)
    values = rng.standard_normal(shape) * 2
    if getattr(op, "kind", "") in ("log", "sqrt", "rsqrt", "pow") and position == 0:
        values = np.abs(values) + 0.1
    if getattr(op, "kind", "") in ("and", "or", "not", "eq", "le"):
        values = np.round(values)
    return np.asarray(values).astype(type_.dtype.numpy)


def operands(op: Op, types: tuple[TensorType, ...], tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(len(str(op)) + 1000 * tokens)
    return [random_operand(rng, op, i, type_, tokens) for i, type_ in enumerate(types)]


def context(tokens: int) -> StepContext:
    class _Step:
        num_tokens, num_seqs, num_rows = tokens, 1, 1

    return StepContext(_Step(), {}, {}, 16)  # type: ignore[arg-type]


EXACT = (Where, Cast, Reshape, Transpose, Expand, Slice, Concat, Gather, Reduce, MatMul)


COMPILED = [(sku, i) for sku in SKUS for i in indices(sku) if i < len(CASES)]


@pytest.mark.parametrize(
    ("sku", "index"), COMPILED, ids=[f"{s}-{i}-{CASES[i][0].name}-{CASES[i][1][0].dtype.value}" for s, i in COMPILED]
)
def test_against_meaning(sku: str, index: int) -> None:
    op, types = CASES[index]
    for tokens in TOKENS:
        arrays = operands(op, types, tokens)
        got = run(sku, index, arrays, tokens)
        (want,) = op.reference(context(tokens), *arrays)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if isinstance(op, EXACT) or not types[0].dtype.is_float or want.dtype == np.bool_:
            assert bits(got) == bits(want)
        else:
            tolerance = {4: 2e-6, 2: 1e-2 if types[0].dtype is BF16 else 2e-3}[want.dtype.itemsize]
            size = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance * size)
        for workers in (2, 5):
            assert bits(run(sku, index, arrays, tokens, workers)) == bits(got)


def test_skus_agree() -> None:
    """The vector width does not show in the results."""
    for index in indices(SKUS[0]):
        op, types = EVERY[index]
        arrays = operands(op, types, 7)
        first, *rest = (bits(run(sku, index, arrays, 7)) for sku in SKUS)
        assert all(other == first for other in rest), op


@pytest.mark.parametrize("sku", SKUS)
def test_rows_do_not_depend_on_their_mates(sku: str) -> None:
    for index in indices(sku):
        op, types = EVERY[index]
        if any("T" not in t.shape[:1] for t in types[:1]) or isinstance(op, Transpose | Expand):
            continue
        arrays = operands(op, types, 33)
        whole = run(sku, index, arrays, 33)
        if whole.shape[0] != 33:
            continue
        for row in (0, 20, 32):
            own = [
                np.ascontiguousarray(a[row : row + 1]) if "T" in t.shape[:1] else a
                for a, t in zip(arrays, types, strict=True)
            ]
            if all("T" in t.shape[:1] or "T" not in t.shape for t in types):
                assert bits(run(sku, index, own, 1)) == bits(whole[row : row + 1]), op


def run_plain(op: Op, *arrays: np.ndarray) -> np.ndarray:
    index = next(i for i, (other, _) in enumerate(EVERY) if i >= len(CASES) and other == op)
    return run(SKUS[-1], index, arrays, arrays[-1].size)


def test_special_floats() -> None:
    """NaN, infinities and zeros go through as in numpy."""
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0, -3.0], np.float32)
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in np.meshgrid(special, special))
    for kind in BINARY:
        with np.errstate(all="ignore"):
            (want,) = Binary(kind).reference(context(a.size), a, b)
        tolerance = 2e-7 if kind == "pow" else 0
        np.testing.assert_allclose(run_plain(Binary(kind), a, b), want, rtol=tolerance, err_msg=kind)
    for kind in UNARY:
        if kind in ("sin", "cos", "silu", "gelu_erf", "gelu_tanh"):
            continue
        with np.errstate(all="ignore"):
            (want,) = Unary(kind).reference(context(special.size), special)
        np.testing.assert_allclose(run_plain(Unary(kind), special), want, rtol=1e-6, err_msg=kind)


def test_power_is_nearly_correctly_rounded() -> None:
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-20, 20, 20000)).astype(np.float32)
    y = rng.uniform(-6, 6, 20000).astype(np.float32)
    got = run_plain(Binary("pow"), x, y)
    want = x.astype(np.float64) ** y.astype(np.float64)
    normal = (want > 1.2e-38) & (want < 3.4e38)
    error = np.abs(got[normal] - want[normal]) / np.spacing(want[normal].astype(np.float32))
    assert normal.sum() > 15000
    assert error.max() <= 0.5001


def test_gather_clamps_and_wraps_indices() -> None:
    data = np.arange(10, dtype=np.float32).reshape(5, 2)
    index = np.array([-1, 4, 99, -99], np.int32)
    np.testing.assert_array_equal(run_plain(Gather(0), data, index), data[[4, 4, 4, 0]])


def test_generic_kernels_say_that_they_are() -> None:
    assert all(kernel.generic for kernel in GENERIC)
    assert list(KERNELS[-len(GENERIC) :]) == list(GENERIC), "generic kernels come last in the registry"


@pytest.mark.parametrize(
    ("op", "types", "reason"),
    [
        (Linear(), (t(F32, "T", 8), TensorType(F32, (16, 8), "panel16")), "layout panel16"),
        (Gather(0), (TensorType(F32, (16, 8), "panel16"), t(I32, "T")), "layout panel16"),
        (Binary("sub"), (t(BOOL, "T"), t(BOOL, "T")), "no meaning for bool"),
        (Unary("exp"), (t(I32, "T"),), "no meaning for i32"),
        (Linear(), (t(I32, "T", 8), t(F32, 16, 8)), "not a float tensor"),
        (MatMul(), (t(I32, "T", 8), t(I32, 8, 8)), "only floats"),
    ],
)
def test_refusals(op: Op, types: tuple[TensorType, ...], reason: str) -> None:
    call = make_call(op, *types, outputs=op.infer(*(dataclasses.replace(t, layout="rows") for t in types)))
    with pytest.raises(NoKernelError, match=reason):
        KernelRegistry(GENERIC).select(call, target_of("x86-64-v3"))
    with pytest.raises(NoKernelError, match="not a CPU"):
        KernelRegistry(GENERIC).select(make_call(Unary("exp"), t(F32, "T")), Target("reference"))
