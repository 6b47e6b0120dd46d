"""A GGUF file as a checkpoint: config by transformers' conversion, tensors dequantised one at a time.

Tensors have their Hugging Face names and row orders, so the rest of a build sees no difference. What the
conversion would lose (scaled rotary factors, settings without a counterpart) is refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ..runtime.errors import CheckpointError, UnsupportedModelError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_source import TensorInfo
from .checkpoint import Checkpoint, check_config, main_dtype

#: Types that are stored as such; all others are dequantised to fp32.
_PLAIN = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}

#: transformers' processors that work element by element or on q and k alone.
_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor")

#: Settings that need no counterpart in the config, and the values for which that is so (None: any).
_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (False, True),
    "rope.scaling.type": ("none",),
    "vocab_size": None,
}


class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names (see TensorSource).

    fp32, fp16 and bf16 tensors are zero-copy views, save for those whose rows are put back in order.
    """

    def __init__(self, path: Path, reader: Any, names: Mapping[str, str], processor: Any) -> None:
        self._path = path
        self._map: mmap.mmap = reader.data._mmap
        self._tensors = {names[tensor.name]: tensor for tensor in reader.tensors}
        self._names = sorted(self._tensors)
        self._processor = processor

    def names(self) -> Sequence[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensor(name)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return TensorInfo(_PLAIN.get(tensor.tensor_type.name, DType.F32), shape)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        tensor = self._tensor(name)
        processed = self._processor.process(weights=self._values(name, tensor, tensor.data), name=tensor.name)
        return np.asarray(processed.weights)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        tensor = self._tensor(name)
        if _reordered(tensor.name):
            return self.read(name)[start:stop]
        values = self._values(name, tensor, tensor.data[start:stop])
        return np.asarray(self._processor.process(weights=values, name=tensor.name).weights)

    def release(self, name: str) -> None:
        tensor = self._tensor(name)
        start = tensor.data_offset - tensor.data_offset % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, tensor.data_offset + tensor.n_bytes - start)

    def stored_dtype(self, name: str) -> DType:
        """The type of the values as stored: BF16 stands for every quantised type."""
        return _PLAIN.get(self._tensor(name).tensor_type.name, DType.BF16)

    def _tensor(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._path}: has no tensor for {name!r}") from None

    def _values(self, name: str, tensor: Any, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rows of a tensor in the dtype that ``info`` says."""
        from gguf import dequantize

        kind = tensor.tensor_type.name
        if kind in _PLAIN:
            return data.view(_PLAIN[kind].numpy)
        try:
            return np.asarray(dequantize(data, tensor.tensor_type), np.float32)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is quantised as {kind}, which the gguf package cannot undo"
            ) from None


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; raises CheckpointError (damaged) or UnsupportedModelError (not understood)."""
    reader = _reader(path)
    fields = {name: field.contents for name, field in reader.fields.items()}
    architecture = str(fields["general.architecture"]()) if "general.architecture" in fields else ""
    config = _config(path, architecture, reader)
    _refuse_lost_settings(path, architecture, fields, config)
    check_config(path, config)
    processor, names = _names(path, architecture, config, [tensor.name for tensor in reader.tensors])
    source = GGUFSource(path, reader, names, processor)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return Checkpoint(
        path=path,
        name=path.resolve().stem,
        config=config,
        source=source,
        generation_config={key: config[key] for key in ids if isinstance(config.get(key), int)},
        tokenizer_files={"gguf": path} if "tokenizer.ggml.tokens" in fields else {},
        dtype=main_dtype(path, source, source.stored_dtype),
        notes=_quantised(reader),
    )


def _quantised(reader: Any) -> tuple[str, ...]:
    """A note that names the quantised types, which an engine does not keep."""
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - set(_PLAIN))
    return (f"GGUF weights of type {', '.join(kinds)} are dequantised to the engine's type",) if kinds else ()


def _reader(path: Path) -> Any:
    """gguf's reader over the mapped file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader trusts the file: anything can happen on a damaged one
        raise CheckpointError(f"{path}: damaged or truncated, or not a GGUF file ({error})") from error
    if "split.count" in reader.fields and int(reader.fields["split.count"].contents()) > 1:
        raise UnsupportedModelError(f"{path}: one part of a split GGUF; join the parts with gguf-split --merge")
    size = path.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise CheckpointError(f"{path}: truncated inside tensor {tensor.name!r}; download it again")
    return reader


def _config(path: Path, architecture: str, reader: Any) -> dict[str, Any]:
    """The Hugging Face config of the file, by transformers' own tables."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint

    try:
        with mock.patch.object(gguf, "GGUFReader", return_value=reader):  # parsing it twice would take seconds
            return dict(load(str(path))["config"])
    except ValueError as error:
        raise UnsupportedModelError(
            f"{path}: transformers does not convert GGUF models of type {architecture!r}"
        ) from error
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: the GGUF metadata are incomplete ({error!r})") from error


def _refuse_lost_settings(path: Path, architecture: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Every setting of the architecture must have reached the config, or change nothing."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    known: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    mapped = {**known.get(architecture, {}), **known.get(str(config.get("model_type")), {})}
    for key in fields:
        if not key.startswith(f"{architecture}."):
            continue
        short = key.removeprefix(f"{architecture}.")
        if mapped.get(short) is not None:
            continue
        value = fields[key]()
        if short in ("attention.key_length", "attention.value_length"):
            allowed: tuple[Any, ...] | None = (
                config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            )
        elif short in _HARMLESS:
            allowed = _HARMLESS[short]
        else:
            allowed = ()
        if allowed is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{path}: setting {key} = {value!r} has no counterpart in the Hugging Face config, so the model "
                "would be wrong without it; give the original Hugging Face checkpoint"
            )


def _names(path: Path, architecture: str, config: dict[str, Any], tensors: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """transformers' tensor processor, and GGUF name -> Hugging Face name of every tensor."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    library: Any = transformers
    weights_map: Any = get_gguf_hf_weights_map

    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    if kind.__name__ not in _PROCESSORS:
        raise UnsupportedModelError(f"{path}: GGUF tensors of {architecture!r} models are not understood")
    processor = kind(config=config)
    try:
        with torch.device("meta"), torch.random.fork_rng():
            model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**config))
        names = dict(weights_map(model, processor))
    except Exception as error:  # transformers raises many kinds for models it cannot make
        raise UnsupportedModelError(
            f"{path}: transformers cannot make a {config['model_type']} model of it: {error}"
        ) from error
    if lost := [name for name in tensors if name not in names]:
        raise UnsupportedModelError(
            f"{path}: {len(lost)} tensors have no counterpart in the {config['model_type']} model, so it would be "
            f"wrong without them ({', '.join(lost[:3])}); give the original Hugging Face checkpoint"
        )
    return processor, names


def _reordered(gguf_name: str) -> bool:
    """Whether a processor may move rows of this tensor."""
    return ".attn_q." in gguf_name or ".attn_k." in gguf_name
