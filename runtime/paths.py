"""Folders and environment variables, all read here. A bad value is fatal."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import PeltonError


def cache_dir() -> Path:
    """Where compiled objects and cached engines lie: $PELTON_CACHE, or ~/.cache/pelton (XDG_CACHE_HOME honoured)."""
    given = os.environ.get("PELTON_CACHE")
    if given is not None:
        path = Path(given)
        if not path.is_absolute():
            raise PeltonError(f"PELTON_CACHE={given!r} must be an absolute path")
        return path
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pelton"


def compiler_command() -> str | None:
    """$CXX: the C++ compiler to use, with its arguments."""
    return os.environ.get("CXX")
