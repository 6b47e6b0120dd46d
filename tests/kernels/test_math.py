"""cpp/kernels/math.h against float64 truth over dense sweeps of its whole range, and its bit-for-bit promises."""

from __future__ import annotations

import ctypes
import functools
import math
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

from pelton.builder.codegen.cache import ObjectCache
from pelton.builder.codegen.cpu import compile_cpu
from pelton.builder.target import CPU_SKUS

from .harness import Inputs, host_skus, run_workers

FUNCTIONS = (
    "exp",
    "exp2_below",
    "log",
    "sigmoid",
    "tanh",
    "erf",
    "sin",
    "cos",
    "rsqrt",
    "silu",
    "gelu_erf",
    "gelu_tanh",
)
SKUS = sorted({"x86-64-v3", host_skus()[-1]})
#: T floats from args[0] to args[1]; vectors with a masked tail, or one scalar after the other.
SOURCE = """
#include "math.h"
extern "C" void {name}(const pelton_step *step, void *const *args, pelton_worker *worker) {{
  const float *x = static_cast<const float *>(args[0]);
  float *y = static_cast<float *>(args[1]);
  {loop}
}}
"""
VECTOR = """for (int i = 0, n = step->num_tokens; i < n; i += 16) {{
    const int lanes = n - i < 16 ? n - i : 16;
    pelton::store_n(y + i, pelton::{f}(pelton::load_n(x + i, lanes)), lanes);
  }}"""
SCALAR = "for (int i = 0; i < step->num_tokens; ++i) y[i] = pelton::{f}(x[i]);"


@functools.cache
def library(sku: str) -> ctypes.CDLL:
    sources = []
    for f in FUNCTIONS:
        for kind, loop in (("vector", VECTOR), ("scalar", SCALAR)):
            name = f"{f}_{kind}"
            sources.append((name, SOURCE.format(name=name, loop=loop.format(f=f))))
    data = compile_cpu(sources, CPU_SKUS[sku], cache=ObjectCache())
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def evaluate(f: str, x: np.ndarray, sku: str = SKUS[-1], kind: str = "vector") -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    pointers = (ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data)
    run_workers(getattr(library(sku), f"{f}_{kind}"), Inputs(x.size).step(), pointers, 1)
    return y


def every_nth_float(n: int) -> np.ndarray:
    """Finite floats of all magnitudes and both signs, subnormals too."""
    values = np.arange(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return values[np.isfinite(values)]


def sweep(low: float, high: float) -> np.ndarray:
    return np.concatenate([every_nth_float(20011), np.linspace(low, high, 400_001).astype(np.float32)])


def _erf(x: np.ndarray) -> np.ndarray:
    return np.fromiter(map(math.erf, x.tolist()), np.float64, x.size)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


TRUTH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "exp2_below": np.exp2,
    "log": np.log,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "erf": _erf,
    "sin": np.sin,
    "cos": np.cos,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "silu": lambda x: x * _sigmoid(x),
}


@pytest.mark.parametrize(
    ("f", "low", "high", "ulps"),
    [
        ("exp", -104.5, 89.0, 1.0),
        ("exp2_below", -126.0, 0.0, 2.1),
        ("log", 1e-3, 4.0, 1.0),
        ("sigmoid", -30.0, 30.0, 3.0),
        ("tanh", -10.0, 10.0, 2.0),
        ("erf", -4.5, 4.5, 3.0),
        ("sin", -(2.0**20), 2.0**20, 2.0),
        ("cos", -(2.0**20), 2.0**20, 2.0),
        ("sin", -7.0, 7.0, 2.0),
        ("cos", -7.0, 7.0, 2.0),
        ("rsqrt", 1e-3, 100.0, 1.5),
        ("silu", -87.0, 30.0, 4.0),
    ],
)
def test_accuracy(f: str, low: float, high: float, ulps: float) -> None:
    x = sweep(low, high)
    if f in ("log", "rsqrt"):
        x = x[x > 0]
    if f in ("sin", "cos"):
        x = x[np.abs(x) <= 2.0**30]
    if f == "silu":
        x = x[x >= -87]
    if f == "exp2_below":
        x = x[(x >= -126) & (x <= 0)]
    got = evaluate(f, x)
    with np.errstate(over="ignore"):
        want = TRUTH[f](x.astype(np.float64))
        rounded = want.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    unit = np.spacing(np.maximum(np.abs(rounded[finite]), np.float32(1e-45))).astype(np.float64)
    error = np.abs(got[finite].astype(np.float64) - want[finite]) / unit
    worst = int(error.argmax())
    assert error[worst] <= ulps, f"{f}({x[finite][worst]!r}) is off by {error[worst]:.2f} ulp"


@pytest.mark.parametrize("f", ["gelu_erf", "gelu_tanh"])
def test_gelu(f: str) -> None:
    x = np.linspace(-30, 30, 400_001).astype(np.float32)
    wide = x.astype(np.float64)
    if f == "gelu_erf":
        want = 0.5 * wide * (1 + _erf(wide / math.sqrt(2)))
    else:
        want = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    error = np.abs(evaluate(f, x) - want) / np.maximum(1, np.abs(wide))
    assert error.max() <= 2.0**-22


def test_rotary_angles() -> None:
    """What RopeTable asks for: any position up to a million times any inverse frequency, rounded to fp32."""
    positions = np.arange(0, 1_000_000, 977, dtype=np.float32)[:, None]
    inverse = (np.float32(10000.0) ** -np.linspace(0, 1, 33, dtype=np.float32)).astype(np.float32)
    angles = np.ascontiguousarray((positions * inverse).reshape(-1))
    for f in ("sin", "cos"):
        want = TRUTH[f](angles.astype(np.float64))
        np.testing.assert_allclose(evaluate(f, angles), want, rtol=2.4e-7, atol=0)


def test_special_values() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    table = {
        "exp": [(inf, inf), (-inf, 0), (nan, nan), (0.0, 1), (-0.0, 1), (89, inf), (-104, 0), (3e38, inf)],
        "exp2_below": [(-inf, 2.0**-126), (-1e30, 2.0**-126), (nan, nan), (0.0, 1), (-0.0, 1), (-1, 0.5)],
        "log": [(inf, inf), (-inf, nan), (nan, nan), (0.0, -inf), (-0.0, -inf), (1, 0), (-1, nan)],
        "sigmoid": [(inf, 1), (-inf, 0), (nan, nan), (0.0, 0.5)],
        "tanh": [(inf, 1), (-inf, -1), (nan, nan), (0.0, 0.0), (-0.0, -0.0)],
        "erf": [(inf, 1), (-inf, -1), (nan, nan), (0.0, 0.0), (-0.0, -0.0), (4, 1)],
        "sin": [(inf, nan), (-inf, nan), (nan, nan), (0.0, 0.0), (1.1e9, nan)],
        "cos": [(inf, nan), (-inf, nan), (nan, nan), (0.0, 1.0), (1.1e9, nan)],
        "rsqrt": [(inf, 0), (nan, nan), (0.0, inf), (-1, nan), (4, 0.5)],
        "silu": [(nan, nan), (0.0, 0.0), (inf, inf)],
    }
    for f, pairs in table.items():
        x = np.array([a for a, _ in pairs], np.float32)
        want = np.array([b for _, b in pairs], np.float32)
        got = evaluate(f, x)
        np.testing.assert_array_equal(got, want, err_msg=f)
        np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]), err_msg=f)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_bits_depend_on_the_value_alone(f: str) -> None:
    """Any place in a vector, any tail, scalars, and every SKU give the same bits."""
    x = np.concatenate([every_nth_float(500_009), np.linspace(-12, 12, 1001).astype(np.float32)])
    if f == "exp2_below":
        x = x[x <= 0]
    whole = evaluate(f, x)
    for sku in SKUS:
        np.testing.assert_array_equal(evaluate(f, x, sku).view(np.uint32), whole.view(np.uint32), err_msg=sku)
        scalar = evaluate(f, x, sku, "scalar")
        np.testing.assert_array_equal(scalar.view(np.uint32), whole.view(np.uint32), err_msg=f"{sku} scalar")
    for start in range(1, 18):
        shifted = evaluate(f, x[start : start + 45])
        np.testing.assert_array_equal(shifted.view(np.uint32), whole[start : start + 45].view(np.uint32))


@pytest.mark.parametrize("f", ["exp", "exp2_below", "tanh", "erf", "sigmoid"])
def test_monotone(f: str) -> None:
    """Rounding does not turn the curve around by more than an ulp."""
    x = np.linspace(-9, 0 if f == "exp2_below" else 9, 200_001).astype(np.float32)
    y = evaluate(f, x)
    assert (y[1:] >= y[:-1] - np.spacing(np.abs(y[1:])) * 3).all()
