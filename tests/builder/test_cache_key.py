"""The key of cached engines: the same for the same content, another for whatever changes an engine's bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pelton.builder.cache_key import code_parts, engine_key
from pelton.builder.checkpoint import Checkpoint
from pelton.builder.options import BuildOptions
from tests.models import make_tiny

ROOT = Path(__file__).resolve().parents[2]


def key(folder: Path, **options: object) -> str:
    return engine_key(Checkpoint.open(folder), BuildOptions(**options))  # type: ignore[arg-type]


def test_what_counts_and_what_does_not(tmp_path: Path) -> None:
    first = make_tiny("llama", tmp_path / "first")
    same = Path(shutil.copytree(first, tmp_path / "another-name"))
    assert key(same) == key(first)
    assert key(first, jobs=3, verify=True, cache_dir=tmp_path, dump_ir=tmp_path, compiler="clang++") == key(first)
    keys = {key(first), key(first, dtype="float32"), key(first, max_batch_size=8), key(first, golden=False)}
    for name in ("tokenizer.json", "generation_config.json", "config.json", "tokenizer_config.json"):
        document = json.loads((same / name).read_text())
        (same / name).write_text(json.dumps(document | {"edited": True}))
        keys.add(key(same))
    (same / "chat_template.jinja").write_text("{{ messages }}")
    keys.add(key(same))
    keys.add(key(make_tiny("llama", tmp_path / "other", seed=7)))
    assert len(keys) == 4 + 4 + 1 + 1


@pytest.mark.parametrize("edited", ["builder/lower.py", "plugins/gemm/cpu.py", "quantization/__init__.py"])
def test_code_counts_by_content(edited: str, tmp_path: Path) -> None:
    assert list(code_parts()) == list(code_parts(ROOT))
    for package in ("builder", "plugins", "quantization", "runtime"):
        shutil.copytree(ROOT / package, tmp_path / package)
    assert list(code_parts(tmp_path)) == list(code_parts(ROOT))
    with (tmp_path / edited).open("a") as file:
        file.write("# an edit")
    assert list(code_parts(tmp_path)) != list(code_parts(ROOT))


def test_kernel_templates_count() -> None:
    parts = list(code_parts())
    assert "kernels/gemm.h" in parts
    assert (ROOT / "cpp/kernels/gemm.h").read_bytes() in parts
