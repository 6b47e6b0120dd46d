"""Emit, compile and run one kernel on numpy arrays, with any number of workers that really meet at barriers."""

from __future__ import annotations

import ctypes
import functools
import mmap
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pelton._core import request_tile_permission
from pelton.builder.codegen.cache import ObjectCache
from pelton.builder.codegen.cpu import compile_cpu
from pelton.builder.kernels import Kernel, KernelCall, KernelRegistry
from pelton.builder.ops.base import Op
from pelton.builder.target import CPU_SKUS, Target
from pelton.plugins import KERNELS
from pelton.runtime.drivers.cpu.host import host_features
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import Ranges
from pelton.runtime.format.tensor_type import TOKEN_TYPE, TensorType

from .amx import EMULATED_AMX, TRAPPED_AMX

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
RANGES = Ranges(
    max_batch_size=70,
    max_num_tokens=512,
    max_seq_len=2048,
    opt_num_tokens=256,
    max_logits_rows=70,
    logits_chunk=70,
    tokens_per_block=32,
    max_logprobs=5,
)
_I32P = ctypes.POINTER(ctypes.c_int32)


class Step(ctypes.Structure):
    """pelton_step, but for the sampling part (left zero)."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_seqs", "num_rows", "row_start", "row_count")),
        *((name, _I32P) for name in ("token_ids", "positions", "token_seq", "query_start", "seq_slots")),
        ("logits_rows", _I32P),
        ("row_seq", _I32P),
        ("block_tables", _I32P * 4),
        ("max_blocks", ctypes.c_int32),
        ("sampling", ctypes.c_void_p * 21),
    )


class Unclaimed(ctypes.Structure):
    """pelton_unclaimed."""

    _fields_ = (("range", ctypes.c_uint64), ("rest_of_line", ctypes.c_uint8 * 56))


class Worker(ctypes.Structure):
    """pelton_worker."""


_BARRIER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Worker))
Worker._fields_ = [
    ("index", ctypes.c_int32),
    ("count", ctypes.c_int32),
    ("team", ctypes.c_void_p),
    ("barrier", _BARRIER),
    ("unclaimed", ctypes.POINTER(Unclaimed)),
    ("jobs", ctypes.c_uint32),
]


@dataclass
class Inputs:
    """The step as far as kernels here read it. Arrays are i32."""

    num_tokens: int = 1
    positions: np.ndarray | None = None
    query_start: np.ndarray | None = None
    block_table: np.ndarray | None = None  # [S, max_blocks]
    kv_group: int = 0  # the group whose block table it is; the others have none
    logits_rows: np.ndarray | None = None
    row_start: int = 0
    row_count: int = 0
    kept: list[np.ndarray] = field(default_factory=list)

    def step(self) -> Step:
        """The C structure; ``kept`` holds the arrays alive."""
        step = Step(num_tokens=self.num_tokens, row_start=self.row_start, row_count=self.row_count)
        starts = np.array([0, self.num_tokens]) if self.query_start is None else self.query_start
        step.num_seqs = len(starts) - 1
        step.num_rows = 0 if self.logits_rows is None else len(self.logits_rows)
        step.query_start = self._pointer(starts)
        step.token_seq = self._pointer(np.repeat(np.arange(len(starts) - 1), np.diff(starts)))
        step.positions = self._pointer(self.positions)
        step.logits_rows = self._pointer(self.logits_rows)
        if self.block_table is not None:
            step.block_tables[self.kv_group] = self._pointer(self.block_table)
            step.max_blocks = self.block_table.shape[1]
        return step

    def _pointer(self, array: np.ndarray | None) -> Any:
        if array is None:
            return None
        self.kept.append(np.ascontiguousarray(array, np.int32))
        return self.kept[-1].ctypes.data_as(_I32P)


@functools.lru_cache(maxsize=1)
def host_skus() -> tuple[str, ...]:
    """Names of the SKUs whose every feature this CPU has, in table order."""
    features = host_features()
    return tuple(name for name, sku in CPU_SKUS.items() if set(sku.features) <= features)


#: The best of them whose products are of vectors. Tiles have tactics and tests of their own.
BEST_OF_VECTORS = [name for name in host_skus() if CPU_SKUS[name].dot != "amx_bf16"][-1]
_SKUS = CPU_SKUS | {sku.name: sku for sku in (EMULATED_AMX, TRAPPED_AMX)}

#: The newest feature of each SKU: what the marker of a test on it asks for.
_NEWEST = {
    "x86-64-v3": "avx2",
    "x86-64-v4": "avx512vl",
    "x86-64-v4+vnni+bf16": "avx512_bf16",
    "sapphirerapids": "amx_bf16",
}


def sku_params(dtype: DType | None = None, *before: Any) -> list[Any]:
    """Test parameters (*before, SKU name) for the SKUs on which code differs: two ways to multiply, for bf16 more."""
    names = list(CPU_SKUS) if dtype is BF16 else list(CPU_SKUS)[:2]
    return [pytest.param(*before, name, marks=pytest.mark.isa(_NEWEST[name])) for name in names]


def target_of(sku: str) -> Target:
    return Target("cpu", _SKUS[sku])


def make_call(
    op: Op, *inputs: TensorType, outputs: Sequence[TensorType] | None = None, kv: bool = False, ranges: Ranges = RANGES
) -> KernelCall:
    """A call with inferred output types (or given ones)."""
    states = ("kv",) if kv else ()
    return KernelCall(op, inputs, tuple(outputs or op.infer(*inputs)), states, ranges)


@dataclass
class Compiled:
    """A kernel ready to run on this machine."""

    call: KernelCall
    kernel: Kernel
    target: Target
    function: Any
    library: ctypes.CDLL

    def __call__(
        self,
        *arrays: np.ndarray | None,
        step: Inputs | None = None,
        states: Sequence[np.ndarray] = (),
        workers: int = 1,
    ) -> tuple[np.ndarray, ...]:
        """Outputs for storage arrays. Output and scratch memory starts as 0xFF bytes (NaN in every float type)."""
        inputs = step or Inputs()
        symbols = {
            "T": inputs.num_tokens,
            "S": 1 if inputs.query_start is None else len(inputs.query_start) - 1,
            "R": 0 if inputs.logits_rows is None else len(inputs.logits_rows),
            "C": inputs.row_count,
        }
        outputs = [None if t == TOKEN_TYPE else _poisoned(t, symbols) for t in self.call.outputs]
        size = self.kernel.scratch_bytes(self.call, self.target)
        scratch = _aligned(size) if size else None
        operands = [*arrays, *outputs, *states, scratch]
        pointers = (ctypes.c_void_p * len(operands))(*(None if a is None else a.ctypes.data for a in operands))
        run_workers(self.function, inputs.step(), pointers, workers, self.check_tiles)
        self.check_tiles()
        return tuple(o for o in outputs if o is not None)

    def check_tiles(self) -> None:
        """No thread waits, or returns, with live tile registers (as far as they are emulated)."""
        if hasattr(self.library, "pelton_tiles_in_use"):
            assert self.library.pelton_tiles_in_use() == 0, "a thread was left with live tiles"


def run_workers(
    function: Any, step: Step, pointers: Any, count: int, at_barrier: Callable[[], None] | None = None
) -> None:
    """Call a kernel from ``count`` threads; one calls ``at_barrier`` when all wait.

    A worker that raises or hangs breaks the barrier for all.
    """
    barrier = threading.Barrier(count, at_barrier, timeout=60)
    meet = _BARRIER(lambda _: barrier.wait() and None)
    unclaimed = (Unclaimed * count)()
    workers = [Worker(index=i, count=count, barrier=meet, unclaimed=unclaimed) for i in range(count)]
    if count == 1:
        function(ctypes.byref(step), pointers, ctypes.byref(workers[0]))
        return
    threads = [threading.Thread(target=function, args=(ctypes.byref(step), pointers, ctypes.byref(w))) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a worker hangs"
    assert not barrier.broken, "the workers did not all meet"


@functools.cache
def compiled(call: KernelCall, sku: str, kernel: Kernel | None = None) -> Compiled:
    """Select (or take ``kernel``), emit, compile and load."""
    target = target_of(sku)
    kernel = kernel or KernelRegistry(KERNELS).select(call, target)
    assert target.sku is not None
    if "amx_tile" in target.sku.features:
        request_tile_permission()
    data = compile_cpu([("kernel", kernel.emit(call, target, "kernel"))], target.sku, cache=ObjectCache())
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        library = ctypes.CDLL(file.name)
    function = library.kernel
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return Compiled(call, kernel, target, function, library)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype.numpy)


def pack_panel16(w: np.ndarray) -> np.ndarray:
    """[N, K] -> panel16 storage; written here on its own, as a check of the format's definition."""
    n, k = w.shape
    pair = 2 if w.dtype.itemsize == 2 else 1
    padded = np.zeros((-(-n // 16) * 16, -(-k // pair) * pair), w.dtype)
    padded[:n, :k] = w
    split = padded.reshape(-1, 16, padded.shape[1] // pair, pair).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(split if pair == 2 else split[..., 0])


def pack_kv16(pages: np.ndarray) -> np.ndarray:
    """[blocks, tokens, 2, kv_heads, head_dim] -> layout kv16, one row of storage per block."""
    blocks, tokens, _, heads, dim = pages.shape
    pair = 2 if pages.dtype == BF16.numpy else 1
    k = pages[:, :, 0].transpose(0, 2, 1, 3).reshape(blocks, heads, tokens // 16, 16, dim // pair, pair)
    v = pages[:, :, 1].transpose(0, 2, 1, 3).reshape(blocks, heads, tokens // pair, pair, dim)
    parts = (k.transpose(0, 1, 2, 4, 3, 5), v.transpose(0, 1, 2, 4, 3))
    return np.concatenate([np.ascontiguousarray(p).reshape(blocks, -1) for p in parts], axis=1)


def unpack_kv16(storage: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The inverse of pack_kv16; ``like`` gives the shape."""
    blocks, tokens, _, heads, dim = like.shape
    pair = 2 if storage.dtype == BF16.numpy else 1
    half = heads * tokens * dim
    k = storage[:, :half].reshape(blocks, heads, tokens // 16, dim // pair, 16, pair)
    v = storage[:, half:].reshape(blocks, heads, tokens // pair, dim, pair)
    k = k.transpose(0, 1, 2, 4, 3, 5).reshape(blocks, heads, tokens, dim)
    v = v.transpose(0, 1, 2, 4, 3).reshape(blocks, heads, tokens, dim)
    return np.stack([k, v], axis=3).transpose(0, 2, 3, 1, 4)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the largest magnitude wanted."""
    g, w = got.astype(np.float64), want.astype(np.float64)
    return float(np.max(np.abs(g - w)) / max(1e-30, np.max(np.abs(w)))) if w.size else 0.0


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _poisoned(type_: TensorType, symbols: dict[str, int]) -> np.ndarray:
    shape = type_.storage_shape(symbols)
    memory = _aligned(max(1, int(np.prod(shape))) * type_.dtype.itemsize)
    count = int(np.prod(shape))
    return memory[: count * type_.dtype.itemsize].view(type_.dtype.numpy).reshape(shape)


def _aligned(size: int) -> np.ndarray:
    memory = np.full(size + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


__all__ = ["BF16", "F16", "F32", "Compiled", "Inputs", "ml_dtypes"]


class GuardedArrays:
    """``guarded(array)``: a copy whose last byte is the last readable one."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p

    def __enter__(self) -> Callable[[np.ndarray], np.ndarray]:
        return self._place

    def __exit__(self, *_: object) -> None:
        for address, size in self._maps:
            self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def _place(self, array: np.ndarray) -> np.ndarray:
        size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        arguments = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
        address = self._libc.mmap(None, ctypes.c_size_t(size + mmap.PAGESIZE), *arguments)
        assert address not in (None, ctypes.c_void_p(-1).value)
        self._maps.append((address, size + mmap.PAGESIZE))
        end = ctypes.c_void_p(address + size)
        assert self._libc.mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        memory = (ctypes.c_uint8 * array.nbytes).from_address(address + size - array.nbytes)
        placed = np.frombuffer(memory, np.uint8).view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed
