"""The native runtime (cpp/bindings.cpp). Used by pelton.runtime.drivers.cpu only; see cpp/runtime for meanings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .runtime.step import FinishedStep, StepInputs

ABI_VERSION: int
"""Version of the interface to compiled kernels (PELTON_ABI_VERSION)."""
MAX_WORKERS: int
"""The largest thread team."""

class NativeError(RuntimeError):
    """Any failure of this module; the message names culprit and remedy."""

def request_tile_permission() -> None:
    """Ask Linux to let this process use tile registers (AMX); NativeError says why not."""

class Region:
    """Zeroed memory on huge pages where possible, touched lazily. Lives as long as it or a view of it."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def bytes(self) -> NDArray[np.uint8]:
        """A writable view [nbytes]."""

class Team:
    """A thread team of ``workers`` (the calling thread included); ``cpus[i]`` is the CPU of worker i + 1."""

    def __init__(self, workers: int, cpus: Sequence[int] = ..., spin_us: float = ...) -> None: ...
    @property
    def size(self) -> int: ...

class WeightMap:
    """``nbytes`` of a file from ``offset`` on, mapped; checked and moved to huge pages at the same address.

    ``digests``: SHA-256 of each MiB, or empty; the descriptor stays the caller's. See cpp/runtime/weight_map.h.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, digests: bytes, move: bool) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def complete(self) -> bool:
        """Whether everything has been checked and moved."""

    @property
    def moves(self) -> bool:
        """Whether weights that are still on the file are to move."""

    @property
    def moved_bytes(self) -> int: ...
    @property
    def damaged(self) -> bool:
        """Whether ``take_damage`` has something."""

    def start(self) -> None:
        """Start the background thread."""

    def stop(self) -> None:
        """Stop it for good, and work before steps."""

    def finish(self, team: Team) -> None:
        """Do all that is left, now."""

    def wait(self, seconds: float) -> bool:
        """Wait until complete (negative: for ever) or stopped; returns ``complete``."""

    def take_damage(self) -> list[tuple[int, int]]:
        """File ranges found damaged since the last call."""

class CodeObject:
    """Kernels from an ELF image (any C-contiguous buffer). Maps executable code: check the hash first."""

    def __init__(self, image: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None: ...
    def kernel(self, symbol: str) -> int:
        """Address of a kernel; NativeError if there is none."""

class Limits:
    """What a step may hold; every field must be set before a Runner is made."""

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    max_logits_rows: int
    logits_chunk: int
    tokens_per_block: int
    max_logprobs: int
    vocab_size: int
    num_slots: int
    num_blocks: list[int]
    windows: list[int]
    def __init__(self) -> None: ...

class Runner:
    """The launches of a plan, bound to memory.

    ``launches``: (symbol, ((kind, address), ...), barrier); kind 0 = address (0: absent), 1 = token_ids, 2 = positions.
    ``paged``: (KV group, address, bytes per block) of each paged state. Addresses must outlive the runner.
    ``weights``: worked on along with the steps until it is complete.
    """

    def __init__(
        self,
        team: Team,
        code: CodeObject,
        launches: Sequence[tuple[str, Sequence[tuple[int, int]], bool]],
        tail_start: int,
        limits: Limits,
        paged: Sequence[tuple[int, int, int]],
        weights: WeightMap | None = None,
    ) -> None: ...
    def execute(self, inputs: StepInputs, finished: FinishedStep | None = None) -> FinishedStep | None:
        """Check the inputs, run one step, fill the outputs of ``finished`` and return it. Releases the GIL meanwhile.

        Without ``finished`` the last step's is used again, if it has the rows that the inputs want, no logits are asked
        for, and no reference to it or to a part of it is left elsewhere; else nothing is run, and None returned.
        Nothing is written on NativeError. The arrays of ``inputs`` are looked up once while the same object comes
        again: an object's fields must stay.
        """

    @property
    def last_span(self) -> tuple[int, int]:
        """When the last step's ``execute`` was entered and about to return: nanoseconds of the monotonic clock."""

    def fetch_at_end(self, memory: Sequence[tuple[int, int]]) -> int:
        """(address, bytes) of what the caller goes through after each step, besides the interpreter's own code.

        At a step's end it is fetched into the caches, line by line; returns the number of lines. Addresses that are not
        valid any more do no harm.
        """

    def copy_blocks(self, group: int, source: Sequence[int], target: Sequence[int]) -> None: ...
    def set_timing(self, on: bool) -> None: ...
    def take_timings(self) -> NDArray[np.int64]:
        """[n, 5]: launch, row_start, begin, kernel end, end (nanoseconds on worker 0) since the last call."""

class Roofs:
    """What this machine does at most: ``threads`` threads at once, thread i pinned to ``cpus[i]`` where given.

    ``read_bytes``: the memory (on huge pages) that ``read`` reads; several times the last-level cache.
    """

    def __init__(self, threads: int, cpus: Sequence[int], read_bytes: int) -> None: ...
    @staticmethod
    def instructions() -> dict[str, str]:
        """The peaks that this CPU has ("fma_f32", "dot_bf16", "dot_int8") -> the instruction measured.

        Where the CPU has tiles (AMX), asks for permission to use them; if it is refused, vectors' count.
        """

    def read(self, passes: int) -> list[float]:
        """Bytes a second of each pass."""

    def peak(self, name: str, passes: int) -> list[float]:
        """Operations a second (multiplications and additions) of each pass; NativeError without the instruction."""

    def round_trip(self) -> float:
        """Seconds that a cache line takes from thread 0's CPU to the farthest other's and back; 0.0 with one thread."""
