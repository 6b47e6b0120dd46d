"""The front end as a whole: a traced and imported model means what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.builder.checkpoint import Checkpoint
from pelton.builder.graph import Graph
from pelton.builder.importer import import_graph
from pelton.builder.ops.fused import Embedding
from pelton.builder.ops.generic import Attention, Linear
from pelton.builder.trace import trace
from pelton.builder.trace_attention import ATTENTION_OP
from pelton.builder.trace_masks import MaskDescriptor, classify_mask
from pelton.runtime.errors import CheckpointError, UnsupportedModelError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.weight_expr import CastTo, Source
from tests.builder.interpret import MAX_SEQ_LEN, Interpreter
from tests.models import FAMILIES, make_custom, make_tiny, random_ids, reference_logits, reference_model


def front_end(folder: Path, max_seq_len: int = MAX_SEQ_LEN) -> tuple[Graph, Checkpoint]:
    checkpoint = Checkpoint.open(folder)
    return import_graph(trace(checkpoint, max_seq_len=max_seq_len), checkpoint), checkpoint


def relative_error(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, tmp_path: Path) -> None:
    kv_heads: int | str = {"llama": 1, "qwen2": "all"}.get(family, 2)
    folder = make_tiny(family, tmp_path / family, kv_heads=kv_heads, dtype="bfloat16")
    graph, checkpoint = front_end(folder)
    for length in (1, 5, 17, 100):
        ids = random_ids(length, seed=length)
        ours = Interpreter(graph, checkpoint.source).step({0: (0, ids)})[0]
        theirs = reference_logits(folder, ids, MAX_SEQ_LEN)
        assert relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize("family", ["llama-dynamic", "mistral", "qwen3"])
def test_packed_and_chunked_equal_alone_bit_for_bit(family: str, tmp_path: Path) -> None:
    graph, checkpoint = front_end(make_tiny(family, tmp_path / family))
    prompts = {0: random_ids(23, seed=1), 1: random_ids(1, seed=2), 2: random_ids(40, seed=3)}
    alone = {s: Interpreter(graph, checkpoint.source).step({s: (0, ids)})[s] for s, ids in prompts.items()}
    packed = Interpreter(graph, checkpoint.source).step({s: (0, ids) for s, ids in prompts.items()})
    for sequence, expected in alone.items():
        assert np.array_equal(packed[sequence], expected)
    chunked = Interpreter(graph, checkpoint.source)
    ids = prompts[2]
    parts = [chunked.step({2: (start, ids[start : start + 7])})[2] for start in range(0, len(ids), 7)]
    assert np.array_equal(np.concatenate(parts), alone[2])


def test_weights_are_expressions_by_name(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "m", dtype="bfloat16", num_hidden_layers=3)
    graph, checkpoint = front_end(folder)
    by_name = {value.name: expr for value, expr in graph.weights.items()}
    assert set(by_name) == set(checkpoint.source.names())
    name = "model.layers.2.self_attn.k_proj.bias"
    assert by_name[name] == CastTo(Source(name, (32,), DType.BF16), DType.F32)
    assert [s.name for s in graph.states] == ["kv.0", "kv.1", "kv.2"]
    layers = [node.origin for node in graph.nodes if isinstance(node.op, Attention)]
    assert layers == [f"model.layers.{i}.self_attn" for i in range(3)]


def test_fp32_checkpoints_need_no_cast(tmp_path: Path) -> None:
    graph, _ = front_end(make_tiny("llama", tmp_path / "m"))
    assert all(isinstance(expr, Source) for expr in graph.weights.values())


@pytest.mark.parametrize("stored", ["tied", "head missing"])
def test_tied_embeddings_are_one_value(stored: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", tie_word_embeddings=True)
    if stored == "head missing":
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    graph, checkpoint = front_end(folder)
    (embedding,) = [node for node in graph.nodes if isinstance(node.op, Embedding)]
    head = graph.nodes[-1]
    assert isinstance(head.op, Linear)
    assert head.inputs[1] is embedding.inputs[1]
    ids = random_ids(9)
    if stored == "tied":
        theirs = reference_logits(folder, ids)
        assert relative_error(Interpreter(graph, checkpoint.source).step({0: (0, ids)})[0], theirs) < 1e-4


def test_tied_in_the_config_but_stored_twice_and_different_stays_apart(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", tie_word_embeddings=False)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    graph, checkpoint = front_end(folder)
    assert "lm_head.weight" in [value.name for value in graph.weights]
    ids = random_ids(9)
    ours = Interpreter(graph, checkpoint.source).step({0: (0, ids)})[0]
    assert relative_error(ours, reference_logits(folder, ids)) < 1e-4


def test_dynamic_rope_is_fixed_and_noted(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny("llama-dynamic", tmp_path / "m"))
    assert "fixed at build for max_seq_len 200" in trace(checkpoint, max_seq_len=200).notes[0]
    assert "up to 64" in trace(checkpoint, max_seq_len=50).notes[0]
    short, long = (import_graph(trace(checkpoint, max_seq_len=n), checkpoint) for n in (50, 200))
    frequencies = [next(c for c in g.constants.values() if c.shape == (8,)) for g in (short, long)]
    assert not np.array_equal(*frequencies)
    ids = random_ids(30)
    ours = Interpreter(short, checkpoint.source).step({0: (0, ids)})[0]
    assert relative_error(ours, reference_logits(tmp_path / "m", ids)) < 1e-4


def test_windows_come_from_the_mask(tmp_path: Path) -> None:
    folder = make_tiny("mistral", tmp_path / "m", sliding_window=12)
    assert [g.window for g in front_end(folder)[0].kv_groups] == [12]
    assert [g.window for g in front_end(folder, max_seq_len=12)[0].kv_groups] == [None]


def test_windows_of_some_layers_only_make_two_groups(tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention", "full_attention"]
    folder = make_tiny(
        "qwen2", tmp_path / "m", num_hidden_layers=3, use_sliding_window=True, sliding_window=9, layer_types=layers
    )
    graph, checkpoint = front_end(folder)
    assert [(g.name, g.window) for g in graph.kv_groups] == [("full", None), ("window9", 9)]
    assert [s.group for s in graph.states] == [0, 1, 0]
    ids = random_ids(40)
    ours = Interpreter(graph, checkpoint.source).step({0: (0, ids)})[0]
    assert relative_error(ours, reference_logits(folder, ids)) < 1e-4


def test_trace_leaves_the_library_as_it_was(tmp_path: Path) -> None:
    from huggingface_hub import constants
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    folder = make_tiny("llama", tmp_path / "m")

    def state() -> list[Any]:
        masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        return [
            dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
            dict(masks),
            masking_utils.find_packed_sequence_indices,
            torch.nn.Module.register_parameter,
            constants.HF_HUB_OFFLINE,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
        ]

    before = state()
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.hf_config().to_dict()
    trace(checkpoint, max_seq_len=64)
    assert state() == before
    assert checkpoint.hf_config().to_dict() == config
    assert reference_model(folder)(input_ids=torch.tensor([[5, 6]])).logits.shape == (1, 2, 300)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 112'))
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight' has shape \[96, 64\].*\[112, 64\]"):
        front_end(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"'model.layers.2.self_attn.q_proj.weight' \[64, 64\] is missing"):
        front_end(folder)


def _causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k <= q


@pytest.mark.parametrize(
    "function, length, kind, window",
    [
        (_causal, 1000, "causal", None),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 1000, "causal", 7),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 300, "causal", 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 5000), 1000, "causal", None),
        (lambda b, h, q, k: q >= 0, 100, "bidirectional", None),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), 1000, "unknown", None),  # chunked
        (lambda b, h, q, k: (k <= q) | (k < 4), 1000, "unknown", None),  # prefix
        (lambda b, h, q, k: abs(q - k) <= 8, 1000, "unknown", None),  # two-sided window
        (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (h == 1)), 1000, "unknown", None),  # differs by head
        (lambda b, h, q, k: k < q, 100, "unknown", None),
        (lambda b, h, q, k: (k <= q) & ((k > q - 20) | (k < 4)), 1000, "unknown", None),  # sinks
        (lambda b, h, q, k: {}[1], 100, "unknown", None),
    ],
)
def test_mask_kinds(function: Any, length: int, kind: str, window: int | None) -> None:
    found = classify_mask(function, length)
    assert (found.kind, found.window) == (kind, window)
    assert found.detail or kind == "causal"


_TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}

#: Families that must be refused, their configs, and what the refusal must say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4}, "expert"),
    "mamba": ({"state_size": 4}, "attention"),
    "bart": ({"d_model": 32}, "encoder-decoder"),
    "bloom": ({"n_head": 4}, "position|token"),
    "bert": ({"intermediate_size": 32}, "not causal|bidirectional"),
    "gpt_oss": (
        {"head_dim": 8, "num_local_experts": 2, "num_key_value_heads": 2, "intermediate_size": 32},
        "expert|s_aux",
    ),
    "t5": ({"d_model": 32}, "encoder-decoder"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_kinds_are_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    extra, reason = REFUSED[model_type]
    checkpoint = untrained(model_type, tmp_path / "m", **extra)
    with pytest.raises(UnsupportedModelError, match=rf"(?i){reason}"):
        import_graph(trace(checkpoint, max_seq_len=32), checkpoint)


def untrained(model_type: str, folder: Path, **extra: Any) -> Checkpoint:
    """A checkpoint of any family with transformers' own initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(model_type, **{**_TINY, **extra})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return Checkpoint.open(folder)


_LONGROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("max_seq_len, length", [(128, 60), (32, 20)])
def test_longrope_takes_the_factors_of_the_longest_sequence(max_seq_len: int, length: int, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", rope_parameters=_LONGROPE, max_position_embeddings=128)
    checkpoint = Checkpoint.open(folder)
    traced = trace(checkpoint, max_seq_len=max_seq_len)
    assert "longrope rope factors fixed" in traced.notes[0]
    ids = random_ids(length)
    ours = Interpreter(import_graph(traced, checkpoint), checkpoint.source).step({0: (0, ids)})[0]
    assert relative_error(ours, reference_logits(folder, ids)) < 1e-4


def test_rope_types_by_layer_are_fixed_one_by_one(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    extra = {"rope_parameters": rope, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    layers = ["sliding_attention", "full_attention"]
    checkpoint = untrained("gemma3_text", tmp_path / "m", layer_types=layers, sliding_window=8, **extra)
    traced = trace(checkpoint, max_seq_len=100)
    assert [note.split(":")[0] for note in traced.notes] == ["model.rotary_emb (full_attention)"]
    graph = import_graph(traced, checkpoint)
    frequencies = [c for c in graph.constants.values() if c.shape == (4,)]
    assert len(frequencies) == 2
    assert [g.window for g in graph.kv_groups] == [8, None]


def test_tensors_that_the_model_does_not_use_are_noted(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "m", num_hidden_layers=3)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    notes = trace(Checkpoint.open(folder), max_seq_len=64).notes
    assert notes[0].startswith("9 tensors of the checkpoint are not part of the model: model.layers.2.input_layernorm")


def test_attention_of_known_values_is_refused() -> None:
    """The op has no values of its own: a model that computes with it outside the trace is not understood."""
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match="attention while it is traced"):
        ATTENTION_OP(q, q, q, 1.0, -1, 0.0)


def test_custom_code_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_custom(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        Checkpoint.open(folder)
    checkpoint = Checkpoint.open(folder, trust_remote_code=True)
    graph = import_graph(trace(checkpoint, max_seq_len=64), checkpoint)
    assert len(graph.states) == 2


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 400), window=st.integers(1, 500), data=st.data())
def test_every_window_is_found_and_any_flaw_is_seen(length: int, window: int, data: st.DataObject) -> None:
    expected = MaskDescriptor("causal", None if window >= length else window)
    assert classify_mask(lambda b, h, q, k: (k <= q) & (k > q - window), length) == expected
    row = data.draw(st.integers(0, min(length, 90) - 1))
    column = data.draw(st.integers(0, length - 1))

    def flawed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((k <= q) & (k > q - window)) ^ ((q == row) & (k == column))

    if length > 2:
        assert classify_mask(flawed, length).kind == "unknown"
