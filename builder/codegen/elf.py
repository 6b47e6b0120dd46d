"""Just enough ELF64 reading to check a compiled object: dynamic symbols and needed libraries."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...runtime.errors import BuildError

_SHT_DYNSYM = 11
_SHT_DYNAMIC = 6
_DT_NEEDED = 1


@dataclass(frozen=True)
class DynamicInfo:
    """What a shared object exports, imports, and which libraries it asks for."""

    defined: tuple[str, ...]
    undefined: tuple[str, ...]
    needed: tuple[str, ...]


def read_dynamic(data: bytes) -> DynamicInfo:
    """Dynamic symbols of a little-endian ELF64 shared object; raises BuildError if it is not one."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise BuildError(f"the linker's output is not a readable ELF64 shared object ({error}); check $CXX") from error


def _read(data: bytes) -> DynamicInfo:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no little-endian ELF64 header")
    (section_offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry_size) for i in range(count)]
    defined: list[str] = []
    undefined: list[str] = []
    needed: list[str] = []
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind not in (_SHT_DYNSYM, _SHT_DYNAMIC):
            continue
        strings = data[sections[link][4] : sections[link][4] + sections[link][5]]
        if kind == _SHT_DYNSYM:
            for at in range(offset + 24, offset + size, 24):
                name, _, _, index, _, _ = struct.unpack_from("<IBBHQQ", data, at)
                (defined if index else undefined).append(_string(strings, name))
        else:
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == _DT_NEEDED:
                    needed.append(_string(strings, value))
    return DynamicInfo(tuple(sorted(defined)), tuple(sorted(filter(None, undefined))), tuple(needed))


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
