"""Llama-shaped checkpoints with random bf16 weights, written tensor by tensor: for timings, where values don't matter.

    folder = write_random_model("llama-0.5b", Path("models/llama-0.5b"))

Needs only numpy. There is no tokenizer: such an engine takes token ids.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Known shapes by name: what goes into config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": _COMMON
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    },
    "llama-0.5b": _COMMON
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "llama-1b": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}

_CHUNK = 1 << 22  # values in memory at a time


def write_random_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of a shape in SHAPES (KeyError otherwise) to ``folder``, made if missing; returns it."""
    config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = tensor_shapes(config)
    header, offset = {}, 0
    for tensor, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            _write_tensor(file, shape, generator)
    return folder


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a tied Llama checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (q, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (kv, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (kv, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def _write_tensor(file: Any, shape: tuple[int, ...], generator: np.random.Generator) -> None:
    """Matrices normal with deviation 1/sqrt(K), so that activations keep their size; norm weights near one."""
    count = math.prod(shape)
    scale, mean = (0.1, 1.0) if len(shape) == 1 else (1 / math.sqrt(shape[1]), 0.0)
    for start in range(0, count, _CHUNK):
        values = generator.standard_normal(min(_CHUNK, count - start), np.float32)
        values = values * np.float32(scale) + np.float32(mean)
        file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
