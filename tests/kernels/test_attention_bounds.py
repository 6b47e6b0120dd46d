"""Attention reads nothing past a block table's end, not even to read ahead: the next page cannot be read."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .harness import BF16, F32, host_skus, pack_kv16, relative_error
from .test_attention import TOLERANCE, Shape, World

ROOT = Path(__file__).resolve().parents[2]
#: Small blocks, so that a step of 64 keys has several; and a window, which starts in the middle of a table.
SHAPES = {
    "f32": Shape(4, 2, 16, F32, tokens_per_block=16),
    "bf16": Shape(4, 1, 32, BF16, tokens_per_block=16),
    "window": Shape(4, 2, 16, F32, window=70, tokens_per_block=16),
}
#: Tables that end in the first, in a middle and in the last block of a step, behind whole steps and within one.
LENGTHS = ([65], [80], [1], [17], [128], [129], [20, 200], [300, 65], [600])


def before_a_guard(table: np.ndarray) -> tuple[np.ndarray, mmap.mmap]:
    """A copy that ends where a page ends, behind it a page without access; and what keeps it alive."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, np.int32, table.size, page - table.nbytes).reshape(table.shape)
    copy[:] = table
    return copy, memory


def run_guarded(name: str) -> None:
    """Every length, in one step and only its last token, alone and shared. A read too far ends the process."""
    for lengths in LENGTHS:
        world = World(SHAPES[name], lengths, host_skus()[-1])
        world.max_blocks -= 1  # exactly what the longest needs
        table, _alive = before_a_guard(world.table[:, : world.max_blocks])
        world.table = table
        for chunks in ([(s, 0, n) for s, n in enumerate(lengths)], [(s, n - 1, n) for s, n in enumerate(lengths)]):
            for workers in (1, 3):
                step = world._step(chunks, table)
                q = np.concatenate([world.queries[s][a:b] for s, a, b in chunks])
                (got,) = world.kernel()(q, None, step=step, states=[pack_kv16(world.pages)], workers=workers)
                assert step.kept[-1].ctypes.data == table.ctypes.data, "the kernel got this table, not a copy"
                assert relative_error(got, world.reference(chunks)) < TOLERANCE[SHAPES[name].dtype]


@pytest.mark.parametrize("name", SHAPES)
def test_never_past_the_block_tables_end(name: str) -> None:
    code = f"from tests.kernels.test_attention_bounds import run_guarded; run_guarded({name!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"status {done.returncode} (-11 is a read past the end)\n{done.stderr}"
