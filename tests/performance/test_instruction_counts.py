"""Instructions of a prefill and of a decode step of a fixed tiny engine stay within a margin of what they were.

Counts are differences between two runs under callgrind, so start-up cancels out; they cover Python and kernels. The
engine is for x86-64-v3, which callgrind can emulate anywhere. `pytest --update-golden` records new counts: do it when
a change is meant, and say in the commit why the counts moved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pelton
from pelton.builder.codegen.cpu import compiler_version
from tests.models import make_tiny

COUNTS = Path(__file__).with_name("instruction_counts.json")
MARGIN = 0.08
PROMPT, SHORT, LONG = 64, 4, 20


def instructions(engine: Path, prompt: int, new: int, folder: Path) -> int:
    """Instructions that callgrind counts for a whole run."""
    script = Path(__file__).with_name("counted_run.py")
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/callgrind.out", sys.executable]
    command += [str(script), str(engine), str(prompt), str(new)]
    settings = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = re.search(r"Collected\s*:\s*(\d+)", result.stderr)
    assert found, result.stderr
    return int(found.group(1))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_counts_stay_within_the_margin(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "head_dim": 64}
    checkpoint = make_tiny("llama", tmp_path / "model", kv_heads=2, dtype="bfloat16", **sizes)
    engine = tmp_path / "v3.engine"
    pelton.build(checkpoint, engine, target="x86-64-v3", golden=False)
    short, long = (instructions(engine, PROMPT, new, tmp_path) for new in (SHORT, LONG))
    one = instructions(engine, 1, SHORT, tmp_path)
    measured = {
        "decode_step": (long - short) // (LONG - SHORT),
        "prefill_of_63_more_tokens": short - one,
    }
    compiler = compiler_version()
    if request.config.getoption("--update-golden"):
        document = {"compiler": compiler, "python": sys.version.split()[0], **measured}
        COUNTS.write_text(json.dumps(document, indent=2) + "\n")
        return
    recorded = json.loads(COUNTS.read_text())
    here = (compiler, sys.version.split()[0])
    if here != (recorded["compiler"], recorded["python"]):
        pytest.skip(f"counts were recorded with {recorded['compiler']}, Python {recorded['python']}; here is {here}")
    for name, count in measured.items():
        assert abs(count / recorded[name] - 1) <= MARGIN, f"{name}: {count} instructions, recorded {recorded[name]}"
