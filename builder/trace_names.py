"""Which checkpoint tensor each parameter of a traced model comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ..runtime.errors import UnsupportedModelError
from .checkpoint import Checkpoint

#: Tensors that old checkpoints carry and that every model computes itself.
_COMPUTED = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


def stored_names(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, str | None], list[str]]:
    """Each parameter and persistent buffer -> the tensor that holds it (None: missing), and notes for the report.

    Tied parameters share a tensor, unless the checkpoint has one for each and they differ. An output head that is
    missing is the input embedding. Tensor names are those that transformers would see after its own renaming;
    a family whose tensors it also converts is refused. ``model`` must still have its ties.
    """
    state = model.state_dict(keep_vars=True)
    stored = _renamed(model, checkpoint, state)
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    names: dict[str, str | None] = {}
    for group in tied.values():
        names.update(_group_names(group, stored, checkpoint))
    unused = [old for new, old in stored.items() if new not in state and not new.endswith(_COMPUTED)]
    if unused:
        listed = ", ".join(unused[:5])
        return names, [f"{len(unused)} tensors of the checkpoint are not part of the model: {listed}"]
    head, embedding = _weight_name(model, "get_output_embeddings"), _weight_name(model, "get_input_embeddings")
    if head in names and names[head] is None and names.get(embedding) is not None:
        names[head] = names[embedding]
        return names, [f"{head} is not in the checkpoint: the output head is the input embedding"]
    return names, []


def _renamed(model: nn.Module, checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, str]:
    """The parameter that transformers would load each checkpoint tensor into -> the tensor's own name."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    if checkpoint.path.is_file():  # a GGUF source has the model's own names
        return {name: name for name in checkpoint.source.names()}
    library: Any = conversion_mapping
    transforms = library.get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", None)
    found: dict[str, str] = {}
    for name in checkpoint.source.names():
        renamed, converter = rename_source_key(name, renamings, converters, prefix, state)
        if converter is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: transformers converts tensor {name!r} (to {renamed!r}) when it loads this family, "
                "which is not understood; the family needs an adapter"
            )
        found[str(renamed)] = name
    return found


def _group_names(group: Sequence[str], stored: dict[str, str], checkpoint: Checkpoint) -> dict[str, str | None]:
    """Tensors of parameters that are tied: the first that is stored, or each its own when they differ."""
    present = [stored[name] for name in group if name in stored]
    first = present[0] if present else None
    names: dict[str, str | None] = dict.fromkeys(group, first)
    for name in group:
        own = stored.get(name)
        if first is not None and own is not None and own != first:
            read = checkpoint.source.read
            if not np.array_equal(read(own), read(first)):
                names[name] = own
    return names


def _weight_name(model: nn.Module, getter: str) -> str:
    """The state dict name of the weight of the module that ``getter`` returns ("" if there is none)."""
    module = getattr(model, getter)()
    return next(
        (f"{name}.weight" for name, found in model.named_modules() if module is not None and found is module), ""
    )
