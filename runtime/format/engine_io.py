"""Low-level reads of an engine file: every failure of the file system is an EngineFormatError."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import EngineFormatError
from .engine_header import Header, SectionEntry, header_size, parse_header


def open_file(path: Path) -> int:
    """Open a regular file for reading; returns its descriptor."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise EngineFormatError(
            f"cannot open the engine: {error.strerror}; check the path and its permissions"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise EngineFormatError("this is not a file; name the .engine file itself")
    return fd


def read_header(fd: int, *, verify: bool = True) -> Header:
    """Read and check the header (``verify``: its hash too)."""
    try:
        file_size = os.fstat(fd).st_size
    except OSError as error:
        raise EngineFormatError(f"the file cannot be read: {error.strerror}") from error
    prefix = pread(fd, min(8, file_size), 0)
    return parse_header(pread(fd, header_size(prefix, file_size), 0), file_size, verify=verify)


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Exactly these bytes; a file that has become shorter is an error."""
    parts = []
    while nbytes:
        try:
            part = os.pread(fd, min(nbytes, 1 << 30), offset)
        except OSError as error:
            raise EngineFormatError(f"the file cannot be read: {error.strerror}") from error
        if not part:
            raise EngineFormatError(f"the file ends at byte {offset}, {nbytes} bytes too early: it is truncated")
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)


def inflate(name: str, stored: bytes, size: int) -> bytes:
    """Inflate at most ``size`` bytes."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(stored, size + 1)
    except zlib.error as error:
        raise EngineFormatError(f"section {name!r} is damaged: {error}") from error
    if not stream.eof or stream.unused_data:
        raise EngineFormatError(f"section {name!r} is damaged: its compressed stream has another length")
    return data


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Put the file's name in front of errors."""
    try:
        yield
    except EngineFormatError as error:
        if str(error).startswith(f"{path}: "):
            raise
        remedy = "" if ";" in str(error) else "; copy or build the engine again"
        raise EngineFormatError(f"{path}: {error}{remedy}") from error.__cause__


def decode_section(name: str, entry: SectionEntry, stored: bytes) -> bytes:
    """A section's contents from its stored bytes (see SectionEntry)."""
    if entry.encoding == "reserved":
        length = int.from_bytes(stored[:8], "little")
        if len(stored) != entry.size + 8 or length > entry.size or any(stored[8 + length :]):
            raise EngineFormatError(f"section {name!r} is damaged: its length or padding is wrong")
        return stored[8 : 8 + length]
    data = inflate(name, stored, entry.size) if entry.encoding == "deflate" else stored
    if len(data) != entry.size:
        raise EngineFormatError(f"section {name!r} is damaged: {len(data)} bytes where {entry.size} are due")
    return data
