"""Lowering: kernels shared by layers, views that launch nothing, phases, the tail, names, refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from pelton.builder.graph import Graph
from pelton.builder.kernels import KernelCall, KernelRegistry
from pelton.builder.lower import Lowered, lower
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Gemm
from pelton.builder.oracle.kernels import REFERENCE_KERNELS, ReferenceKernel
from pelton.builder.oracle.reference import ReferenceDriver
from pelton.builder.passes import gather_rows, split_attention, step_edges
from pelton.builder.passes.differential import RandomSource
from pelton.builder.passes.pipeline import PassOptions, optimize
from pelton.builder.passes.rewriting import drop_unused
from pelton.builder.target import CPU_SKUS, Target
from pelton.builder.verifier import verify
from pelton.runtime.errors import BuildError, NoKernelError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import encode_plan
from pelton.runtime.format.weight_eval import evaluate
from tests.builder.feeder import Feeder
from tests.builder.snippets import snippet
from tests.builder.tiny_engines import RANGES, imported, tiny_checkpoint, tiny_engine
from tests.models import FAMILIES, reference_logits

REFERENCE = KernelRegistry(REFERENCE_KERNELS)


def lowered(family: str, kv_heads: int | str = 2, **settings: object) -> Lowered:
    graph = optimize(imported(family, kv_heads=kv_heads, **settings), PassOptions(DType.BF16, RANGES))
    return lower(graph, Target("reference"), REFERENCE, RANGES)


def test_equal_layers_share_kernels() -> None:
    two, four = lowered("llama"), lowered("llama", num_hidden_layers=4)
    assert len(two.plan.kernels) == len(four.plan.kernels) == 16  # the last layer's products are of picked rows
    assert len(four.plan.launches) - len(two.plan.launches) == 2 * 6
    per_layer = Counter(four.plan.kernels[launch.kernel].op for launch in four.plan.launches)
    assert per_layer["qkv_rope_write"] == per_layer["paged_attention"] == 4
    assert per_layer["gemm"] == 4 * 4 + 1
    states = [launch.states[0].index for launch in four.plan.launches if launch.states]
    assert states == [4, 0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("kv_heads", [1, 2, "all"])
def test_every_family_is_fully_fused(kv_heads: int | str) -> None:
    """What a Llama-like model may launch; anything else is a pattern that a pass should have taken."""
    fused = {"resolve_tokens", "rope_table", "embedding", "gemm", "qkv_rope_write", "paged_attention"}
    norms_after_blocks = {"gemma2": 4, "gemma3": 4}
    for family in FAMILIES:
        plan = lowered(family, kv_heads).plan
        norms, tables = norms_after_blocks.get(family, 0), 2 if family == "gemma3" else 1
        assert {k.op for k in plan.kernels} - {"rms_norm"} == fused | {"gather_rows", "sample"}, family
        assert sum(plan.kernels[launch.kernel].op == "rms_norm" for launch in plan.launches) == norms, family
        assert len(plan.launches) == 2 + tables + 2 * 6 + norms + 4, family


def test_symbols_do_not_depend_on_the_model() -> None:
    two, four = lowered("llama"), lowered("llama", num_hidden_layers=4)
    assert [k.symbol for k in two.plan.kernels] == [k.symbol for k in four.plan.kernels]
    assert all(k.symbol.isidentifier() for k in two.plan.kernels)


def test_same_build_same_bytes() -> None:
    assert encode_plan(lowered("qwen3").plan) == encode_plan(lowered("qwen3").plan)


def test_phases_and_tail() -> None:
    plan = lowered("llama").plan
    ops = [plan.kernels[launch.kernel].op for launch in plan.launches]
    assert ops[:3] == ["resolve_tokens", "rope_table", "embedding"]
    assert ops[plan.tail_start :] == ["gather_rows", "gather_rows", "gemm", "gemm", "gemm", "gemm", "sample"]
    assert [launch.barrier for launch in plan.launches[:3]] == [False, True, True]
    # The two gathers do not need each other.
    assert [i for i, launch in enumerate(plan.launches[2:], 2) if not launch.barrier] == [plan.tail_start]


def test_names_and_tensors() -> None:
    engine = tiny_engine("qwen2", DType.BF16, kv_heads=2)
    specs = {spec.name: spec for spec, _ in engine.lowered.tensors}
    assert list(specs) == [w.name for w in engine.lowered.plan.weights]
    assert {
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.input_layernorm",
        "model.norm",
        "lm_head",
    } < set(specs)
    for spec, _ in engine.lowered.tensors:
        assert engine.tensors[spec.name].nbytes == spec.nbytes
    assert specs["model.layers.0.mlp.gate_up_proj"].type.layout == "panel16"
    assert specs["model.layers.0.input_layernorm"].dtype is DType.F32
    assert specs["model.embed_tokens"].layout == "rows"
    assert specs["model.embed_tokens"].dtype is DType.BF16


def test_windows_give_kernels_their_group() -> None:
    low = lowered("mistral")
    assert [(g.name, g.window) for g in low.plan.kv_groups] == [("window12", 12)]
    attention = [call for _, _, call in low.emitted if call.op.name == "paged_attention"]
    assert [(call.kv_group, call.states, call.op.state) for call in attention] == [(0, ("kv",), "")]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class CpuStandIn:
    """Takes any call on a CPU and wants scratch."""

    op: type[Op]
    generic: bool = False

    @property
    def name(self) -> str:
        return f"cpu.{self.op.name}"

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        return None if target.kind == "cpu" else "not a CPU"

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        return 1000 if isinstance(call.op, Gemm) else 0

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        return f"// {symbol}"


def test_cpu_targets_get_their_kv_layout_and_scratch() -> None:
    graph = optimize(imported("llama", kv_heads=2), PassOptions(DType.BF16, RANGES))
    target = Target("cpu", CPU_SKUS["x86-64-v3"])
    registry = KernelRegistry([*REFERENCE_KERNELS, *(CpuStandIn(k.op) for k in REFERENCE_KERNELS)])
    plan = lower(graph, target, registry, RANGES).plan
    assert {s.layout for s in plan.states if s.kind == "paged_kv"} == {"kv16"}
    gemms = [launch for launch in plan.launches if plan.kernels[launch.kernel].op == "gemm"]
    assert all(plan.buffers[launch.scratch].nbytes == 1000 for launch in gemms)
    assert [launch.scratch for launch in plan.launches if launch not in gemms] == [-1] * 10
    reference = lower(graph, Target("reference"), registry, RANGES).plan
    assert reference.weights == plan.weights
    assert {s.layout for s in reference.states} == {"rows"}


def test_missing_kernels_name_the_node() -> None:
    graph = optimize(imported("llama", kv_heads=2), PassOptions(DType.BF16, RANGES))
    target = Target("cpu", CPU_SKUS["x86-64-v3"])
    with pytest.raises(NoKernelError, match=r"resolve_tokens \(from no module\).*\n.*reference target only"):
        lower(graph, target, REFERENCE, RANGES)
    registry = KernelRegistry(k for k in REFERENCE_KERNELS if k.op is not Gemm)
    with pytest.raises(
        NoKernelError, match=r"gemm \(from model.layers.0.self_attn.qkv_proj\)(.|\n)*no kernel implements this op"
    ):
        lower(graph, Target("reference"), registry, RANGES)
    with pytest.raises(BuildError, match="no code"):
        ReferenceKernel(Gemm).emit(None, target, "x")  # type: ignore[arg-type]


def generic(graph: Graph) -> Graph:
    """Only what a step cannot do without: no pattern is recognised."""
    split_attention.apply(graph)
    gather_rows.apply(graph)
    step_edges.apply(graph, RANGES)
    drop_unused(graph)
    verify(graph)
    return graph


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_unrecognised_patterns_still_run(family: str) -> None:
    graph = generic(imported(family, kv_heads=2))
    low = lower(graph, Target("reference"), REFERENCE, RANGES)
    ops = {k.op for k in low.plan.kernels}
    assert {"linear", "binary", "reduce", "unary", "transpose", "slice", "concat", "kv_write"} <= ops
    assert "reshape" not in ops
    checkpoint = tiny_checkpoint(family, kv_heads=2)
    tensors = {spec.name: o if isinstance(o, np.ndarray) else evaluate(o, checkpoint.source) for spec, o in low.tensors}
    prompt = [7, 250, 31, 31, 90, 12, 200, 5, 77]
    feeder = Feeder(ReferenceDriver(low.plan, tensors.__getitem__))
    parts = [*feeder.feed((0, prompt[:4]), (1, [9, 9])), feeder.feed((0, prompt[4:]))[0]]
    expected = reference_logits(checkpoint.path, prompt)
    error = np.max(np.abs(np.concatenate([parts[0], parts[2]]) - expected)) / np.max(np.abs(expected))
    assert error < 1e-4


def test_views_of_everything_launch_nothing() -> None:
    """Views of inputs, weights, constants and values: only the arithmetic is launched."""
    graph = snippet(
        """
        weight %w: f32[40,8] = source("w", f32[40,8])
        weight %b: f32[8] = source("b", f32[8])
        constant %c: f32[2,4] = [1, 2, 3, 4, 5, 6, 7, 8]
        %i: i32[1,T] = reshape(%token_ids) {"shape": [1, "T"]}
        %j: i32[T] = reshape(%i) {"shape": ["T"]}
        %x: f32[T,8] = embedding(%j, %w) {"dtype": "f32", "scale": 1.0}
        %c8: f32[8] = reshape(%c) {"shape": [8]}
        %b2: f32[1,8] = reshape(%b) {"shape": [1, 8]}
        %y: f32[T,8] = binary(%x, %c8) {"kind": "mul"}
        %z: f32[T,8] = binary(%y, %b2) {"kind": "add"}
        %h: f32[T,2,4] = reshape(%z) {"shape": ["T", 2, 4]}
        %k: f32[1,T,8] = reshape(%h) {"shape": [1, "T", 8]}
        output %k"""
    )
    source = RandomSource(graph)
    gather_rows.apply(graph)
    step_edges.apply(graph, RANGES)
    drop_unused(graph)
    low = lower(graph, Target("reference"), REFERENCE, RANGES)
    ops = [low.plan.kernels[launch.kernel].op for launch in low.plan.launches]
    assert sorted(ops) == sorted(["resolve_tokens", "embedding", "binary", "binary", "gather_rows", "sample"])
    tensors = {s.name: o if isinstance(o, np.ndarray) else evaluate(o, source) for s, o in low.tensors}
    assert set(tensors) == {"w", "b", "constants.c"}
    feeder = Feeder(ReferenceDriver(low.plan, tensors.__getitem__))
    (logits,) = feeder.feed((0, [1, 5, 7]))
    expected = source.read("w")[[1, 5, 7]] * np.arange(1, 9, dtype=np.float32) + source.read("b")
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
