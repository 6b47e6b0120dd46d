"""The engine as an artefact: deterministic, small, verifiable, and clear about what is wrong with it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pelton
from pelton.cli import main
from pelton.runtime.format.container import EngineFile

SKUS = ("x86-64-v3", "x86-64-v4", "x86-64-v4+vnni+bf16")


@pytest.fixture(scope="module")
def three_skus(smollm2: Path, engines: Callable[..., Path]) -> Path:
    return engines(smollm2, dtype="bfloat16", target=SKUS)


def test_two_builds_are_byte_identical(smollm2: Path, three_skus: Path, tmp_path: Path) -> None:
    """The second build is another process with an empty object cache."""
    again = tmp_path / "again.engine"
    flags = [word for sku in SKUS for word in ("--target", sku)]
    command = [sys.executable, "-c", "import sys; from pelton.cli import build_engine_main as m; sys.exit(m())"]
    command += [str(smollm2), "-o", str(again), "--dtype", "bfloat16", "-q", *flags]
    command += ["--cache-dir", str(tmp_path / "cache")]
    subprocess.run(command, check=True)
    assert again.read_bytes() == three_skus.read_bytes()


def test_at_most_two_percent_over_the_weights(three_skus: Path) -> None:
    engine = EngineFile.open(three_skus, verify_weights="off")
    try:
        tokenizer = len(engine.section("tokenizer"))
        specs = [spec for spec in engine.tensors.values() if spec.dtype.value == "bf16"]
    finally:
        engine.close()
    assert 2 * sum(math.prod(spec.shape) for spec in specs) == pytest.approx(269e6, rel=0.01)
    weights = sum(spec.nbytes for spec in specs)
    assert weights == pytest.approx(0.758 * 269e6, rel=0.01)  # in 12 bits an element
    assert three_skus.stat().st_size - tokenizer <= 1.02 * weights


def test_verify_and_inspect(three_skus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(three_skus)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(three_skus), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [t["sku"] for t in document["manifest"]["targets"]] == list(SKUS)
    assert all(kernel["kernel"] for t in document["report"]["targets"].values() for kernel in t["kernels"])


def test_engine_for_another_sku_shows_both_fingerprints(
    tiny: Callable[..., Path], engines: Callable[..., Path]
) -> None:
    engine = engines(tiny("llama", kv_heads=2), target=("sapphirerapids",))
    from pelton.runtime.drivers.cpu.host import host_features

    if "amx_tile" in host_features():
        pytest.skip("this machine runs sapphirerapids")
    with pytest.raises(pelton.runtime.errors.TargetMismatchError) as caught:
        pelton.LLM(engine)
    message = str(caught.value)
    for part in ("sapphirerapids", "amx_tile", "avx2"):
        assert part in message


def test_cached_build_from_folder(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path))
    checkpoint = tiny("llama", kv_heads=1)

    def said() -> str:
        with pelton.LLM(checkpoint) as llm:
            llm.generate([{"prompt_token_ids": [5, 6]}], pelton.SamplingParams(max_tokens=2))
        return capsys.readouterr().err

    assert "building an engine" in said()
    assert "built before" in said()
    from pelton.builder import cache_key

    edited = [*cache_key.template_files(), "kernels/new.h", b"// an edit"]
    monkeypatch.setattr(cache_key, "template_files", lambda: edited)
    assert "building an engine" in said()


def test_flipped_bit_fails_verify(tiny: Callable[..., Path], engines: Callable[..., Path], tmp_path: Path) -> None:
    source = engines(tiny("llama", kv_heads=2))
    path = tmp_path / "flipped.engine"
    shutil.copy(source, path)
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)
    assert main(["verify", str(path)]) != 0
