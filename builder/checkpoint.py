"""Checkpoint: a Hugging Face folder or a GGUF file, opened without reading any weight.

Everything a build needs from the outside comes through here: config, tensors (a TensorSource),
generation defaults and tokenizer files. Nothing touches the network or runs code
from the checkpoint, unless ``trust_remote_code`` is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ..runtime.errors import CheckpointError, UnsupportedModelError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_source import TensorSource
from .safetensors_source import SafetensorsSource

#: Files that a tokenizer can be made from, the preferred one first, and those that go with them.
TOKENIZER_SOURCES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_TOKENIZER_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
_HASH_CHUNK = 8 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; make one with ``Checkpoint.open``."""

    path: Path
    name: str
    config: dict[str, Any]
    source: TensorSource
    generation_config: dict[str, Any]
    tokenizer_files: dict[str, Path]  # file name -> path; for GGUF {"gguf": path}
    dtype: DType  # the type most weights are stored in (BF16 for quantised GGUF weights)
    trust_remote_code: bool = False
    notes: tuple[str, ...] = ()  # what a build must say about it
    _cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path, *, trust_remote_code: bool = False) -> Checkpoint:
        """Open a Hugging Face folder or a ``.gguf`` file.

        ``trust_remote_code``: whether ``hf_config`` and a trace may run Python code of the folder; opening runs none.
        Raises CheckpointError when something is missing, damaged or contradicts itself, and
        UnsupportedModelError when it is sound but of a kind that pelton does not take.
        """
        path = Path(path)
        if path.is_file() and path.suffix == ".gguf":
            from .gguf_source import open_gguf

            return open_gguf(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint folder or .gguf file")
        config = read_json(path / "config.json", required=True)
        check_config(path / "config.json", config, trust_remote_code)
        source = SafetensorsSource.open(path)
        return cls(
            path=path,
            name=path.resolve().name,
            config=config,
            source=source,
            generation_config=read_json(path / "generation_config.json"),
            tokenizer_files={
                name: path / name for name in (*TOKENIZER_SOURCES, *_TOKENIZER_COMPANIONS) if (path / name).is_file()
            },
            dtype=main_dtype(path, source, lambda name: source.info(name).dtype),
            trust_remote_code=trust_remote_code,
            notes=("code that came with the checkpoint was run to build it",) if config.get("auto_map") else (),
        )

    def hf_config(self) -> Any:
        """The transformers config object (built once). Raises UnsupportedModelError for an unknown architecture."""
        if "hf_config" not in self._cache:
            self._cache["hf_config"] = self._load_hf_config()
        return self._cache["hf_config"]

    def fingerprint(self) -> str:
        """sha256 (hex) of the config and of every tensor's name, type, shape and bytes; streamed, computed once.

        Independent of sharding and of the folder's name. Of a GGUF file: the hash of the file.
        """
        if "fingerprint" not in self._cache:
            self._cache["fingerprint"] = _file_hash(self.path) if self.path.is_file() else self._content_hash()
        return str(self._cache["fingerprint"])

    def _content_hash(self) -> str:
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.source.names()):
            info = self.source.info(name)
            digest.update(f"\n{name} {info.dtype.value} {list(info.shape)}\n".encode())
            flat: Any = self.source.read(name).reshape(-1).view("u1")
            data = memoryview(flat)
            for start in range(0, len(data), _HASH_CHUNK):
                digest.update(data[start : start + _HASH_CHUNK])
            self.source.release(name)
        return digest.hexdigest()

    def _load_hf_config(self) -> Any:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        model_type = self.config["model_type"]
        if model_type not in CONFIG_MAPPING and not self.trust_remote_code:
            import transformers

            raise UnsupportedModelError(
                f"{self.path}: transformers {transformers.__version__} has no model type {model_type!r}; "
                "a newer transformers may know it"
            )
        try:
            with offline():
                if self.path.is_dir():
                    return AutoConfig.from_pretrained(
                        self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
                    )
                return AutoConfig.for_model(**self.config)
        except Exception as error:  # transformers validates with many exception types
            raise CheckpointError(f"{self.path}: transformers refuses the config: {error}") from error


@contextmanager
def offline() -> Iterator[None]:
    """Keep huggingface_hub from the network for a while, whatever the environment says."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_config(where: Path, config: dict[str, Any], trust_remote_code: bool = False) -> None:
    """Contradictions in a config that would otherwise show up deep inside a build."""
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{where}: no model_type, so the architecture is unknown")
    if config.get("auto_map") and not trust_remote_code:
        raise UnsupportedModelError(
            f"{where}: the checkpoint brings its own code (auto_map), which only build-engine "
            "--trust-remote-code runs; if transformers itself has this architecture, remove auto_map from config.json"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UnsupportedModelError(
            f"{where}: weights are quantised already (quant_method {method!r}); give the unquantised checkpoint"
        )
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    for key in (
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers"),
        *("vocab_size", "max_position_embeddings"),
    ):
        value = text.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CheckpointError(f"{where}: {key} is {value!r}; a positive integer is needed")
    if heads and kv_heads and heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}, so query heads "
            "cannot share key/value heads evenly"
        )
    hidden = text.get("hidden_size")
    if heads and hidden and not text.get("head_dim") and hidden % heads:
        raise CheckpointError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} when an optional file is absent."""
    if not path.is_file():
        if required:
            raise CheckpointError(
                f"{path.parent}: {path.name} is missing, so this is not a Hugging Face checkpoint folder"
            )
        return {}
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, this is a {type(document).__name__}")
    return document


def main_dtype(path: Path, source: TensorSource, dtype_of: Callable[[str], DType]) -> DType:
    """The float type that most elements of a checkpoint have; ``dtype_of`` gives a tensor's."""
    floats: Counter[DType] = Counter()
    for name in source.names():
        if (dtype := dtype_of(name)).is_float:
            floats[dtype] += prod(source.info(name).shape)
    if not floats:
        raise CheckpointError(f"{path}: no floating point tensors among {len(source.names())}")
    return max(floats, key=lambda dtype: floats[dtype])
