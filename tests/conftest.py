"""Options, fixtures and marks of all tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from pelton.runtime.drivers.cpu.host import host_features

# The same examples every time, and no time limits: machines that run tests may be busy.
settings.register_profile("pelton", derandomize=True, deadline=None, database=None)
settings.load_profile("pelton")

# torch records its tracing at level DEBUG, which would bury a failure's own output.
logging.getLogger("torch.__trace").propagate = False

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose code this CPU cannot run, with the reason."""
    for mark in item.iter_markers("isa"):
        (feature,) = mark.args
        if feature not in host_features():
            pytest.skip(f"this CPU has no {feature}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares text with tests/golden/NAME, or writes it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"{path} does not exist; run pytest with --update-golden and read what it wrote"
        assert text == path.read_text(), f"{path} differs; if that is meant, run pytest with --update-golden"

    return compare
