"""A llama checkpoint as a GGUF file with the same bf16 weights, for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pelton.builder.checkpoint import Checkpoint
from pelton.runtime.errors import UnsupportedModelError
from pelton.runtime.format.dtypes import DType

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Settings under which llama.cpp's "llama" architecture is the same model.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
}


def write_gguf(folder: Path, path: Path) -> Path:
    """Write a llama checkpoint folder with bf16 weights to ``path``: token ids in, no tokenizer; returns ``path``.

    Matrices keep their bits; norms become fp32, as llama.cpp wants them. UnsupportedModelError for another model.
    """
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    _check(folder, config, checkpoint.dtype)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _settings(writer, checkpoint.name, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    source = checkpoint.source
    for name in source.names():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        target = gguf_name(name)
        array = source.read(name)
        if array.ndim == 1:
            writer.add_tensor(target, array.astype(np.float32))
            continue
        values = array.view(np.uint16)
        if (kind := target.split(".")[-2]) in heads:
            values = interleaved(values, heads[kind])
        writer.add_tensor(target, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a checkpoint's tensor; UnsupportedModelError if it is not one of a llama model."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if not layer.isdigit() or part not in _LAYER or suffix != "weight":
        raise UnsupportedModelError(f"tensor {name!r} has no counterpart in llama.cpp's llama architecture")
    return f"blk.{layer}.{_LAYER[part]}.weight"


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads * head_dim, K] with rotary pairs beside each other: row i of a head's first half, then of its second.

    transformers rotates (i, i + head_dim / 2), llama.cpp's llama architecture (2 i, 2 i + 1).
    """
    split = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def _check(folder: Path, config: dict[str, Any], dtype: DType) -> None:
    wrong = {key: config.get(key) for key, allowed in _REQUIRED.items() if config.get(key) not in allowed}
    if config.get("rope_parameters", {}).get("rope_type") != "default":
        wrong["rope_parameters"] = config.get("rope_parameters")
    if dtype is not DType.BF16:
        wrong["dtype"] = dtype.value
    if wrong:
        raise UnsupportedModelError(
            f"{folder}: the comparison takes plain llama checkpoints in bf16, this one has {wrong}"
        )


def _settings(writer: Any, name: str, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
