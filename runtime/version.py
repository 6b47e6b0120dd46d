"""pelton's version, read from the installed package so that it is stated once (pyproject.toml)."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("pelton")
except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    VERSION = "0+source"
