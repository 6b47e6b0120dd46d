"""Rotary factors that transformers recomputes from the longest position in a batch, fixed at build.

With them left alone a sequence's values would depend on its batch mates. The factors for the
engine's longest sequence are put into the module's buffers instead, and a note says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..runtime.errors import UnsupportedModelError


def fix_rope(model: nn.Module, max_seq_len: int) -> list[str]:
    """Fix dynamic and longrope factors of every rotary module for ``max_seq_len``; returns notes for the report."""
    notes: list[str] = []
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if note := _fix(name, module, kinds, None, max_seq_len):
                notes.append(note)
                module.rope_type = "default"
        elif isinstance(kinds, dict):
            fixed = dict(kinds)
            for layer_type, kind in kinds.items():
                if note := _fix(name, module, kind, layer_type, max_seq_len):
                    notes.append(note)
                    fixed[layer_type] = "default"
            module.rope_type = fixed
    return notes


def _fix(name: str, module: nn.Module, kind: str, layer_type: str | None, max_seq_len: int) -> str | None:
    """Set one inv_freq; None when this kind does not depend on the sequence length."""
    if "dynamic" not in kind and kind != "longrope":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = module.config
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
    original = int(original or getattr(module, "original_max_seq_len", config.max_position_embeddings))
    where = name + (f" ({layer_type})" if layer_type else "")
    if not isinstance(getattr(module, f"{prefix}inv_freq", None), torch.Tensor):
        raise UnsupportedModelError(f"{where}: rope type {kind!r} without an inv_freq buffer is not understood")
    if max_seq_len <= original:
        return f"{where}: {kind} rope factors fixed for sequences up to {original} (max_seq_len {max_seq_len})"
    seq_len = max_seq_len if "dynamic" in kind else original + 1
    options = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len, **options)
    module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
    return f"{where}: {kind} rope factors fixed at build for max_seq_len {max_seq_len} (beyond {original})"
