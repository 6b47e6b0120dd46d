"""The native tests without Python, plain and under sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny import ROOT

#: A test's entry in a list of main's: its name, and the function of that name.
LISTED = re.compile(r'\{"(\w+)", \1\}')


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
    listed = [name for path in (ROOT / "cpp/tests").glob("*_tests.cpp") for name in LISTED.findall(path.read_text())]
    assert len(listed) >= 14
    assert sorted(re.findall(r"^ok +(\w+)$", done.stdout, re.MULTILINE)) == sorted(listed)
