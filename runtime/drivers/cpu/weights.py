"""Where a plan's weights are in memory, and what keeps them there."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ...._core import Region, Team, WeightMap
from ...errors import DriverError, RequestError
from ...format.hash_tree import WeightsCheck, WeightsFile
from ...format.plan import WeightRef
from ...format.tensor_type import TensorType
from ...memory import available_memory

#: map: computes on the engine file's mapping (shared, evictable). copy: private, on huge pages, made and checked before
#: the first step. background: starts as "map" and becomes "copy" while steps run; addresses and bits never change.
WeightPlace = Literal["map", "copy", "background"]

ALIGNMENT = 64  # bytes: every operand starts on a cache line
_SPARE = 512 << 20  # bytes of memory that a move must leave to others


class WeightSource(Protocol):
    """What is read of an engine here (``EngineFile`` has it)."""

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor's storage, valid as long as the array lives."""
        ...

    def tensor_location(self, name: str) -> tuple[int, int]:
        """File offset and bytes of a tensor's storage."""
        ...

    def weights_file(self) -> WeightsFile | None:
        """The file and the range of it that holds all weights; None for an engine that is not in a file."""
        ...

    def delegate_check(self, check: WeightsCheck) -> None:
        """Leave the check of the weights to whoever reads them anyway."""
        ...


class Weights(Protocol):
    """Weights of a plan, in the plan's order."""

    addresses: list[int]

    @property
    def native(self) -> WeightMap | None:
        """What moves them while steps run; None if nothing does."""
        ...

    @property
    def moving_bytes(self) -> int:
        """Bytes that are on the file's mapping now and will not be later."""
        ...

    def close(self) -> None:
        """Stop work in the background; addresses stay valid while this object lives."""
        ...


def place_weights(engine: WeightSource, refs: tuple[WeightRef, ...], place: WeightPlace, team: Team) -> Weights:
    """Make a plan's weights usable. Raises DriverError when the engine contradicts its plan, NativeError.

    RequestError for a place that does not exist.
    """
    if place not in get_args(WeightPlace):
        raise RequestError(f"weights: got {place!r}; allowed: {', '.join(get_args(WeightPlace))}")
    for ref in refs:
        _check_size(ref, engine)
    file = engine.weights_file()
    if file is None or not refs:
        return ArrayWeights(engine, refs, copy=place == "copy")
    return FileWeights(engine, file, refs, place, team)


class FileWeights:
    """Weights of an engine file, on a mapping of their own that moves to huge pages as asked."""

    def __init__(
        self, engine: WeightSource, file: WeightsFile, refs: tuple[WeightRef, ...], place: WeightPlace, team: Team
    ) -> None:
        nbytes = file.stop - file.start
        move = place == "copy" or (place == "background" and available_memory() >= nbytes + _SPARE)
        self._nbytes = nbytes
        self.native = WeightMap(file.fd, file.start, nbytes, file.digests, move)
        self.addresses = [self.native.address + engine.tensor_location(ref.name)[0] - file.start for ref in refs]
        if file.digests:
            engine.delegate_check(self)
        if place == "copy":
            self.native.finish(team)
        else:
            self.native.start()

    # Also a WeightsCheck of the engine.

    @property
    def complete(self) -> bool:
        """Whether all weights have been checked, and moved if they are to move."""
        return self.native.complete

    def wait(self, timeout: float | None = None) -> bool:
        """Wait (seconds) until ``complete``; returns whether it is."""
        return self.native.wait(-1.0 if timeout is None else timeout)

    def damage(self) -> list[tuple[int, int]]:
        """File ranges found damaged since the last call."""
        return self.native.take_damage() if self.native.damaged else []

    def cancel(self) -> None:
        """Nothing: these weights stay in use, and their check goes on, when the engine file is closed."""

    @property
    def moving_bytes(self) -> int:
        return self._nbytes - self.native.moved_bytes if self.native.moves and not self.native.complete else 0

    def close(self) -> None:
        self.native.stop()


class ArrayWeights:
    """Weights wherever the engine has them, brought onto the alignment grid if need be."""

    native: WeightMap | None = None
    moving_bytes = 0

    def __init__(self, engine: WeightSource, refs: tuple[WeightRef, ...], *, copy: bool) -> None:
        self._views = [engine.tensor(ref.name).reshape(-1).view(np.uint8) for ref in refs]
        self.addresses = [view.ctypes.data for view in self._views]
        moved = [i for i, address in enumerate(self.addresses) if copy or address % ALIGNMENT]
        self._region = Region(sum(_padded(self._views[i].nbytes) for i in moved))
        offset = 0
        for i in moved:
            size = self._views[i].nbytes
            self._region.bytes()[offset : offset + size] = self._views[i]
            self.addresses[i] = self._region.address + offset
            self._views[i] = self._region.bytes()[offset : offset + size]
            offset += _padded(size)

    def close(self) -> None:
        pass


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_size(ref: WeightRef, engine: WeightSource) -> None:
    nbytes = engine.tensor_location(ref.name)[1]
    expected = TensorType(ref.dtype, ref.shape, ref.layout).nbytes()
    if nbytes != expected:
        raise DriverError(
            f"tensor {ref.name} has {nbytes} bytes, the plan wants {expected} "
            f"({ref.dtype.value}{list(ref.shape)} {ref.layout}); the engine contradicts itself, rebuild it"
        )
