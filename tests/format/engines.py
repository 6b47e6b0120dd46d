"""Small engines for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pelton.runtime.format.container import EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.manifest import SCHEMA, Manifest, ModelInfo, TargetEntry
from pelton.runtime.format.plan import (
    Buffer,
    KernelSpec,
    KVGroup,
    Launch,
    Operand,
    Plan,
    Ranges,
    StateSpec,
    WeightRef,
    encode_plan,
)
from pelton.runtime.format.weight_eval import pack

KEY = "cpu:x86-64-v3"
RANGES = Ranges(
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=64,
    opt_num_tokens=8,
    max_logits_rows=32,
    logits_chunk=4,
    tokens_per_block=16,
    max_logprobs=5,
)
SPECS = (
    TensorSpec("embed", DType.BF16, (40, 7), "panel16"),
    TensorSpec("norm", DType.F32, (7,)),
    TensorSpec("empty", DType.F16, (0, 3)),
    TensorSpec("scalar", DType.F32, ()),
    TensorSpec("table", DType.I32, (3, 5)),
    TensorSpec("big", DType.U8, (1 << 20, 2)),
)
GOLDEN = b'{"golden":1}'


def manifest(**changes: Any) -> Manifest:
    """A plausible manifest."""
    model = ModelInfo(
        architecture="LlamaForCausalLM",
        name="tiny",
        vocab_size=40,
        hidden_size=7,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        dtype=DType.BF16,
        eos_token_ids=(2,),
        bos_token_id=1,
        pad_token_id=None,
        generation_defaults={"temperature": 0.7, "top_k": 50, "do_sample": True},
    )
    target = TargetEntry(
        key=KEY, kind="cpu", sku="x86-64-v3", features=("avx2", "fma"), rank=1, compiler="g++ 12", flags=("-O3",)
    )
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "pelton_version": "1.2.3",
        "model": model,
        "ranges": RANGES,
        "targets": (target,),
        "provenance": {"checkpoint_hash": "abc"},
        "notes": ("a note",),
    }
    return Manifest(**(fields | changes))


def plan() -> Plan:
    """A plan that refers to every table once."""
    return Plan(
        ranges=RANGES,
        kv_groups=(KVGroup(name="full", window=None),),
        states=(StateSpec(name="kv0", kind="paged_kv", dtype=DType.BF16, shape=(1, 16)),),
        weights=(WeightRef(name="embed", dtype=DType.BF16, shape=(40, 7), layout="panel16"),),
        buffers=(Buffer(name="x", dtype=DType.F32, shape=("T", 7), offset=64, nbytes=896),),
        arena_bytes=960,
        kernels=(
            KernelSpec(
                symbol="k0", kernel="cpu.embed", op="Embedding", attributes={}, input_types=("i32[T]",), output_types=()
            ),
        ),
        launches=(
            Launch(
                kernel=0,
                inputs=(Operand("input", 0), Operand("weight", 0)),
                outputs=(Operand("buffer", 0),),
                states=(Operand("state", 0),),
                origin="model.embed",
            ),
        ),
        tail_start=1,
        vocab_size=40,
    )


def sections() -> dict[str, bytes]:
    """A deflated, an incompressible and an empty section, a plan and code."""
    noise = np.random.default_rng(1).bytes(5000)
    return {
        f"plan/{KEY}": encode_plan(plan()),
        f"code/{KEY}": b"\x7fELF" + noise,
        "tokenizer": b"tokenizer " * 500,
        "report": b"{}",
        "nothing": b"",
    }


def storage() -> dict[str, np.ndarray[Any, Any]]:
    """The storage array of every tensor in SPECS."""
    generator = np.random.default_rng(0)
    arrays = {}
    for spec in SPECS:
        values = generator.integers(0, 100, spec.shape).astype(spec.dtype.numpy)
        arrays[spec.name] = pack(np.asarray(values), spec.layout)
    return arrays


def write(path: Path, **changes: Any) -> Path:
    """Write a complete engine; ``changes`` are fields of the manifest."""
    arrays = storage()
    with EngineWriter(path, manifest(**changes), SPECS, sections(), {"golden": 100}) as writer:
        for spec in SPECS:
            writer.write_tensor(spec.name, [arrays[spec.name]])
        writer.fill("golden", GOLDEN)
    return path
