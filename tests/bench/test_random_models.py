"""scripts/make_random_model writes checkpoints that load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from pelton.builder.checkpoint import Checkpoint
from tests.random_models import SHAPES, tensor_shapes, write_random_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_writes_a_checkpoint(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "make_random_model")]
    done = subprocess.run([*script, "llama-tiny", str(tmp_path / "m")], capture_output=True, text=True, check=True)
    assert "llama-tiny" in done.stdout
    checkpoint = Checkpoint.open(tmp_path / "m")
    shapes = tensor_shapes(SHAPES["llama-tiny"])
    assert set(checkpoint.source.names()) >= set(shapes)
    for name, shape in shapes.items():
        assert checkpoint.source.info(name).shape == shape
    up = np.asarray(checkpoint.source.read("model.layers.0.mlp.up_proj.weight")).astype(np.float32)
    assert abs(up.std() - 1 / 8) < 0.005  # 1 / sqrt(64)
    again = subprocess.run([*script, "llama-tiny", str(tmp_path / "m")], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "has a checkpoint" in again.stderr


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    files = [
        write_random_model("llama-tiny", tmp_path / str(i), seed) / "model.safetensors"
        for i, seed in enumerate((1, 1, 2))
    ]
    first, second, other = (file.read_bytes() for file in files)
    assert first == second != other


def test_sizes_of_the_named_shapes() -> None:
    def parameters(name: str) -> int:
        return sum(int(np.prod(shape)) for shape in tensor_shapes(SHAPES[name]).values())

    # 24 x (q, o: 896^2; k, v: 128 x 896; 3 x 4864 x 896; two norms), the tied table, the last norm
    layer = 2 * 896 * 896 + 2 * 128 * 896 + 3 * 4864 * 896 + 2 * 896
    assert parameters("llama-0.5b") == 24 * layer + 151936 * 896 + 896
    assert json.dumps(SHAPES["llama-1b"])
    assert 1.2e9 < parameters("llama-1b") < 1.3e9
