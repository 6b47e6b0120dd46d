"""What `pelton bench` and `pelton profile` share: files to write, and cells of tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.errors import RequestError

if TYPE_CHECKING:
    from ..inflight_batcher.bench.report import RoofInfo


def progress(quiet: bool, prefix: str) -> Callable[[str], None]:
    """A function that says one line on standard error, or nothing."""
    return (lambda line: None) if quiet else (lambda line: print(f"{prefix}{line}", file=sys.stderr, flush=True))


def check_outputs(*paths: Path | None) -> None:
    """Raise RequestError for a file that could not be written, before anything is measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise RequestError(
                f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}"
            )


def write(path: Path | None, content: Callable[[], bytes]) -> None:
    """Write what ``content()`` gives, if a path was given; RequestError when it cannot be written."""
    if path is None:
        return
    data = content()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error


def roof_text(roofs: RoofInfo) -> str:
    """The roofs in a line."""
    peaks = ", ".join(f"{kind} {rate:.0f}" for kind, rate in roofs.peaks_gop_s.items())
    against = roofs.compute_peak or "none"
    trip = f", CPUs' round trip {roofs.core_round_trip_ns:.0f} ns" if roofs.core_round_trip_ns else ""
    return f"reading {roofs.read_gb_s:.1f} GB/s{trip}; G operations/s: {peaks} (products held against {against})"


def number(value: float | str | None) -> str:
    """A cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def percent(value: float | None) -> str | None:
    """A share as a cell."""
    return None if value is None else f"{100 * value:.1f} %"
