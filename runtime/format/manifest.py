"""The manifest: what an engine is, in one small struct that every loader reads first."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import EngineFormatError
from .decode import decoded
from .dtypes import DType
from .plan import Ranges

#: Version of the file format and of every struct in it. A reader takes exactly its own schema.
SCHEMA = 2

_Count = Annotated[int, Meta(ge=1, le=1 << 40)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class TargetEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One target whose plan (and code) the engine carries, in sections ``plan/<key>`` and ``code/<key>``."""

    key: str
    kind: str  # "cpu" | "reference" | ...
    sku: str
    features: tuple[str, ...]  # CPU features (as in /proc/cpuinfo) that the code needs
    rank: int  # of the targets that run on a machine, the highest wins
    compiler: str
    flags: tuple[str, ...]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model's facts that a server needs."""

    architecture: str  # the checkpoint's own word: a class (LlamaForCausalLM); of a GGUF file its model type (llama)
    name: str
    vocab_size: _Count
    hidden_size: _Count
    num_layers: _Count
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    max_position_embeddings: _Count
    dtype: DType
    eos_token_ids: tuple[_TokenId, ...]
    bos_token_id: _TokenId | None
    pad_token_id: _TokenId | None
    generation_defaults: dict[str, float | int | bool]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an engine but its bytes. No times and no machine paths: same input, same manifest."""

    schema: int
    pelton_version: str
    model: ModelInfo
    ranges: Ranges
    targets: tuple[TargetEntry, ...]
    provenance: dict[str, str]
    notes: tuple[str, ...]

    def target(self, key: str) -> TargetEntry:
        """The target of this key; raises EngineFormatError naming those that exist."""
        for entry in self.targets:
            if entry.key == key:
                return entry
        known = ", ".join(entry.key for entry in self.targets) or "(none)"
        raise EngineFormatError(f"the engine has no target {key!r}; it has: {known}")


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON: equal manifests give equal bytes."""
    return msgspec.json.encode(manifest, order="deterministic")


def decode_manifest(data: bytes | str) -> Manifest:
    """Read a manifest. Raises EngineFormatError naming the field that is wrong."""
    manifest = decoded("the manifest", data, Manifest)
    if manifest.schema != SCHEMA:
        raise EngineFormatError(f"the manifest is damaged: it has schema {manifest.schema}, not {SCHEMA}")
    for field in msgspec.structs.fields(Ranges):
        if getattr(manifest.ranges, field.name) < (0 if field.name == "max_logprobs" else 1):
            raise EngineFormatError(f"the manifest is damaged: ranges.{field.name} is not positive")
    keys = [entry.key for entry in manifest.targets]
    if len(set(keys)) != len(keys):
        raise EngineFormatError(f"the manifest is damaged: a target key occurs twice in {keys}")
    return manifest
