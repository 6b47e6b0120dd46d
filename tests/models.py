"""Tiny random Hugging Face checkpoints, made on the fly, one for each family that pelton builds.

    folder = make_tiny("qwen3", tmp_path / "qwen3", kv_heads=1, dtype="bfloat16")
    logits = reference_logits(folder, [5, 6, 7])

Weights come from a fixed seed and are large enough that logits are not flat. Every folder has a
real byte-level BPE tokenizer of 300 tokens and a chat template.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB_SIZE = 300

_ROPE: dict[str, dict[str, Any]] = {
    "llama-llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama-yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama-linear": {"rope_type": "linear", "factor": 2.0},
    "llama-dynamic": {"rope_type": "dynamic", "factor": 2.0},
}

#: Every family that the front end must get right.
FAMILIES = ("llama", *_ROPE, "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3")

_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is gravity? Gravity is a force by which "
    "a planet or other body draws objects toward its center. The answer is in the name of the "
    "thing that the people there were looking for, and this is where they went with their friends."
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny(
    family: str,
    folder: Path,
    *,
    kv_heads: int | str = 2,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str | int | None = None,
    **config: Any,
) -> Path:
    """Write a checkpoint of ``family`` (one of FAMILIES) to ``folder`` and return it.

    ``kv_heads``: 1, 2 or "all" (4 query heads). ``dtype``: "float32", "float16" or "bfloat16".
    Other keywords go into the config (``tie_word_embeddings=True``, ``num_hidden_layers=3``, ...).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = tiny_config(family, kv_heads=kv_heads, **config)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(settings).eval()
    _randomise(model, seed)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return folder


_CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def make_custom(folder: Path) -> Path:
    """A checkpoint of an architecture that transformers lacks, with Python code of its own."""
    make_tiny("llama", folder)
    (folder / "mine.py").write_text(_CUSTOM)
    document = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps(document | {"model_type": "mine", "auto_map": code}))
    return folder


def tiny_config(family: str, *, kv_heads: int | str = 2, **config: Any) -> Any:
    """The transformers config of a tiny ``family`` model."""
    from transformers import AutoConfig

    model_type = "llama" if family in _ROPE else {"gemma3": "gemma3_text"}.get(family, family)
    heads = config.get("num_attention_heads", 4)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": heads if kv_heads == "all" else kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if family in _ROPE:
        settings["rope_parameters"] = {"rope_theta": 10000.0, **_ROPE[family]}
    if family == "llama-dynamic":
        settings["max_position_embeddings"] = 64
    if family in ("mistral", "gemma2", "gemma3"):
        settings["sliding_window"] = 12
    if family in ("gemma2", "gemma3"):
        settings["layer_types"] = ["sliding_attention", "full_attention"]
        settings["query_pre_attn_scalar"] = 24
    if family == "gemma3":
        settings["rope_parameters"] = {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }
    settings.update(config)
    return AutoConfig.for_model(model_type, **settings)


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter: matrices normal, norm weights near 1, biases small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (0.3 if "embed" in name or "lm_head" in name else 0.15))
            else:
                parameter.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))


@functools.lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, specials first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


@functools.lru_cache(maxsize=4)
def reference_model(folder: Path, max_seq_len: int | None = None) -> Any:
    """The transformers model of a checkpoint, in fp32 with eager attention.

    ``max_seq_len`` fixes the factors of dynamic rope as an engine built for that length has them.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    rotary = model.model.rotary_emb
    if max_seq_len is not None and rotary.rope_type == "dynamic":
        rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](
            model.config, torch.device("cpu"), seq_len=max_seq_len
        )
        rotary.max_seq_len_cached, rotary.original_max_seq_len = 1 << 30, 0
    return model


def reference_logits(folder: Path, token_ids: list[int], max_seq_len: int | None = None) -> np.ndarray:
    """fp32 logits [T, V] of every position of one sequence, by transformers."""
    model = reference_model(Path(folder), max_seq_len)
    with torch.no_grad():
        result = model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return np.asarray(result.logits[0].float().numpy())


def random_ids(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """A reproducible prompt of ``count`` ordinary token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(5, vocab_size, count)]
