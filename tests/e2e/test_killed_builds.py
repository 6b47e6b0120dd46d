"""A build that a signal ends leaves nothing behind, at any point; what SIGKILL leaves, the next build removes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pelton
from pelton.runtime.format.temporaries import create_locked, remove_stale, temporary_name

from .conftest import ROOT

#: Builds, and sends this process a signal where the function named is called the first time (and has done its work).
_STRUCK = """
import importlib, os, signal, sys
from pelton.cli import build_engine_main
# Whoever starts the tests in the background has them ignore SIGINT, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
number, where = int(sys.argv.pop()), sys.argv.pop()
module, owner, name = where.split(":")
holder = importlib.import_module(module)
holder = getattr(holder, owner) if owner else holder
whole = getattr(holder, name)
def struck(*arguments, **named):
    result = whole(*arguments, **named)
    os.kill(os.getpid(), number)
    return result
setattr(holder, name, struck)
sys.exit(build_engine_main(sys.argv[1:]))
"""
#: Moments of a build: the function of it that was called the first time.
PLACES = {
    "trace": "pelton.builder.build::trace",
    "compile": "pelton.builder.codegen.cpu::_run",
    "cache": "pelton.builder.codegen.cache::content_key",
    "create": "pelton.runtime.format.engine_writer::create_locked",
    "weights": "pelton.runtime.format.container:EngineWriter:write_tensor",
    "golden": "pelton.builder.build::golden_vectors",
    "close": "pelton.runtime.format.engine_writer::header_root",
}
OLD = b"an older engine"


def build_struck(where: str, number: signal.Signals, checkpoint: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """A build in a process, with an object cache and a folder for temporary files of its own."""
    work = out.parent.parent
    (work / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", _STRUCK, str(checkpoint), "-o", str(out), where, str(int(number))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PELTON_CACHE": str(work / "cache"), "TMPDIR": str(work / "tmp")},
        timeout=300,
    )


def place(tmp_path: Path) -> Path:
    """An output path with an older engine under it."""
    out = tmp_path / "out" / "m.engine"
    out.parent.mkdir()
    out.write_bytes(OLD)
    return out


STRUCK = [*((where, signal.SIGTERM) for where in PLACES), ("create", signal.SIGINT), ("weights", signal.SIGINT)]


@pytest.mark.parametrize(("where", "number"), STRUCK)
def test_signals_leave_nothing(where: str, number: signal.Signals, tiny: Any, tmp_path: Path) -> None:
    out = place(tmp_path)
    done = build_struck(PLACES[where], number, tiny("llama"), out)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert out.read_bytes() == OLD
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path for path in (tmp_path / "cache").rglob(".*") if path.is_file()] == []


def test_the_next_build_removes_what_a_killed_one_left(tiny: Any, tmp_path: Path) -> None:
    out = place(tmp_path)
    done = build_struck(PLACES["weights"], signal.SIGKILL, tiny("llama"), out)
    assert done.returncode == -signal.SIGKILL
    assert out.read_bytes() == OLD
    (left,) = (path for path in out.parent.iterdir() if path != out)
    other = out.with_name(".other.engine.tmp-1-abcd")
    other.write_bytes(b"of another output")
    pelton.build(tiny("llama"), out, cache_dir=tmp_path / "cache")
    assert not left.exists()
    assert sorted(path.name for path in out.parent.iterdir()) == [other.name, out.name, f"{out.name}.report.json"]


def test_a_living_writers_file_stays(tmp_path: Path) -> None:
    out = tmp_path / "m.engine"
    mine, stale = temporary_name(out), temporary_name(out)
    fd = create_locked(mine)
    stale.write_bytes(b"half")
    (tmp_path / ".m.engine.tmp-link").symlink_to(tmp_path / "elsewhere")
    remove_stale(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, ".m.engine.tmp-link"])
    os.close(fd)
    remove_stale(out)
    assert not mine.exists()


def test_a_file_removed_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = temporary_name(tmp_path / "m.engine")
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: name.unlink())
    assert create_locked(name) == -1
    assert not name.exists()
