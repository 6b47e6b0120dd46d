"""Bad input to a build gets one clear typed error and leaves nothing half-written: checkpoints, options, places."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pelton
from pelton.cli import main
from pelton.runtime.errors import BuildError
from pelton.runtime.format.container import EngineFile, EngineWriter

from .conftest import ROOT
from .refusals import Run, check_refused, flipped

Edit = Callable[[Path], object]
OLD = b"an older engine"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One object cache for the module."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELTON_CACHE", str(folder))
        patch.delenv("CXX", raising=False)
        yield folder


@contextmanager
def nothing_left(folder: Path) -> Iterator[Path]:
    """An output path with an older engine under it; afterwards that engine is untouched and alone."""
    out = folder / "out" / "m.engine"
    out.parent.mkdir()
    out.write_bytes(OLD)
    yield out
    assert out.read_bytes() == OLD
    assert [path.name for path in out.parent.iterdir()] == [out.name]


# --- checkpoints ---------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Edit:
    """Change fields of config.json; ... removes one."""

    def edit(folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in document.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def tensors(**changes: np.ndarray | None) -> Edit:
    """Replace tensors (None: remove); "__" in a keyword stands for a dot."""

    def edit(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        for key, value in changes.items():
            name = key.replace("__", ".") + ".weight"
            assert name in stored
            del stored[name]
            if value is not None:
                stored[name] = value
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def text(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content)


def shard(folder: Path) -> Path:
    return next(folder.glob("model-00002-of-*.safetensors"))


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def index_names_a_ghost(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["model.ghost.weight"] = shard(folder).name
    path.write_text(json.dumps(document))


ZEROS = np.zeros((8, 8), np.float32)
HUGE = {"num_local_experts": 1 << 20, "intermediate_size": 1 << 24}
ROPE = {"rope_theta": 1e4, "rope_type": "dynamic"}

#: (name, what is done to the checkpoint, parts of the message). Each part names the culprit, source or remedy.
CHECKPOINTS: list[tuple[str, Edit, tuple[str, ...]]] = [
    ("no config", lambda f: (f / "config.json").unlink(), ("config.json is missing",)),
    ("config is no JSON", text("config.json", "{nope"), ("config.json", "not valid JSON", "download it again")),
    ("config is a list", text("config.json", "[]"), ("config.json", "a JSON object is needed")),
    ("generation config", text("generation_config.json", "{"), ("generation_config.json", "not valid JSON")),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), ("model.safetensors", "download")),
    ("empty weights", lambda f: os.truncate(f / "model.safetensors", 0), ("model.safetensors", "0 bytes")),
    ("truncated header", lambda f: os.truncate(f / "model.safetensors", 20), ("too short for its header",)),
    ("truncated", lambda f: os.truncate(f / "model.safetensors", 200_000), ("truncated", "download it again")),
    ("pickle only", pickle_only, ("pytorch_model.bin", "pickle", "safetensors")),
    ("absent tensor", tensors(model__layers__1__mlp__up_proj=None), ("model.layers.1.mlp.up_proj.weight", "missing")),
    ("wrong shape", tensors(model__layers__0__self_attn__q_proj=ZEROS), ("q_proj.weight", "[8, 8]", "[64, 64]")),
    ("integers", tensors(model__norm=np.zeros(64, np.int32)), ("model.norm.weight", "i32", "float type")),
    ("float64", tensors(model__norm=np.zeros(64)), ("model.norm.weight", "F64", "convert")),
    ("custom code", config(auto_map={"AutoModel": "m.M"}), ("auto_map", "--trust-remote-code")),
    ("quantised", config(quantization_config={"quant_method": "gptq"}), ("gptq", "unquantised")),
    ("no model type", config(model_type=...), ("model_type",)),
    ("made-up type", config(model_type="pelican"), ("pelican", "newer transformers")),
    ("mixture", config(model_type="mixtral"), ("MixtralSparseMoeBlock", "mixtures of experts")),
    (
        "mixture too large to be made",
        config(model_type="llama4_text", **HUGE),
        ("Llama4TextMoe", "mixtures of experts"),
    ),
    ("state space", config(model_type="mamba"), ("mamba", "attention interface")),
    ("alibi", config(model_type="bloom"), ("bloom", "attention interface")),
    ("encoder-decoder", config(model_type="t5"), ("t5", "encoder-decoder")),
    ("encoder", config(model_type="bert"), ("bert", "not causal")),
    ("image model", config(model_type="clip"), ("clip", "no causal language model")),
    ("heads do not divide", config(num_key_value_heads=3), ("num_attention_heads 4", "num_key_value_heads 3")),
    ("width does not divide", config(hidden_size=66, head_dim=...), ("hidden_size 66", "num_attention_heads 4")),
    ("no heads", config(num_attention_heads=0), ("num_attention_heads is 0",)),
    ("head width as text", config(head_dim="16"), ("head_dim is '16'",)),
    ("layers not whole", config(num_hidden_layers=2.5), ("num_hidden_layers is 2.5",)),
    ("more layers than weights", config(num_hidden_layers=3), ("model.layers.2.", "missing")),
    ("small vocabulary", config(vocab_size=10), ("embed_tokens.weight", "[300, 64]", "[10, 64]")),
    ("positions as text", config(max_position_embeddings="256"), ("max_position_embeddings is '256'",)),
    ("no positions", config(max_position_embeddings=...), ("max_position_embeddings", "--max-seq-len")),
    ("rope is text", config(rope_parameters="fast"), ("rope", "'fast'")),
    ("rope of an unknown type", config(rope_parameters=ROPE | {"rope_type": "spiral"}), ("spiral",)),
    ("rope without a factor", config(rope_parameters=ROPE | {"factor": None}), ("rope factor is None",)),
    ("unknown activation", config(hidden_act="bogus"), ("bogus",)),
    ("padding outside", config(pad_token_id=5000), ("Padding_idx",)),
    ("end token outside", text("generation_config.json", '{"eos_token_id": [9999]}'), ("eos_token_id", "9999", "300")),
    ("default not a number", text("generation_config.json", '{"top_p": NaN}'), ("config", "generation_defaults")),
    ("tokenizer", text("tokenizer.json", "{"), ("tokenizer.json", "complete")),
    ("chat template", text("chat_template.jinja", "{% if %}"), ("chat template", "line 1")),
    ("chat template no text", lambda f: (f / "chat_template.jinja").write_bytes(b"\xff{"), ("tokenizer", "utf-8")),
]
SHARDED: list[tuple[str, Edit, tuple[str, ...]]] = [
    ("missing", lambda f: shard(f).unlink(), ("model-00002-of-", "missing", "download it again")),
    ("truncated", lambda f: os.truncate(shard(f), 20_000), ("model-00002-of-", "truncated", "download it again")),
    ("ghost", index_names_a_ghost, ("index.json", "model.ghost.weight", "does not have it")),
    ("index", text("model.safetensors.index.json", "[1]"), ("index.json", "not a shard index")),
]


@pytest.mark.parametrize(("edit", "parts"), [case[1:] for case in CHECKPOINTS], ids=[case[0] for case in CHECKPOINTS])
def test_bad_checkpoint(edit: Edit, parts: tuple[str, ...], tiny: Any, tmp_path: Path, run: Run) -> None:
    _check_bad_checkpoint(tiny("llama"), edit, parts, tmp_path, run)


@pytest.mark.parametrize(("edit", "parts"), [case[1:] for case in SHARDED], ids=[case[0] for case in SHARDED])
def test_bad_shards(edit: Edit, parts: tuple[str, ...], tiny: Any, tmp_path: Path, run: Run) -> None:
    _check_bad_checkpoint(tiny("llama", max_shard_size="60KB"), edit, parts, tmp_path, run)


def _check_bad_checkpoint(source: Path, edit: Edit, parts: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    checkpoint = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    edit(checkpoint)
    with nothing_left(tmp_path) as out:
        check_refused(run(checkpoint, "-o", out), *parts)


def test_ids_and_lengths_that_a_config_leaves_open(tiny: Any, tmp_path: Path) -> None:
    """No longest sequence, no padding (-1) and a beginning that is not an id: the engine can be opened."""
    checkpoint = Path(shutil.copytree(tiny("llama"), tmp_path / "checkpoint"))
    config(max_position_embeddings=..., pad_token_id=-1)(checkpoint)
    text("generation_config.json", '{"bos_token_id": true, "eos_token_id": 2}')(checkpoint)
    pelton.build(checkpoint, tmp_path / "m.engine", max_seq_len=48, golden=False)
    with EngineFile.open(tmp_path / "m.engine") as engine:
        model = engine.manifest.model
        assert model.max_position_embeddings == 48
        assert (model.bos_token_id, model.pad_token_id) == (None, None)


def test_no_such_checkpoint(tmp_path: Path, run: Run) -> None:
    with nothing_left(tmp_path) as out:
        for path in (tmp_path / "gone", tmp_path / "gone.gguf", ROOT / "README.md"):
            check_refused(run(path, "-o", out), str(path), "no such checkpoint")


# --- options -------------------------------------------------------------------------------------------------------

OPTIONS = [
    ("--target z80", "unknown target 'z80'; choose from host"),
    ("--target cpu:", "unknown target"),
    ("--dtype int3", "invalid choice: 'int3'"),
    ("--weight-packing 8", "invalid choice: '8'"),
    ("--max_batch_size 8 --max_num_tokens 4", "--max-num-tokens 4 is under --max-batch-size 8"),
    ("--max-seq-len 257", "over the model's longest sequence, 256"),
    ("--opt-num-tokens 4096", "--opt-num-tokens 4096 is over --max-num-tokens 2048"),
    ("--max-logits-rows 3", "--max-logits-rows 3 must lie between --max-batch-size 64"),
    ("--tokens-per-block 24", "multiple of 16"),
    ("--max-batch-size 0", "--max-batch-size must be an integer from 1"),
    ("--max_num_tokens -1", "--max-num-tokens must be an integer from 1"),
    ("--max-num-tokens 99999999999", "--max-num-tokens must be an integer from 1 to 1048576"),
    ("--tokens-per-block 16000000", "--tokens-per-block must be an integer from 1 to 1024"),
    ("--max-seq-len 1.5", "invalid int value: '1.5'"),
    ("--max-logprobs many", "invalid int value: 'many'"),
    ("--jobs -3", "--jobs must be an integer from 0"),
    ("--max-batch 4", "unrecognized arguments"),
    ("--compiler /bin/false", "'/bin/false' does not run"),
    ("--compiler /no/such/cxx", "install g++"),
    ("--compiler '\"'", "cannot be read"),
    ("--compiler true", "no C++ compiler"),
    ("--cache-dir /proc/nowhere", "object cache at /proc/nowhere"),
    ("--dump-ir /proc/nowhere", "--dump-ir"),
]


@pytest.mark.parametrize(("flags", "part"), OPTIONS, ids=[flags for flags, _ in OPTIONS])
def test_bad_options(flags: str, part: str, tiny: Any, tmp_path: Path, run: Run) -> None:
    with nothing_left(tmp_path) as out:
        check_refused(run(tiny("llama"), "-o", out, *shlex.split(flags)), part)


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("CXX", "/bin/false", "'/bin/false' does not run"),
        ("CXX", "no-such-compiler -O1", "no-such-compiler"),
        ("PELTON_CACHE", "relative", "must be an absolute path"),
        ("PELTON_CACHE", "/proc/nowhere", "set PELTON_CACHE"),
        ("PELTON_CACHE", str(ROOT / "README.md"), "set PELTON_CACHE"),
    ],
)
def test_bad_environment(
    variable: str, value: str, part: str, tiny: Any, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with nothing_left(tmp_path) as out:
        check_refused(run(tiny("llama"), "-o", out), part)


@pytest.mark.parametrize(
    "options",
    [{"max_batch_size": "4"}, {"max_batch_size": True}, {"max_seq_len": 12.0}, {"max_batch_size": None}, {"dtype": 3}],
)
def test_bad_options_in_python(options: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    with nothing_left(tmp_path) as out, pytest.raises(BuildError, match="--(max|dtype)"):
        pelton.build(tiny("llama"), out, **options)


def test_checkpoint_and_output_are_needed_once(tiny: Any, tmp_path: Path, run: Run) -> None:
    check_refused(run(), "--output")
    check_refused(run("-o", tmp_path / "m"), "give the checkpoint once")
    check_refused(run(tiny("llama"), "--checkpoint_dir", tiny("llama"), "-o", tmp_path / "m"), "once")
    assert not any(tmp_path.iterdir())


# --- the place an engine goes to -----------------------------------------------------------------------------------


def test_bad_places(tiny: Any, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.report.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place, part in [
        (tmp_path / "file" / "m.engine", "is not a folder"),
        (tmp_path / "gone" / "m.engine", "does not exist; create it first"),
        (tmp_path / "folder", "is a folder"),
        (tmp_path / "pipe", "not a file"),
        (tmp_path / "a", "a.report.json"),
        (tmp_path / ("x" * 250), "at most 200 bytes"),
        (Path("/proc/m.engine"), "choose a folder you may write to"),
        (Path("/dev/null"), "not a file"),
    ]:
        check_refused(run(tiny("llama"), "-o", place), part)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_is_never_overwritten(tiny: Any, tmp_path: Path, run: Run) -> None:
    checkpoint = Path(shutil.copytree(tiny("llama"), tmp_path / "checkpoint"))
    (tmp_path / "link").symlink_to(checkpoint / "config.json")
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    for place in (checkpoint / "model.safetensors", checkpoint / "tokenizer.json", tmp_path / "link"):
        check_refused(run(checkpoint, "-o", place), "a file of the checkpoint")
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_full_disk(tiny: Any, tmp_path: Path, run: Run) -> None:
    """A real one of 256 kB where it can be mounted: refused before writing, as the size is known by then."""
    disk = tmp_path / "out"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small tmpfs here")
    try:
        (disk / "m.engine").write_bytes(OLD)
        check_refused(run(tiny("llama"), "-o", disk / "m.engine"), "make room or choose another folder")
        assert [path.name for path in disk.iterdir()] == ["m.engine"]
        assert (disk / "m.engine").read_bytes() == OLD
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("step", ["weights", "golden", "close"])
def test_disk_full_or_interrupted_while_writing(
    step: str, tiny: Any, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up or the user interrupts in the middle of the weights, in the golden vectors, at the end."""
    calls = {"weights": "write_tensor", "golden": "fill", "close": "_finish"}

    def full(self: EngineWriter, *arguments: object) -> None:
        with self._disk():
            raise OSError(28, "No space left on device")

    def interrupted(self: EngineWriter, *arguments: object) -> None:
        raise KeyboardInterrupt

    with nothing_left(tmp_path) as out:
        monkeypatch.setattr(EngineWriter, calls[step], full)
        check_refused(run(tiny("llama"), "-o", out), "No space left on device", "make room")
        monkeypatch.setattr(EngineWriter, calls[step], interrupted)
        status, _, err = run(tiny("llama"), "-o", out)
        assert (status, err) == (130, "interrupted\n")


# --- processes -----------------------------------------------------------------------------------------------------

_BUILD = "import sys; from pelton.cli import build_engine_main as m; sys.exit(m())"


def start(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=300,
    )


def test_streams_of_a_build(tiny: Any, tmp_path: Path) -> None:
    """Off a terminal: nothing on stdout, one summary on stderr, without control characters."""
    out = tmp_path / "m.engine"
    done = start(_BUILD, tiny("llama"), "-o", out, "--max_batch_size", "4", "--max_num_tokens=32")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"{out}: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    with EngineFile.open(out) as engine:
        assert (engine.manifest.ranges.max_batch_size, engine.manifest.ranges.max_num_tokens) == (4, 32)


@pytest.mark.parametrize("code", [_BUILD, "import pelton, sys; pelton.LLM(sys.argv[1])"])
def test_without_the_build_extra(code: str, tiny: Any, tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; " + code
    done = start(blocked, tiny("llama"), "-o", tmp_path / "m.engine", PELTON_CACHE=str(tmp_path / "cache"))
    assert "pip install 'pelton[build]'" in done.stderr
    assert done.returncode == (2 if code is _BUILD else 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_help_names_every_flag_with_words(run: Run) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for flag in ("--output", "--target", "--dtype", "--max-batch-size", "--max-seq-len", "--cache-dir", "--verify"):
        assert flag in out
    status, out, err = run("--help", entry=main)
    assert (status, err) == (0, "")
    for command in ("run", "inspect", "verify", "targets"):
        assert command in out
    check_refused(run(entry=main), "COMMAND")
    check_refused(run("fly", entry=main), "invalid choice: 'fly'")


# --- the object cache ----------------------------------------------------------------------------------------------


def test_a_damaged_cached_object_is_compiled_again(tiny: Any, tmp_path: Path) -> None:
    """Each part of an entry: its hash, the code's start, its end, and a cut."""
    first = tmp_path / "0.engine"
    folder = tmp_path / "cache"
    pelton.build(tiny("llama"), first, cache_dir=folder)
    (entry,) = (path for path in (folder / "objects").rglob("*") if path.is_file())
    sound = entry.read_bytes()
    from pelton.builder.codegen.cache import ObjectCache

    key = entry.parent.name + entry.name
    assert ObjectCache(folder).get(key) == sound[32:]
    for damaged in (flipped(sound, 0), flipped(sound, 40), flipped(sound, len(sound) - 1), sound[:-1], b""):
        entry.write_bytes(damaged)
        assert ObjectCache(folder).get(key) is None
    entry.write_bytes(flipped(sound, len(sound) // 2))
    pelton.build(tiny("llama"), tmp_path / "1.engine", cache_dir=folder)
    assert (tmp_path / "1.engine").read_bytes() == first.read_bytes()
    assert entry.read_bytes() == sound
