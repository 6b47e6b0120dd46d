"""The hash tree over an engine's weights: SHA-256 of every MiB, and their list is itself a hashed section.

So one damaged MiB is found and named without trusting anything but the header, and weights can be checked
while they are already in use.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

LEAF = 1 << 20  # bytes of weights that one hash covers
DIGEST = 32  # bytes of one hash


def leaf_count(nbytes: int) -> int:
    """Leaves over ``nbytes`` of weights; the last may be short."""
    return -(-nbytes // LEAF)


class LeafHasher:
    """Hashes a stream of bytes into leaves as it passes by."""

    def __init__(self) -> None:
        self.position = 0
        self._done: list[bytes] = []
        self._open = hashlib.sha256()

    def update(self, data: memoryview | bytes) -> None:
        """The next bytes of the stream."""
        view = memoryview(data)
        while len(view):
            part = view[: LEAF - self.position % LEAF]
            self._open.update(part)
            self.position += len(part)
            view = view[len(part) :]
            if self.position % LEAF == 0:
                self._done.append(self._open.digest())
                self._open = hashlib.sha256()

    def skip_zeros(self, count: int) -> None:
        """As ``update`` with ``count`` zero bytes."""
        self.update(bytes(count))

    def digests(self) -> bytes:
        """All leaf hashes, one after another; ends the stream."""
        tail = [self._open.digest()] if self.position % LEAF else []
        return b"".join(self._done + tail)


def damaged_leaves(
    fd: int, start: int, stop: int, digests: bytes, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, int]]:
    """File ranges (offset, end) of leaves of ``[start, stop)`` whose hash is wrong or that cannot be read.

    Reads with pread, not through a mapping: a file cut short while in use is then a finding, not a SIGBUS.
    """
    buffer = bytearray(LEAF)
    for index, offset in enumerate(range(start, stop, LEAF)):
        if cancelled():
            return
        end = min(stop, offset + LEAF)
        view = memoryview(buffer)[: end - offset]
        whole = _read_exactly(fd, view, offset)
        if not whole or hashlib.sha256(view).digest() != digests[index * DIGEST : (index + 1) * DIGEST]:
            yield offset, end


def _read_exactly(fd: int, view: memoryview, offset: int) -> bool:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError:
            return False
        if count == 0:
            return False
        done += count
    return True


@dataclass(frozen=True)
class WeightsFile:
    """The bytes ``[start, stop)`` of an open file, which hold all weights of an engine."""

    fd: int  # stays the engine's
    start: int  # a multiple of 4096
    stop: int
    digests: bytes  # of the leaves; empty if they need no check (any more)


class WeightsCheck(Protocol):
    """A check of the weights that goes on while they are in use."""

    @property
    def complete(self) -> bool:
        """Whether everything has been looked at."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait (seconds) for the end; returns whether it was reached."""
        ...

    def damage(self) -> list[tuple[int, int]]:
        """File ranges found damaged since the last call."""
        ...

    def cancel(self) -> None:
        """The engine file is being closed."""
        ...


class BackgroundVerifier:
    """A daemon thread that looks for damaged leaves at low priority and reports each one.

    It lets ``delay`` seconds pass first: a driver that is about to read all weights can do the check on its way.
    """

    def __init__(
        self,
        fd: int,
        start: int,
        stop: int,
        digests: bytes,
        report: Callable[[int, int], None],
        delay: float = 0.25,
    ) -> None:
        self._cancelled = threading.Event()
        self._fd = os.dup(fd)
        self._work = (start, stop, digests)
        self._report = report
        self._delay = delay
        self._thread = threading.Thread(target=self._run, name="pelton-verify-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux: of this thread only
        except OSError:
            pass  # a matter of taste, not of need
        try:
            if self._cancelled.wait(self._delay):
                return
            for offset, end in damaged_leaves(self._fd, *self._work, self._cancelled.is_set):
                self._report(offset, end)
        finally:
            os.close(self._fd)

    @property
    def complete(self) -> bool:
        return not self._cancelled.is_set() and not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return self.complete

    def damage(self) -> list[tuple[int, int]]:
        """None: each is reported from the thread."""
        return []

    def cancel(self) -> None:
        """Stop soon and wait for it."""
        self._cancelled.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
