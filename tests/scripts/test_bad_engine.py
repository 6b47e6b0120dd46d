"""What the measuring scripts say to an engine that is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["bench_limits", "bench_startup"])
def test_an_engine_that_is_not_there_is_one_line(script: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / script, tmp_path / "no.engine"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"{script}: error: ")
    assert "no.engine: cannot open the engine" in line
