"""The manifest, and how large an engine is."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.container import EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.manifest import decode_manifest, encode_manifest
from pelton.runtime.format.plan import encode_plan

from .engines import KEY, manifest, plan


def test_round_trip_and_fixed_bytes() -> None:
    data = encode_manifest(manifest())
    assert decode_manifest(data) == manifest()
    assert encode_manifest(decode_manifest(data)) == data
    defaults = {"b": 1, "a": 2}
    swapped = {"a": 2, "b": 1}
    model = msgspec.structs.replace
    assert encode_manifest(manifest(model=model(manifest().model, generation_defaults=defaults))) == encode_manifest(
        manifest(model=model(manifest().model, generation_defaults=swapped))
    )


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("model", "vocab_size"), 0, r"\$.model.vocab_size"),
        (("model", "dtype"), "f7", r"\$.model.dtype"),
        (("model", "eos_token_ids"), [-1], r"\$.model.eos_token_ids"),
        (("ranges", "max_seq_len"), "long", r"\$.ranges.max_seq_len"),
        (("ranges", "max_seq_len"), -4, "ranges.max_seq_len is not positive"),
        (("targets",), {}, r"\$.targets"),
        (("provenance",), {"a": 1}, r"\$.provenance"),
        (("schema",), 7, "schema 7, not 2"),
    ],
)
def test_damaged_field_is_named(where: tuple[str, ...], value: Any, message: str) -> None:
    document = msgspec.json.decode(encode_manifest(manifest()))
    inner = document
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(EngineFormatError, match=message):
        decode_manifest(msgspec.json.encode(document))


def test_target_by_key() -> None:
    assert manifest().target(KEY).sku == "x86-64-v3"
    with pytest.raises(EngineFormatError, match=f"no target 'gpu'; it has: {KEY}"):
        manifest().target("gpu")
    twice = manifest(targets=manifest().targets * 2)
    with pytest.raises(EngineFormatError, match="occurs twice"):
        decode_manifest(encode_manifest(twice))


def test_three_skus_cost_less_than_two_percent() -> None:
    """The shapes of a 135M model with 30 layers, three code objects of 200 KB that do not compress, long plans."""
    specs = [TensorSpec("embed", DType.BF16, (49152, 576), "panel16")]
    for layer in range(30):
        shapes = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
        specs += [TensorSpec(f"layers.{layer}.{n}", DType.BF16, shape, "panel16") for n, shape in shapes.items()]
        specs += [TensorSpec(f"layers.{layer}.norm{i}", DType.F32, (576,)) for i in (1, 2)]
    long_plan = msgspec.structs.replace(plan(), launches=plan().launches * 400)
    sections = {}
    for sku in ("x86-64-v3", "x86-64-v4", "sapphirerapids"):
        sections[f"plan/{sku}"] = encode_plan(long_plan)
        sections[f"code/{sku}"] = np.random.default_rng(0).bytes(200_000)
    size = EngineWriter("unwritten", manifest(), specs, sections, {"golden": 16384}).file_size
    weights = sum(spec.nbytes for spec in specs if spec.dtype is DType.BF16)
    assert 0.995 < weights / 269e6 < 1.005
    assert size < 1.02 * weights
