"""EngineWriter: stream an engine into a temporary file and put it in place only when all of it is there."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from ..errors import BuildError
from .engine_header import (
    FORMAT,
    MAX_RANK,
    METADATA,
    NO_HASH,
    PAD,
    SECTION,
    Header,
    Metadata,
    SectionEntry,
    encode_header,
    header_root,
    place,
)
from .engine_reader import HASH_TREE, TENSOR_LAYOUTS, EngineFile, LayoutEntry
from .hash_tree import DIGEST, LeafHasher, leaf_count
from .manifest import Manifest, encode_manifest
from .temporaries import create_locked, remove_stale, temporary_name
from .tensor_spec import TensorSpec

_SECTION_NAME = re.compile(r"[A-Za-z0-9_.+:,=@-][A-Za-z0-9_.+:,=@/-]{0,199}")


class EngineWriter:
    """Writes one engine. Use as a context manager::

        with EngineWriter(path, manifest, tensors, sections, {"golden": 16384}) as writer:
            for spec in tensors:
                writer.write_tensor(spec.name, chunks_of(spec))
            writer.fill("golden", vectors(writer.reader()))

    Tensors are written in the order given. On a clean exit the file appears under ``path`` at once; on any
    exception the temporary file is removed and an older file of that name stays as it was; what a killed writer to
    ``path`` has left is removed at the start. Equal arguments give equal bytes. Raises BuildError for what cannot be
    written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Manifest,
        tensors: Sequence[TensorSpec],
        sections: Mapping[str, bytes],
        reserve: Mapping[str, int] | None = None,
    ) -> None:
        """``reserve`` maps section names to the most bytes that ``fill`` may put there later."""
        self.path = Path(path)
        self._manifest = manifest
        self._reserve = dict(reserve or {})
        self._pending = list(tensors)
        _check_names(tensors, [*sections, *self._reserve])
        packed = {t.name: LayoutEntry(t.shape, t.layout) for t in tensors if t.layout != "rows"}
        contents = {**sections, TENSOR_LAYOUTS: msgspec.json.encode(packed)}
        self._stored, self._entries = _encode_sections(contents)
        for name, size in self._reserve.items():
            self._set(name, _reserved(b"", size), SectionEntry("reserved", size, NO_HASH))
        weights = _weights_bytes(tensors)
        tree = bytes(leaf_count(weights) * DIGEST)
        self._set(HASH_TREE, tree, SectionEntry("raw", len(tree), NO_HASH))
        named: list[tuple[str, str, tuple[int, ...], int]]
        named = [(SECTION + n, "U8", (len(self._stored[n]),), len(self._stored[n])) for n in sorted(self._stored)]
        named += [(t.name, t.dtype.safetensors, t.storage_shape, t.nbytes) for t in tensors]
        self._tensors = dict(place(named))
        self._header = self._make_header()
        self._hasher = LeafHasher()
        self._filled: set[str] = set()
        self._reader: EngineFile | None = None
        self._fd = -1
        self._temporary = temporary_name(self.path)

    @property
    def file_size(self) -> int:
        """Bytes of the finished file, known from the start."""
        return self._header.file_size

    def write_tensor(self, name: str, chunks: Iterable[np.ndarray[Any, Any] | bytes]) -> None:
        """Write the next tensor: its storage bytes, in chunks of any size (arrays must have the tensor's dtype)."""
        if not self._pending or self._pending[0].name != name:
            due = repr(self._pending[0].name) if self._pending else "none"
            raise BuildError(f"tensor {name!r} cannot be written now: tensors go in order, and the next is {due}")
        spec = self._pending[0]
        offset, nbytes = self._header.location(name)
        self._hasher.skip_zeros(offset - self._header.weights_start - self._hasher.position)
        done = 0
        for chunk in chunks:
            data = _bytes_of(chunk, spec)
            if done + len(data) > nbytes:
                raise BuildError(f"tensor {name!r} gives more than its {nbytes} bytes ({spec.type})")
            self._write(data, offset + done)
            self._hasher.update(data)
            done += len(data)
        if done != nbytes:
            raise BuildError(f"tensor {name!r} gives {done} bytes, and its type {spec.type} takes {nbytes}")
        self._pending.pop(0)

    def reader(self) -> EngineFile:
        """The unfinished file, readable as an engine (tensors, plans, code), once all tensors are written."""
        self._require_all_tensors()
        if self._reader is None:
            with self._disk():
                self._reader = EngineFile(self._temporary, os.open(self._temporary, os.O_RDONLY), verify=False)
        return self._reader

    def fill(self, section: str, data: bytes) -> None:
        """Put ``data`` into a reserved section."""
        size = self._reserve.get(section)
        if size is None:
            raise BuildError(f"section {section!r} was not reserved; reserved: {', '.join(self._reserve) or '(none)'}")
        if len(data) > size:
            raise BuildError(f"section {section!r} has room for {size} bytes, not {len(data)}; reserve more")
        self._set(section, _reserved(data, size), SectionEntry("reserved", size, NO_HASH))
        self._write(memoryview(self._stored[section]), self._header.location(SECTION + section)[0])
        self._filled.add(section)

    def __enter__(self) -> Self:
        remove_stale(self.path)
        self._check_place()
        try:
            with self._disk():
                while (fd := create_locked(self._temporary)) < 0:
                    self._temporary = temporary_name(self.path)
                self._fd = fd
                os.ftruncate(self._fd, self.file_size)
            self._write(memoryview(encode_header(self._header.metadata, self._tensors)), 0)
            for name, stored in self._stored.items():
                self._write(memoryview(stored), self._header.location(SECTION + name)[0])
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    # --- inner parts ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Hashes, final header, rename."""
        self._require_all_tensors()
        unfilled = [name for name in self._reserve if name not in self._filled]
        if unfilled:
            raise BuildError(f"reserved sections were never filled: {', '.join(unfilled)}")
        tree = self._hasher.digests()
        self._set(HASH_TREE, tree, SectionEntry("raw", len(tree), NO_HASH))
        self._write(memoryview(tree), self._header.location(SECTION + HASH_TREE)[0])
        for name, stored in self._stored.items():
            digest = hashlib.sha256(stored).hexdigest()
            self._entries[name] = msgspec.structs.replace(self._entries[name], sha256=digest)
        metadata = self._make_header().metadata
        metadata = msgspec.structs.replace(metadata, root=header_root(metadata, self._tensors))
        header = encode_header(metadata, self._tensors)
        if len(header) != self._header.data_start:
            raise BuildError("the header changed its size while the engine was written; this is a bug in pelton")
        self._write(memoryview(header), 0)
        with self._disk():
            os.fsync(self._fd)
            os.replace(self._temporary, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _discard(self) -> None:
        """Let go of everything; after a successful rename there is no temporary file left to remove."""
        if self._reader is not None:
            self._reader.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(OSError):  # a signal may have come between the file's making and here
            os.unlink(self._temporary)

    def _set(self, name: str, stored: bytes, entry: SectionEntry) -> None:
        self._stored[name], self._entries[name] = stored, entry

    def _make_header(self) -> Header:
        sections = {name: self._entries[name] for name in sorted(self._entries)}
        metadata = Metadata(
            format=FORMAT,
            schema=str(self._manifest.schema),
            pelton_version=self._manifest.pelton_version,
            root=NO_HASH,
            sections=msgspec.json.encode(sections).decode(),
            manifest=encode_manifest(self._manifest).decode(),
        )
        return Header(metadata, self._tensors, sections, len(encode_header(metadata, self._tensors)))

    def _require_all_tensors(self) -> None:
        if self._pending:
            names = ", ".join(repr(t.name) for t in self._pending[:3])
            raise BuildError(
                f"{len(self._pending)} tensors are not written yet: {names}{', ...' * (len(self._pending) > 3)}"
            )

    def _check_place(self) -> None:
        folder = self.path.parent
        if self.path.is_dir():
            raise BuildError(f"cannot write {self.path}: it is a folder; name the engine file to write")
        if not folder.is_dir():
            raise BuildError(f"cannot write {self.path}: the folder {folder} does not exist; create it first")
        with self._disk():
            disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < self.file_size:
            raise BuildError(
                f"cannot write {self.path}: it needs {self.file_size / 1e6:.1f} MB, and {folder} has"
                f" {free / 1e6:.1f} MB free; make room or choose another folder"
            )

    def _write(self, data: memoryview, offset: int) -> None:
        with self._disk():
            while len(data):
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn an OSError of our own file operations into a BuildError."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            remedy = "make room or choose another folder" if full else "choose a folder you may write to"
            raise BuildError(f"cannot write {self.path}: {error.strerror} in {self.path.parent}; {remedy}") from error


def _check_names(tensors: Sequence[TensorSpec], sections: Sequence[str]) -> None:
    seen: set[str] = set()
    for spec in tensors:
        if (
            not spec.name
            or spec.name == METADATA
            or spec.name.startswith((SECTION, PAD))
            or not spec.name.isprintable()
        ):
            raise BuildError(f"{spec.name!r} cannot be the name of a tensor in an engine")
        if spec.name in seen:
            raise BuildError(f"tensor {spec.name!r} is given twice; name a shared tensor once")
        if len(spec.storage_shape) > MAX_RANK:
            raise BuildError(f"tensor {spec.name!r} has more than {MAX_RANK} axes")
        seen.add(spec.name)
    for name in sections:
        if not _SECTION_NAME.fullmatch(name) or name in (HASH_TREE, TENSOR_LAYOUTS):
            raise BuildError(f"{name!r} cannot be the name of a section in an engine")
    if len(set(sections)) != len(sections):
        raise BuildError("a section is both given and reserved")


def _weights_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Bytes from the first weight to the end of the file."""
    last = 0
    for _, entry in place([(t.name, t.dtype.safetensors, t.storage_shape, t.nbytes) for t in tensors]):
        last = entry.data_offsets[1]
    return last


def _encode_sections(sections: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, SectionEntry]]:
    """Deflate what shrinks by it. Code stays as it is, so that standard tools can look at it in the file."""
    stored, entries = {}, {}
    for name, data in sections.items():
        small = data if name.startswith("code/") else zlib.compress(data, 9)
        deflate = len(small) < 0.9 * len(data)
        stored[name] = small if deflate else bytes(data)
        entries[name] = SectionEntry("deflate" if deflate else "raw", len(data), NO_HASH)
    return stored, entries


def _reserved(data: bytes, size: int) -> bytes:
    return (len(data).to_bytes(8, "little") + data).ljust(8 + size, b"\0")


def _bytes_of(chunk: np.ndarray[Any, Any] | bytes, spec: TensorSpec) -> memoryview:
    if not isinstance(chunk, np.ndarray):
        return memoryview(chunk).cast("B")
    if chunk.dtype != spec.dtype.numpy:
        raise BuildError(f"tensor {spec.name!r} is {spec.dtype.value}, and its data came as {chunk.dtype}")
    return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
