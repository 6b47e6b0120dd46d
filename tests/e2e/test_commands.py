"""The console commands on a tiny engine: run, inspect, verify, sign, refit, targets."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pelton
from pelton.cli import build_engine_main, main
from pelton.commands import build_engine, inspect
from pelton.inflight_batcher.output import CompletionSnapshot
from pelton.runtime.format.container import EngineFile
from tests.models import make_custom


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path], engines: Callable[..., Path]) -> Path:
    return engines(tiny("llama", kv_heads=2))


def test_run_streams_the_same_text_as_generate(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(engine), "What is", "--raw", "--max-tokens", "12", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    with pelton.LLM(engine) as llm:
        (output,) = llm.generate("What is", pelton.SamplingParams(temperature=0, max_tokens=12))
    assert out == output.outputs[0].text + "\n"
    assert "tokens/s" in err


def test_run_copies_no_list_that_grows(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A streamed answer is cut out of what has grown only where it is looked at; a run looks at what is new."""

    def looked(self: CompletionSnapshot, name: str) -> None:
        raise AssertionError(f"{name} is copied for each token")

    monkeypatch.setattr(CompletionSnapshot, "__getattr__", looked)
    assert main(["run", str(engine), "What is", "--raw", "--max-tokens", "12", "--temperature", "0"]) == 0
    assert "decode 12 tokens" in capsys.readouterr().err


def test_run_uses_the_chat_template(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(engine), "What is", "--max-tokens", "5", "--system", "Be brief", "-q"]) == 0
    out, err = capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "What is"}]
    with pelton.LLM(engine) as llm:
        (output,) = llm.chat(messages, pelton.SamplingParams(temperature=0, max_tokens=5))
    assert (out, err) == (output.outputs[0].text + "\n", "")


def test_inspect_for_people(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine), "--tensors", "--launches", "cpu:x86-64-v3"]) == 2
    assert "cpu:x86-64-v3" in capsys.readouterr().err
    assert main(["inspect", str(engine), "--tensors"]) == 0
    text = capsys.readouterr().out
    for part in ("LlamaForCausalLM", "max_batch_size", "cpu.gemm", "arena", "qkv_proj", "checkpoint_hash"):
        assert part in text


def test_verify_says_what_it_checked(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(engine)]) == 0
    hashes, tokenizer, golden = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ok   hashes: \d+ tensors, \d+\.\d MB", hashes)
    assert re.fullmatch(r"ok   tokenizer: [1-9]\d+ vectors of the checkpoint's own tokenizer", tokenizer)
    assert re.fullmatch(r"ok   golden cpu:\S+: \d+ positions against the reference target", golden)
    assert main(["verify", str(engine), "--hashes-only"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "skip golden: not run, as asked: hashes only"


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    by_name = {row["target"]: row for row in document["targets"]}
    assert by_name[document["host"]]["runs_here"]
    assert not by_name[document["host"]]["missing"]


def test_sign_and_trust(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copy(engine, tmp_path / "signed.engine")
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo))
    trusting = ["run", str(copy), "a", "--trust", "signed", "--public-key", str(public), "--max-tokens", "1"]
    assert main(trusting) == 2
    assert "no signature" in capsys.readouterr().err
    assert main(["sign", str(copy), "--key", str(private)]) == 0
    assert main(trusting) == 0
    assert main(["verify", str(copy), "--public-key", str(public)]) == 0


@pytest.mark.parametrize(("entry", "remedy"), [(main, "an engine built with"), (build_engine_main, "lower --max-num")])
def test_out_of_memory_names_what_the_command_has(
    entry: Callable[..., int], remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(arguments: object) -> int:
        raise MemoryError("1 GB")

    for module in (build_engine, inspect):
        monkeypatch.setattr(module, "execute", full)
    assert entry(["m", "-o", "out"] if entry is build_engine_main else ["inspect", "m"]) == 2
    assert f"out of memory (1 GB); {remedy}" in capsys.readouterr().err


def test_code_of_a_checkpoint(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture in the checkpoint's own code builds when asked for, and says so; refit needs no code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    custom, plain = make_custom(tmp_path / "m"), tmp_path / "plain.engine"
    arguments = [str(custom), "-o", str(tmp_path / "m.engine"), "--cache-dir", str(tmp_path / "cache")]
    assert build_engine_main(arguments) == 2
    assert build_engine_main([*arguments, "--trust_remote_code", "-q"]) == 0
    pelton.build(tiny("llama"), plain, cache_dir=tmp_path / "cache")
    with EngineFile.open(tmp_path / "m.engine") as mine, EngineFile.open(plain) as theirs:
        assert mine.manifest.notes == ("code that came with the checkpoint was run to build it", *theirs.manifest.notes)
        key = mine.manifest.targets[0].key
        assert mine.plan(key) == theirs.plan(key)
    assert main(["refit", str(plain), str(custom), "-o", str(tmp_path / "refitted.engine")]) == 0


def test_refit_equals_a_build(tiny: Callable[..., Path], engine: Path, tmp_path: Path) -> None:
    other = tiny("llama", kv_heads=2, seed=5)
    assert main(["refit", str(engine), str(other), "-o", str(tmp_path / "refitted.engine")]) == 0
    assert build_engine_main([str(other), "-o", str(tmp_path / "built.engine"), "-q"]) == 0
    with pelton.LLM(tmp_path / "refitted.engine") as one, pelton.LLM(tmp_path / "built.engine") as two:
        assert (one.logits([5, 6, 7]) == two.logits([5, 6, 7])).all()


def test_underscored_flags(tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorRT-LLM's spelling, and its names for input and output."""
    out = tmp_path / "a_b.engine"
    command = ["--checkpoint_dir", str(tiny("llama", kv_heads=2)), "--output_dir", str(out), "--max_batch_size=4", "-q"]
    assert build_engine_main(command) == 0
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["ranges"]["max_batch_size"] == 4
