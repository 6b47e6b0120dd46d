"""A tiny engine, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

import pelton
from tests.models import make_tiny


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer: 256 tokens, 8 sequences, 64 tokens a step."""
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "tiny.engine"
    pelton.build(
        make_tiny("llama", folder / "model"), path, cache_dir=folder / "cache", max_batch_size=8, max_num_tokens=64
    )
    return path
