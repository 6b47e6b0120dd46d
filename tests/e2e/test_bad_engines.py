"""What is not an engine, or not one for here, or altered in any part: refused with one clear error, and never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import pelton
from pelton.cli import main
from pelton.runtime.errors import EngineFormatError, PeltonError
from pelton.runtime.format.container import EngineFile, EngineWriter

from .refusals import Run, check_refused, flipped


@pytest.fixture(scope="module")
def sound(tiny: Any, engines: Any) -> bytes:
    return bytes(engines(tiny("llama")).read_bytes())


def check_engine_refused(path: Path, run: Run, *parts: str) -> None:
    """Loading, inspecting, verifying and running all refuse it alike."""
    with pytest.raises(EngineFormatError) as caught:
        pelton.LLM(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)
    for command in (("inspect", path), ("verify", path), ("run", path, "hello")):
        check_refused(run(*command, entry=main), str(path), *parts)


def test_what_is_not_an_engine(sound: bytes, tiny: Any, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "m.engine"
    check_engine_refused(path, run, "No such file", "check the path")
    weights = (tiny("llama") / "model.safetensors").read_bytes()
    for content, part in [
        (b"", "truncated or not an engine"),
        (b"#!/bin/sh\necho hello\n", "not an engine"),
        (weights, "not a pelton engine"),
        (sound[:4000], "truncated"),
        (sound[: len(sound) // 2], "truncated"),
        (sound[:-1], "truncated"),
        (sound + b"x", "bytes"),
    ]:
        path.write_bytes(content)
        check_engine_refused(path, run, part)


def test_a_folder_is_not_an_engine(tmp_path: Path, run: Run) -> None:
    for command in ("inspect", "verify"):
        check_refused(run(command, tmp_path, entry=main), "not a file")
    check_refused(run("run", tmp_path, "hello", entry=main), "config.json is missing")


def rewritten(sound: bytes, path: Path, manifest: dict[str, Any] | None = None, **changes: bytes) -> Path:
    """The sound engine with these sections and fields of the manifest instead, all hashes right."""
    old = path.with_name("sound.engine")
    old.write_bytes(sound)
    with EngineFile.open(old) as engine:
        sections = {name: engine.section(name) for name in engine.sections if name not in ("hash_tree", "layouts")}
        specs = list(engine.tensors.values())
        fields = msgspec.structs.replace(engine.manifest, **manifest or {})
        with EngineWriter(path, fields, specs, sections | changes) as writer:
            for spec in specs:
                writer.write_tensor(spec.name, [engine.tensor(spec.name)])
    return path


def test_newer_schema(sound: bytes, tmp_path: Path, run: Run) -> None:
    path = rewritten(sound, tmp_path / "new", {"schema": 99, "pelton_version": "9.9"})
    check_engine_refused(path, run, "schema", "9.9", "pip install -U pelton")


GOLDEN: dict[str, Any] = {"token_ids": [5], "rows": [{"ids": [7], "logits": [1.0]}], "scale": 1.0}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "section 'golden' is damaged: "),
        (b'{"token_ids": [1], "rows": [{}], "scale": 1}', "missing required field `ids`"),
        ({"rows": [{"ids": [300], "logits": [1.0]}]}, "token id 300 in a vocabulary of 300"),
        ({"rows": [{"ids": [-1], "logits": [1.0]}]}, "token id -1"),
        ({"rows": [{"ids": [], "logits": []}]}, "not one value for each id"),
        ({"rows": [{"ids": [1, 2], "logits": [1.0]}]}, "not one value for each id"),
        ({"rows": GOLDEN["rows"] * 2}, "1 tokens and 2 rows"),
        ({"token_ids": [], "rows": []}, "0 tokens"),
        ({"token_ids": [-1]}, "token id -1"),
        ({"token_ids": [5] * 300}, "300 tokens"),
    ],
)
def test_impossible_golden_vectors(content: Any, part: str, sound: bytes, tmp_path: Path, run: Run) -> None:
    golden = content if isinstance(content, bytes) else msgspec.json.encode(GOLDEN | content)
    path = rewritten(sound, tmp_path / "m.engine", golden=golden)
    status, _, err = run("verify", path, entry=main)
    assert status == 2
    assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"targets": []}', b'{"targets": {"cpu": {"kernels": [{}]}}}'])
def test_impossible_report(content: bytes, sound: bytes, tmp_path: Path, run: Run) -> None:
    path = rewritten(sound, tmp_path / "m.engine", report=content)
    for flags in ((), ("--json",)):
        check_refused(run("inspect", path, *flags, entry=main), f"{path}: section 'report' is damaged", "again")


def test_every_part_of_an_engine_is_guarded(sound: bytes, tmp_path: Path, run: Run) -> None:
    """One flipped bit in the header, in each section, pad and tensor: `verify` finds it, nothing altered is used."""
    path = tmp_path / "m.engine"
    start = 8 + int.from_bytes(sound[:8], "little")
    header = msgspec.json.decode(sound[8:start])
    header.pop("__metadata__")
    places = {name: tuple(start + at for at in entry["data_offsets"]) for name, entry in header.items()}
    assert len(places) > 20
    for name, (first, end) in {"the header": (0, start), **places}.items():
        if first == end:
            continue
        path.write_bytes(flipped(sound, (first + end) // 2))
        status, out, err = run("verify", path, entry=main)
        assert status in (1, 2), name
        assert ("FAIL hashes" if status == 1 else "error: ") in out + err, name
        assert "golden" not in out or "golden" in name, name  # what is altered is not run
        used = not name.startswith("__pad__") and name.removeprefix("section/") not in ("golden", "report", "weights")
        if used:
            with pytest.raises(EngineFormatError, match="the engine again"):
                use(path)
    path.write_bytes(sound)
    assert run("verify", path, entry=main)[0] == 0


def use(path: Path) -> None:
    """Load an engine, with every weight checked before, and put a text in: the tokenizer is read when text comes."""
    with pelton.LLM(path, verify_weights="before") as llm:
        llm.generate("What", pelton.SamplingParams(max_tokens=1))


def test_damaged_weights_stop_a_running_engine(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(flipped(sound, len(sound) - 5000))
    params = pelton.SamplingParams(max_tokens=200, ignore_eos=True)

    def run_long() -> None:
        with pelton.LLM(path, threads=1) as llm:
            for _ in range(100):
                llm.generate([{"prompt_token_ids": [5, 6]}], params)

    with pytest.raises(EngineFormatError, match="weights are damaged .*copy or build the engine again"):
        run_long()


def test_engine_for_other_machines(tiny: Any, engines: Any, run: Run) -> None:
    engine = engines(tiny("llama"), target="reference")
    with pytest.raises(PeltonError, match="reference"):
        pelton.LLM(engine)
    check_refused(run("run", engine, "hello", entry=main), "reference")
    assert run("inspect", engine, entry=main)[0] == 0
    status, out, _ = run("verify", engine, entry=main)
    assert status == 0
    assert "skip golden reference: not run: a plan without code" in out
    assert "skip golden: no code of this engine was run" in out


def test_commands_refuse_bad_values(tiny: Any, engines: Any, run: Run) -> None:
    engine = engines(tiny("llama"))
    for flags, part in [
        ("--max-tokens 1000", "--max-seq-len"),
        ("--max-tokens -1", "max_tokens: got -1"),
        ("--temperature -1", "temperature: got -1.0"),
        ("--temperature nan", "temperature: got nan"),
        ("--top-k -9", "top_k: got -9"),
        ("--threads 0", "not 0"),
        ("--trust signed", "sign"),
    ]:
        check_refused(run("run", engine, "hello", *flags.split(), entry=main), part)
    check_refused(run("inspect", engine, "--launches", "cpu:z80", entry=main), "cpu:z80", "there is: ")
    check_refused(run("run", engine, "x " * 600, entry=main), "--max-seq-len")
