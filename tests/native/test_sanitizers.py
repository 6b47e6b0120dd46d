"""The native tests without Python, plain and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "address", "thread"])
def test_native_tests(kind: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"{tool} is not installed")
    command = [str(ROOT / "scripts/sanitize"), kind]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "ok  " in done.stdout
