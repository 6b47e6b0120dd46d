"""A moment of each fuzzer (scripts/fuzz runs them longer), and the cases that they would take long to find."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter

from .engines import manifest
from .fuzzing import METADATA, TARGETS, seal, split


@pytest.mark.parametrize("name", TARGETS)
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_only_format_errors_escape(name: str, random: Random, tmp_path: Path) -> None:
    TARGETS[name](random, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_only_format_errors_escape_seeded(name: str, tmp_path: Path) -> None:
    """Plain seeds reach other places than hypothesis, whose draws shrink towards the simple."""
    for seed in range(300):
        TARGETS[name](Random(seed), tmp_path)


def bomb(folder: Path, claimed: int) -> Path:
    """An engine whose section "bomb" inflates to 64 MB and claims another size; the header's hash is right."""
    path = folder / "bomb.engine"
    with EngineWriter(path, manifest(targets=()), [], {"bomb": bytes(64 << 20)}):
        pass
    data = path.read_bytes()
    start, document = split(data)
    sections = msgspec.json.decode(document[METADATA]["sections"])
    sections["bomb"]["size"] = claimed
    document[METADATA]["sections"] = msgspec.json.encode(sections).decode()
    path.write_bytes(seal(document) + data[start:])
    return path


def test_small_file_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    for claimed in (10, 1 << 30):
        path = bomb(tmp_path, claimed)
        tracemalloc.start()
        try:
            with pytest.raises(EngineFormatError, match="bomb"):
                EngineFile.open(path, verify_weights="off").section("bomb")
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
