"""Safetensors shards as one TensorSource: headers checked up front, data mapped and never copied."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.errors import CheckpointError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_source import TensorInfo

_MAX_HEADER = 100 << 20  # as the reference reader has it
#: Element sizes of dtypes that can stand in a file though no pelton DType exists for them.
_OTHER_SIZES = {"F64": 8, "U64": 8, "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """One mapped safetensors file. Raises CheckpointError when the header contradicts the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error.strerror}); download the checkpoint again"
            ) from None
        with self._file:
            self.entries = _read_header(path, self._file)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, name: str, dtype: DType) -> np.ndarray[Any, Any]:
        """A read-only view on the mapped bytes of a tensor."""
        entry = self.entries[name]
        flat = np.frombuffer(self._map, dtype.numpy, prod(entry.shape), entry.start)
        return flat.reshape(entry.shape)

    def release(self, name: str) -> None:
        """Tell the kernel that these pages are not needed; they are read again when touched."""
        entry = self.entries[name]
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)


class SafetensorsSource:
    """All tensors of a checkpoint folder's safetensors shards (see TensorSource)."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._where: dict[str, Shard] = {}
        for shard in shards:
            for name in shard.entries:
                if name in self._where:
                    other = self._where[name].path.name
                    raise CheckpointError(
                        f"{shard.path}: tensor {name!r} also stands in {other}; remove the stale shard"
                    )
                self._where[name] = shard
        self._names = sorted(self._where)

    @classmethod
    def open(cls, folder: Path) -> SafetensorsSource:
        """Map ``model.safetensors`` or the shards that ``model.safetensors.index.json`` names."""
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():
            return cls([Shard(single)])
        if not index.is_file():
            raise CheckpointError(_no_weights(folder))
        weight_map = _read_index(index)
        shards = {name: Shard(folder / name) for name in sorted(set(weight_map.values()))}
        source = cls(list(shards.values()))
        for tensor, shard in weight_map.items():
            if tensor not in shards[shard].entries:
                raise CheckpointError(
                    f"{index}: says that tensor {tensor!r} is in {shard}, which does not have it; shards and index "
                    "are from different downloads, so download the checkpoint again"
                )
        return source

    def names(self) -> Sequence[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        entry = self._shard(name).entries[name]
        return TensorInfo(self._dtype(name, entry), entry.shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        shard = self._shard(name)
        return shard.array(name, self._dtype(name, shard.entries[name]))

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self.read(name)[start:stop]

    def release(self, name: str) -> None:
        self._shard(name).release(name)

    def _shard(self, name: str) -> Shard:
        try:
            return self._where[name]
        except KeyError:
            files = sorted({shard.path.name for shard in self._where.values()})
            raise CheckpointError(f"tensor {name!r} is in none of {', '.join(files[:4])}") from None

    def _dtype(self, name: str, entry: Entry) -> DType:
        try:
            return DType.from_safetensors(entry.dtype)
        except KeyError:
            raise CheckpointError(
                f"{self._where[name].path}: tensor {name!r} has dtype {entry.dtype}, which pelton does not read; "
                "convert the checkpoint to bfloat16, float16 or float32"
            ) from None


def _no_weights(folder: Path) -> str:
    """The message for a folder without safetensors, with the remedy that fits what is there."""
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        return (
            f"{folder}: the weights are a pickle ({pickled[0].name}), which could run code when read; "
            "download the safetensors version, or convert them with transformers' save_pretrained"
        )
    return (
        f"{folder}: neither model.safetensors nor model.safetensors.index.json is there; download the checkpoint again"
    )


def _read_index(index: Path) -> dict[str, str]:
    """The weight map of an index file: tensor name -> shard file name, all in the index's own folder."""
    try:
        document = json.loads(index.read_bytes())
        weight_map = document["weight_map"]
        valid = bool(weight_map) and all(isinstance(v, str) for v in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a shard index ({error}); download it again") from None
    if not valid:
        raise CheckpointError(f"{index}: the weight map is empty or not a map of names; download it again")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: shard {shard!r} lies outside the checkpoint folder")
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"{index.parent}: shard {shard} is missing, though the index names it; download it again"
            )
    return dict(weight_map)


def _read_header(path: Path, file: Any) -> dict[str, Entry]:
    """Parse and check a safetensors header: sizes, offsets, no overlap, no gap."""
    size = path.stat().st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8 or length > _MAX_HEADER:
        raise CheckpointError(
            f"{path}: {size} bytes, too short for its header of {length} bytes; truncated or not a safetensors file"
        )
    try:
        document = json.loads(file.read(length))
        document.pop("__metadata__", None)
        entries = {name: _entry(fields, 8 + length) for name, fields in document.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged ({error}); download it again") from None
    _check_layout(path, entries, 8 + length, size)
    return entries


def _entry(fields: dict[str, Any], base: int) -> Entry:
    start, stop = fields["data_offsets"]
    shape = tuple(fields["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"shape {shape} or offsets {start}:{stop} are not natural numbers")
    return Entry(str(fields["dtype"]), shape, base + start, base + stop)


def _check_layout(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    """Tensors must tile the data area exactly, each with the bytes its shape needs."""
    for name, entry in entries.items():
        if entry.stop > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.stop}, the file at {size}; download it again"
            )
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            what = "overlaps its neighbour" if entry.start < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} {what}: the header is damaged, download the file again")
        itemsize = _OTHER_SIZES.get(entry.dtype)
        if itemsize is None:
            try:
                itemsize = DType.from_safetensors(entry.dtype).itemsize
            except KeyError:
                raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {entry.dtype!r}") from None
        if entry.stop - entry.start != prod(entry.shape) * itemsize:
            raise CheckpointError(
                f"{path}: tensor {name!r} {entry.dtype}{list(entry.shape)} has {entry.stop - entry.start} bytes: "
                "the header is damaged, download the file again"
            )
        position = entry.stop
    if position != size:
        raise CheckpointError(
            f"{path}: {size - position} bytes after the last tensor: header and data do not belong together"
        )
