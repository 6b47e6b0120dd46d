"""Compiled once a session: the small kernels of cpp/tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pelton.runtime.drivers.cpu.driver import CpuDriver

from .tiny import TARGET, TinyEngine, compile_kernels


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def load(code: bytes) -> Iterator[Callable[..., tuple[TinyEngine, CpuDriver]]]:
    """load(head, tail, threads=1, **plan fields) -> (engine, driver with state); drivers are closed afterwards."""
    drivers: list[CpuDriver] = []

    def make(
        head: list[str], tail: list[str] | None = None, threads: int = 1, **fields: Any
    ) -> tuple[TinyEngine, CpuDriver]:
        engine = TinyEngine(code, head, tail or [], **fields)
        driver = CpuDriver(engine, TARGET, threads=threads)
        drivers.append(driver)
        driver.allocate((16, 16), 4)
        return engine, driver

    yield make
    for driver in drivers:
        driver.close()
