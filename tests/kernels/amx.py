"""AMX on CPUs without it: two test-only SKUs, and a model of the tile dot product in exact arithmetic.

``EMULATED_AMX`` compiles the tile instructions as plain C++ (cpp/kernels/amx_emulated.h). ``TRAPPED_AMX`` compiles the
instructions themselves; without AMX each raises SIGILL, and the handler of cpp/tests/amx_trap.cpp does its work. On a
CPU with AMX they run as they are, so the same tests hold the silicon against the emulation.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pelton._core import request_tile_permission
from pelton.builder.target import CPU_SKUS, Sku
from pelton.runtime.drivers.cpu.host import host_features

HAS_TILES = set(CPU_SKUS["sapphirerapids"].features) <= host_features()
ROOT = Path(__file__).resolve().parents[2]
_BF16 = CPU_SKUS["x86-64-v4+vnni+bf16"]
_REAL = CPU_SKUS["sapphirerapids"]

EMULATED_AMX = Sku(
    "emulated-amx", 512, _BF16.features, (*_BF16.compiler_flags, "-DPELTON_EMULATED_AMX"), "amx_bf16", 55
)
#: sapphirerapids but for the fp16 instructions, with which g++ moves 16-bit values.
TRAPPED_AMX = Sku(
    "trapped-amx", 512, _BF16.features, tuple(f for f in _REAL.compiler_flags if f != "-mavx512fp16"), "amx_bf16", 55
)


@functools.cache
def trap() -> ctypes.CDLL:
    """The compiled handler, and the emulation's arithmetic as plain functions."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "these tests need g++ or clang++"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trap.so"
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
        flags += ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mf16c", f"-I{ROOT / 'cpp/kernels'}"]
        command = [compiler, *flags, str(ROOT / "cpp/tests/amx_trap.cpp"), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(out))
    library.amx_fma.restype = ctypes.c_float
    library.amx_fma.argtypes = [ctypes.c_float] * 3
    library.amx_dot_row.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 2
    library.amx_trap_count.restype = ctypes.c_int64
    return library


@contextmanager
def tile_instructions() -> Iterator[ctypes.CDLL]:
    """While open, tile instructions work: the CPU's own, or, trapped, in threads that do not block SIGILL."""
    library = trap()
    if HAS_TILES:
        request_tile_permission()
        yield library
        return
    assert library.amx_trap_install() == 0
    try:
        yield library
    finally:
        library.amx_trap_remove()


LEAST = Fraction(2) ** -126


def exact(value: np.float32) -> Fraction:
    """A finite operand as a number; subnormals count as zero."""
    number = Fraction(float(value))
    return number if abs(number) >= LEAST else Fraction(0)


def rounded(value: Fraction) -> np.float32:
    """To fp32, nearest even; a result that is tiny after rounding without a limit of exponents is zero."""
    if value == 0:
        return np.float32(0)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    number = round(value / unit) * unit  # Fraction rounds halves to even
    if abs(number) < LEAST:
        return np.float32(0)
    return np.float32(float(number)) if abs(number) < Fraction(2) ** 128 else np.float32(np.inf) * np.sign(number)


def fma_model(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c as TDPBF16PS does it, finite operands; the sign of a zero is not modelled."""
    return rounded(exact(a) * exact(b) + exact(c))


def dot_model(a: NDArray[np.float32], b: NDArray[np.float32], total: np.float32) -> np.float32:
    """total + a . b over pairs: even and odd k in chains from zero, then the chains' sum, then the total."""
    chains = [np.float32(0), np.float32(0)]
    for k in range(len(a)):
        chains[k % 2] = fma_model(a[k], b[k], chains[k % 2])
    one = np.float32(1)
    return fma_model(fma_model(chains[0], one, chains[1]), one, total)
