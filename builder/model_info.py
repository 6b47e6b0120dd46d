"""The facts about a model that a server needs, taken from its config files."""

from __future__ import annotations

from typing import Any

from ..runtime.errors import CheckpointError
from ..runtime.format.dtypes import DType
from ..runtime.format.manifest import ModelInfo
from .checkpoint import Checkpoint
from .tokenizer_closure import end_ids

#: Fields of generation_config.json that are sampling defaults.
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


def model_info(checkpoint: Checkpoint, tokenizer: bytes | None, precision: DType, max_seq_len: int) -> ModelInfo:
    """ModelInfo of a checkpoint; raises CheckpointError where the config lacks what every decoder has.

    ``max_seq_len``: the engine's longest sequence, which stands for the model's where its config names none.
    """
    config = checkpoint.config
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    generation = checkpoint.generation_config
    ends = tuple(end_ids(config, generation, tokenizer))
    vocabulary = _integer(config, "vocab_size")
    if outside := [i for i in ends if not 0 <= i < vocabulary]:
        raise CheckpointError(
            f"config.json or generation_config.json: eos_token_id {outside} is outside the vocabulary of {vocabulary} "
            "tokens, so generation could not end; correct it"
        )
    defaults = {k: generation[k] for k in _SAMPLING_FIELDS if isinstance(generation.get(k), int | float)}
    return ModelInfo(
        architecture=_architecture(config),
        name=checkpoint.name,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        max_position_embeddings=max_positions(config) or max_seq_len,
        dtype=precision,
        eos_token_ids=ends,
        bos_token_id=_optional_id(config, generation, "bos_token_id", vocabulary),
        pad_token_id=_optional_id(config, generation, "pad_token_id", vocabulary),
        generation_defaults=defaults,
    )


def max_positions(config: dict[str, Any]) -> int | None:
    """The longest sequence a config allows, or None if it does not say.

    Dynamic rope scaling states the length before scaling; every other kind states the length after.
    """
    stated = config.get("max_position_embeddings")
    if not isinstance(stated, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: the rope parameters are {rope!r}; a JSON object is needed")
    if rope.get("rope_type", rope.get("type")) == "dynamic":
        factor = rope.get("factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
            raise CheckpointError(f"config.json: the rope factor is {factor!r}; a number of at least 1 is needed")
        return int(stated * factor)
    return stated


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    return str(config.get("model_type", "?"))


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is needed")
    return value


def _optional_id(config: dict[str, Any], generation: dict[str, Any], key: str, vocabulary: int) -> int | None:
    """A token id, or None where the configs name none: -1 and the like are common spellings of that."""
    value = generation.get(key, config.get(key))
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary
    return value if is_id else None
