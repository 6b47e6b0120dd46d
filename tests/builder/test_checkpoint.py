"""Checkpoints: lazy reading, tied and sharded weights, GGUF, and every kind of damage named."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.builder.checkpoint import TOKENIZER_SOURCES, Checkpoint
from pelton.builder.importer import import_graph
from pelton.builder.safetensors_source import SafetensorsSource, Shard
from pelton.builder.trace import trace
from pelton.runtime.errors import CheckpointError, PeltonError, UnsupportedModelError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_source import TensorInfo, TensorSource
from tests.builder.interpret import Interpreter
from tests.models import make_tiny, random_ids, reference_logits, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("checkpoint") / "tiny", dtype="bfloat16")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    target = tmp_path / "copy"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- reading ------------------------------------------------------------------------------------------


def test_what_a_folder_offers(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.name == "tiny"
    assert checkpoint.dtype == DType.BF16
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(checkpoint.tokenizer_files)
    assert checkpoint.hf_config().hidden_size == 64
    assert isinstance(checkpoint.source, TensorSource)


def test_tensors_are_views_of_the_file_in_their_own_dtype(folder: Path) -> None:
    from safetensors.torch import load_file

    source = Checkpoint.open(folder).source
    expected = load_file(folder / "model.safetensors")
    assert list(source.names()) == sorted(expected)
    for name, tensor in expected.items():
        array = source.read(name)
        assert source.info(name) == TensorInfo(DType.BF16, tuple(tensor.shape))
        assert array.dtype == ml_dtypes.bfloat16
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert np.array_equal(array.astype(np.float32), tensor.float().numpy())
    rows = source.read_rows(NAME, 3, 9)
    assert np.array_equal(rows, source.read(NAME)[3:9])
    source.release(NAME)
    assert np.array_equal(rows, source.read(NAME)[3:9])


def test_release_gives_pages_back(tmp_path: Path) -> None:
    big = np.arange(1 << 21, dtype=np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"small": np.ones(3, np.float32), "big": big})
    source = SafetensorsSource.open(tmp_path)

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(str(tmp_path / "model.safetensors"))[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert source.read("big").sum() > 0
    assert resident() > 4096
    source.release("big")
    assert resident() < 1024


def test_shards_read_like_one_file(folder: Path, tmp_path: Path) -> None:
    sharded = make_tiny("llama", tmp_path / "sharded", dtype="bfloat16", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = Checkpoint.open(folder), Checkpoint.open(sharded)
    assert list(parts.source.names()) == list(whole.source.names())
    assert all(np.array_equal(parts.source.read(n), whole.source.read(n)) for n in whole.source.names())
    assert parts.fingerprint() == whole.fingerprint()


def test_the_fingerprint_sees_every_byte_and_the_config(copy: Path) -> None:
    before = Checkpoint.open(copy).fingerprint()
    assert before == Checkpoint.open(copy).fingerprint()
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    flipped = Checkpoint.open(copy).fingerprint()
    edit_config(copy, rms_norm_eps=1e-5)
    assert len({before, flipped, Checkpoint.open(copy).fingerprint()}) == 3


@pytest.mark.parametrize("name", TOKENIZER_SOURCES)
def test_every_kind_of_tokenizer_is_seen(name: str, copy: Path) -> None:
    """A build closes the tokenizer of a checkpoint with any of them, and says that there is none otherwise."""
    for file in Checkpoint.open(copy).tokenizer_files.values():
        file.unlink()
    assert Checkpoint.open(copy).tokenizer_files == {}
    (copy / name).write_text("x")
    assert list(Checkpoint.open(copy).tokenizer_files) == [name]


# -- damage -------------------------------------------------------------------------------------------


def damage(what: str) -> Callable[[Path], None]:
    """A named way to break a checkpoint folder."""

    def header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        document = json.loads(data[8 : 8 + length])
        change(document)
        text = json.dumps(document).encode().ljust(length)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    def shift(document: dict[str, Any]) -> None:
        document[NAME]["data_offsets"] = [n - 64 for n in document[NAME]["data_offsets"]]

    def grow(document: dict[str, Any]) -> None:
        document[NAME]["shape"][0] += 1

    def outside(document: dict[str, Any]) -> None:
        start, stop = document[NAME]["data_offsets"]
        document[NAME]["data_offsets"] = [start + (1 << 30), stop + (1 << 30)]

    def dtype(document: dict[str, Any]) -> None:
        document[NAME]["dtype"] = "Q3"

    def truncate(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    ways: dict[str, Callable[[Path], None]] = {
        "config missing": lambda f: (f / "config.json").unlink(),
        "config no json": lambda f: (f / "config.json").write_text("{") and None,
        "config too deep": lambda f: (f / "config.json").write_text("[" * 100_000) and None,
        "config a list": lambda f: (f / "config.json").write_text("[]") and None,
        "no model_type": lambda f: edit_config(f, model_type=None),
        "weights missing": lambda f: (f / "model.safetensors").unlink(),
        "truncated": truncate,
        "tiny file": lambda f: (f / "model.safetensors").write_bytes(b"abc") and None,
        "no header": lambda f: (f / "model.safetensors").write_bytes(bytes(range(256)) * 4) and None,
        "overlap": lambda f: header(f, shift),
        "wrong size": lambda f: header(f, grow),
        "outside": lambda f: header(f, outside),
        "dtype": lambda f: header(f, dtype),
        "generation": lambda f: (f / "generation_config.json").write_text("nope") and None,
    }
    return ways[what]


@pytest.mark.parametrize(
    "what, message",
    [
        ("config missing", "config.json is missing"),
        ("config no json", "config.json: not valid JSON"),
        ("config a list", "a JSON object is needed"),
        ("config too deep", "config.json: not valid JSON"),
        ("no model_type", "no model_type"),
        ("weights missing", "neither model.safetensors nor"),
        ("truncated", "truncated: tensor .* download it again"),
        ("tiny file", "3 bytes, too short"),
        ("no header", "too short for its header"),
        ("overlap", "up_proj.weight' overlaps its neighbour"),
        ("wrong size", r"up_proj.weight' BF16\[97, 64\] has 12288 bytes"),
        ("outside", "up_proj.weight' ends at byte"),
        ("dtype", "unknown dtype 'Q3'"),
        ("generation", "generation_config.json: not valid JSON"),
    ],
)
def test_damage_is_named(what: str, message: str, copy: Path) -> None:
    damage(what)(copy)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(copy)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        Checkpoint.open(tmp_path / "nowhere")


def test_shard_problems_are_named(tmp_path: Path) -> None:
    sharded = make_tiny("llama", tmp_path / "m", max_shard_size="60KB")
    index = sharded / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first = sorted(set(document["weight_map"].values()))[0]

    document["weight_map"]["ghost"] = first
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=f"'ghost' is in {first}, which does not have it"):
        Checkpoint.open(sharded)

    del document["weight_map"]["ghost"]
    index.write_text(json.dumps({"weight_map": {**document["weight_map"], "up": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the checkpoint folder"):
        Checkpoint.open(sharded)

    index.write_text(json.dumps(document))
    (sharded / first).unlink()
    with pytest.raises(CheckpointError, match=f"shard {first} is missing"):
        Checkpoint.open(sharded)

    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not a shard index"):
        Checkpoint.open(sharded)


def test_pickles_are_refused_with_the_remedy(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle .pytorch_model.bin.*safetensors"):
        Checkpoint.open(copy)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, UnsupportedModelError, "brings its own code"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "'gptq'"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 66}, CheckpointError, "hidden_size 66 is not a multiple"),
        ({"num_attention_heads": 0}, CheckpointError, "num_attention_heads is 0"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size is 'many'"),
    ],
)
def test_configs_that_cannot_work(changes: dict[str, Any], error: type[PeltonError], message: str, copy: Path) -> None:
    edit_config(copy, **changes)
    with pytest.raises(error, match=message):
        Checkpoint.open(copy)


def test_an_unknown_architecture(copy: Path) -> None:
    edit_config(copy, model_type="llama9")
    with pytest.raises(UnsupportedModelError, match="no model type 'llama9'"):
        Checkpoint.open(copy).hf_config()


def test_a_config_that_transformers_refuses(copy: Path) -> None:
    edit_config(copy, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": "big"})
    with pytest.raises(CheckpointError, match="rope|factor|config"):
        trace(Checkpoint.open(copy), max_seq_len=64)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_fuzzed_header_never_escapes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[len(content) - data.draw(st.integers(0, 3)) :]
    path.write_bytes(content)
    try:
        shard = Shard(path)
        for name, entry in shard.entries.items():
            shard.array(name, DType.from_safetensors(entry.dtype))
    except (CheckpointError, KeyError):  # KeyError: a dtype that exists but that pelton has no DType for
        pass


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    header, position = {}, 0
    for name, array in tensors.items():
        dtype = DType.from_numpy(array.dtype).safetensors
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


# -- GGUF ---------------------------------------------------------------------------------------------


def write_gguf(path: Path, folder: Path, *, kind: str = "BF16", extra: dict[str, Any] | None = None) -> Path:
    """Write a tiny llama folder as GGUF, q and k rows in llama.cpp's order."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tiny_tokenizer().id_to_token(i) for i in range(config["vocab_size"])])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("T")
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name in checkpoint.source.names():
        array = checkpoint.source.read(name).astype(np.float32)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                split = array.reshape(config[heads], 2, -1, array.shape[1])
                array = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
        target = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else kind]
        stem, _, suffix = name.rpartition(".")
        data = gguf.quantize(array, target)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_reads_like_the_folder_it_came_from(folder: Path, tmp_path: Path) -> None:
    ours = Checkpoint.open(write_gguf(tmp_path / "tiny.gguf", folder))
    theirs = Checkpoint.open(folder)
    assert ours.dtype == DType.BF16
    assert ours.name == "tiny"
    assert ours.generation_config == {"eos_token_id": 2}
    assert ours.tokenizer_files == {"gguf": tmp_path / "tiny.gguf"}
    assert list(ours.source.names()) == list(theirs.source.names())
    for name in theirs.source.names():
        expected = theirs.source.read(name)
        assert ours.source.info(name).shape == expected.shape
        assert ours.source.read(name).dtype == ours.source.info(name).dtype.numpy
        assert np.array_equal(ours.source.read(name).astype(ml_dtypes.bfloat16), expected)
        assert np.array_equal(ours.source.read_rows(name, 1, 5).astype(ml_dtypes.bfloat16), expected[1:5])
        ours.source.release(name)
    ids = random_ids(20)
    graph = import_graph(trace(ours, max_seq_len=64), ours)
    logits = Interpreter(graph, ours.source).step({0: (0, ids)})[0]
    expected_logits = reference_logits(folder, ids)
    assert np.abs(logits - expected_logits).max() < 1e-4 * np.abs(expected_logits).max()


def test_quantised_gguf_equals_transformers(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", folder, kind="Q8_0")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.dtype == DType.BF16
    assert checkpoint.source.info(NAME) == TensorInfo(DType.F32, (96, 64))
    theirs = transformers_gguf(path)
    for name in checkpoint.source.names():
        assert np.array_equal(checkpoint.source.read(name), theirs[name])
    assert np.array_equal(checkpoint.source.read_rows(NAME, 5, 70), theirs[NAME][5:70])


def transformers_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a GGUF file as transformers dequantises them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(path))["config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' has no counterpart"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5"),
    ],
)
def test_gguf_settings_that_would_be_lost_are_refused(
    extra: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint.open(write_gguf(tmp_path / "tiny.gguf", folder, extra=extra))


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, -100])
def test_a_truncated_gguf_is_named(keep: int, folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", folder)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="tiny.gguf: .*(damaged|truncated)"):
        Checkpoint.open(path)


@pytest.mark.slow
def test_the_real_gguf_equals_transformers() -> None:
    folder = Path(os.environ.get("PELTON_TEST_MODEL", ROOT / "models" / "smollm2-135m-instruct"))
    path = folder.parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip("the real GGUF file is not here: scripts/get_model smollm2-135m-instruct --gguf")
    checkpoint = Checkpoint.open(path)
    theirs = transformers_gguf(path)
    assert set(checkpoint.source.names()) == set(theirs) - {"lm_head.weight"}
    for name in checkpoint.source.names():
        ours = checkpoint.source.read(name).astype(ml_dtypes.bfloat16)
        assert np.array_equal(ours.view(np.uint16), theirs[name].astype(ml_dtypes.bfloat16).view(np.uint16))
        checkpoint.source.release(name)
