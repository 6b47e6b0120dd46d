"""The header of an engine file: a safetensors header with a strict canonical form, written and read here.

Layout of the file (docs/engine_format.md has the whole of it):

  8 bytes   header length, little endian
  header    JSON, padded with spaces so that the data starts on a page
  sections  byte tensors "section/<name>", each on a page
  weights   tensors under their own names, each on a page

Gaps up to the next page are byte tensors "__pad__.<n>", because safetensors allows no holes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import EngineFormatError
from .dtypes import DType
from .manifest import SCHEMA

PAGE = 4096
MAX_HEADER = 64 << 20
MAX_RANK = 8
FORMAT = "pelton-engine"
SECTION = "section/"
PAD = "__pad__."
METADATA = "__metadata__"
NO_HASH = "0" * 64
_MAX_EXPANSION = 1040  # deflate cannot do more; a claim beyond it is no reason to allocate anything

_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a safetensors header; offsets count from the start of the data."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class SectionEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a section is stored.

    raw: as it is. deflate: zlib. reserved: 8 bytes length (little endian), data, zeros up to the tensor's size.
    """

    encoding: Literal["raw", "deflate", "reserved"]
    size: _Size  # bytes of the decoded section; of a reserved one the most it can hold
    sha256: _Sha256  # of the stored bytes


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The strings of ``__metadata__``. ``manifest`` and ``sections`` are JSON within a string."""

    format: str
    schema: str
    pelton_version: str
    root: _Sha256  # identity of the engine: hash of the header, which holds the hashes of all else
    sections: str  # {name: SectionEntry}
    manifest: str


@dataclass(frozen=True)
class Header:
    """A parsed header. ``tensors`` is in file order and includes sections and pads."""

    metadata: Metadata
    tensors: dict[str, TensorEntry]
    sections: dict[str, SectionEntry]
    data_start: int

    @property
    def file_size(self) -> int:
        return self.data_start + max((entry.data_offsets[1] for entry in self.tensors.values()), default=0)

    @property
    def weights_start(self) -> int:
        """File offset of the first weight: where the hash tree begins. Everything before it is sections and pads."""
        end = 0
        for name, entry in self.tensors.items():
            if name.startswith(SECTION):
                end = entry.data_offsets[1]
        return min(self.data_start + end + -end % PAGE, self.file_size)

    def location(self, name: str) -> tuple[int, int]:
        """File offset and size in bytes of a tensor."""
        entry = self.tensors[name]
        return self.data_start + entry.data_offsets[0], entry.nbytes


def encode_header(metadata: Metadata, tensors: dict[str, TensorEntry]) -> bytes:
    """Length, JSON and padding: all bytes up to the data."""
    text = msgspec.json.encode({METADATA: metadata, **tensors})
    padded = -(-(8 + len(text)) // PAGE) * PAGE
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8, b" ")


def header_root(metadata: Metadata, tensors: dict[str, TensorEntry]) -> str:
    """The engine's identity: SHA-256 of its header with the root itself as zeros."""
    blank = msgspec.structs.replace(metadata, root=NO_HASH)
    return hashlib.sha256(encode_header(blank, tensors)).hexdigest()


def header_size(prefix: bytes, file_size: int) -> int:
    """Bytes up to the data, from the file's first 8 bytes. Raises EngineFormatError if they cannot be right."""
    if len(prefix) < 8:
        raise EngineFormatError(f"the file has only {len(prefix)} bytes; it is truncated or not an engine")
    size = 8 + int.from_bytes(prefix[:8], "little")
    if size > file_size or size - 8 > MAX_HEADER:
        raise EngineFormatError(
            f"the header claims {size - 8} bytes in a file of {file_size} (most allowed: {MAX_HEADER});"
            " the file is truncated, damaged or not an engine"
        )
    return size


def parse_header(raw: bytes, file_size: int, *, verify: bool = True) -> Header:
    """Check and read a header (``raw`` = all bytes up to the data). Raises EngineFormatError.

    ``verify=False`` leaves out the root hash, for a file still being written.
    """
    try:
        entries = msgspec.json.decode(raw[8:], type=dict[str, msgspec.Raw])
        metadata = _metadata(entries.pop(METADATA, msgspec.Raw(b"{}")))
        tensors = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in entries.items()}
        sections = msgspec.json.decode(metadata.sections, type=dict[str, SectionEntry])
        canonical = encode_header(metadata, tensors)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise EngineFormatError(f"the header is damaged: {error}") from error
    # One form only: no duplicate keys, stray spaces or odd escapes that two readers could take differently.
    if canonical != raw:
        raise EngineFormatError("the header is damaged: it is not in canonical form")
    header = Header(metadata, tensors, sections, len(raw))
    _check_layout(header, file_size)
    if verify and header_root(metadata, tensors) != metadata.root:
        raise EngineFormatError("the header is damaged: its hash does not match; copy or build the engine again")
    return header


def _metadata(raw: msgspec.Raw) -> Metadata:
    """Format and schema first, leniently: other formats and schemas deserve a message of their own."""
    loose = msgspec.json.decode(raw, type=dict[str, str])
    if loose.get("format") != FORMAT:
        raise EngineFormatError("this is not a pelton engine (no such format name in its header)")
    schema = loose.get("schema", "")
    if schema != str(SCHEMA):
        newer = schema.isdecimal() and len(schema) < 10 and int(schema) > SCHEMA
        remedy = "upgrade pelton (pip install -U pelton)" if newer else "build it again with this version of pelton"
        raise EngineFormatError(
            f"the engine has schema {schema[:20]!r} (written by pelton {loose.get('pelton_version', '?')[:40]}),"
            f" and this pelton reads schema {SCHEMA}: {remedy}"
        )
    return msgspec.json.decode(raw, type=Metadata)


def _check_layout(header: Header, file_size: int) -> None:
    """Tensors follow each other without holes to the end of the file, sections first, data on pages."""
    position, in_weights = 0, False
    for name, entry in header.tensors.items():
        start, end = entry.data_offsets
        if start != position or end < start:
            raise EngineFormatError(f"tensor {name!r} lies at {start}:{end}, but the one before ends at {position}")
        if entry.nbytes != prod(entry.shape) * _itemsize(name, entry):
            raise EngineFormatError(
                f"tensor {name!r} has {entry.nbytes} bytes, not what {entry.dtype}{list(entry.shape)} takes"
            )
        if not name.startswith(PAD):
            if start % PAGE:
                raise EngineFormatError(f"tensor {name!r} does not start on a page")
            if name.startswith(SECTION) and in_weights:
                raise EngineFormatError(f"section {name!r} lies behind weights")
            in_weights = not name.startswith(SECTION)
        position = end
    if header.file_size != file_size:
        change = "truncated" if file_size < header.file_size else "longer than it says"
        raise EngineFormatError(f"the file is {change}: {file_size} bytes, by its header {header.file_size}")
    for name, section in header.sections.items():
        entry_ = header.tensors.get(SECTION + name)
        if entry_ is not None and section.size > _MAX_EXPANSION * entry_.nbytes:
            raise EngineFormatError(f"section {name!r} claims {section.size} bytes out of {entry_.nbytes} stored")
    stored = [name.removeprefix(SECTION) for name in header.tensors if name.startswith(SECTION)]
    if sorted(stored) != sorted(header.sections):
        raise EngineFormatError("the sections stored are not those that the header lists")


def _itemsize(name: str, entry: TensorEntry) -> int:
    try:
        dtype = DType.from_safetensors(entry.dtype)
    except KeyError:
        raise EngineFormatError(f"tensor {name!r} has unknown dtype {entry.dtype[:20]!r}") from None
    if name.startswith((SECTION, PAD)) and (dtype is not DType.U8 or len(entry.shape) != 1):
        raise EngineFormatError(f"tensor {name!r} must be a row of bytes")
    return dtype.itemsize


def place(named: list[tuple[str, str, tuple[int, ...], int]]) -> Iterator[tuple[str, TensorEntry]]:
    """Lay out (name, safetensors dtype, shape, nbytes) one after another, each on a page, with pads between."""
    position, pads = 0, 0
    for name, dtype, shape, nbytes in named:
        gap = -position % PAGE
        if gap:
            yield f"{PAD}{pads}", TensorEntry("U8", (gap,), (position, position + gap))
            position, pads = position + gap, pads + 1
        yield name, TensorEntry(dtype, shape, (position, position + nbytes))
        position += nbytes
