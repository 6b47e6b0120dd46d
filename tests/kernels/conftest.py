"""Skips tests whose code this CPU cannot run, with the reason."""

from __future__ import annotations

import pytest

from pelton.runtime.drivers.cpu.host import host_features


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("isa"):
        (feature,) = mark.args
        if feature not in host_features():
            pytest.skip(f"this CPU has no {feature}")
