"""Permission for tile registers: asked for when the target needs it, and a clear error when it is refused."""

from __future__ import annotations

import msgspec
import pytest

from pelton._core import NativeError, request_tile_permission
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.drivers.cpu.host import host_features
from pelton.runtime.errors import DriverError

from .tiny import TARGET, TinyEngine

NO_TILES = pytest.mark.skipif("amx_tile" in host_features(), reason="this CPU has tiles")


@NO_TILES
def test_a_refusal_says_why_and_what_to_do():
    with pytest.raises(NativeError, match=r"refuses the tile registers \(AMX\): .*; .*without amx_tile"):
        request_tile_permission()


@NO_TILES
def test_a_target_with_tiles_asks_when_it_is_loaded(code):
    target = msgspec.structs.replace(TARGET, features=("amx_tile",))
    with pytest.raises(DriverError, match=r"target cpu/tiny: the kernel refuses the tile registers"):
        CpuDriver(TinyEngine(code, ["touch cells"]), target, threads=1)
    CpuDriver(TinyEngine(code, ["touch cells"]), TARGET, threads=1).close()


@pytest.mark.isa("amx_tile")
def test_permission_is_given_and_may_be_asked_for_again():
    request_tile_permission()
    request_tile_permission()
