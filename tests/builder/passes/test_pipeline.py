"""The whole pipeline: differential tests on every family, dumps, and errors that name the pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pelton.builder.graph import Graph
from pelton.builder.ops.fused import Gemm
from pelton.builder.passes import pipeline, precision
from pelton.builder.passes.differential import DifferentialTest, RandomSource, random_steps
from pelton.builder.passes.pipeline import PASSES, Pass, PassOptions, optimize
from pelton.builder.passes.precision import in_dtype
from pelton.builder.text_parser import parse_graph
from pelton.builder.verifier import verify
from pelton.runtime.errors import BuildError, GraphError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.weight_expr import AddScalar, CastTo, Interleave, Pack, Permute, Reshaped, Source, Stack
from tests.builder.passes.rewrites import check
from tests.builder.snippets import snippet
from tests.builder.tiny_engines import RANGES, imported, tiny_checkpoint
from tests.models import FAMILIES

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pass_keeps_the_meaning(family: str, dtype: DType) -> None:
    optimize(imported(family, kv_heads=2), PassOptions(dtype, RANGES, verify=True))


def test_verify_takes_real_weights() -> None:
    source = tiny_checkpoint("qwen2", kv_heads=2).source
    optimize(imported("qwen2", kv_heads=2), PassOptions(F16, RANGES, verify=True, source=source))


def test_a_pipeline_has_unique_names_and_all_passes() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names)
    files = {p.stem for p in Path(pipeline.__file__).parent.glob("*.py")}
    helpers = {"__init__", "pipeline", "rewriting", "match", "names", "differential"}
    reused = {"canonicalise_views", "canonicalise_attention", "fold_views", "fold_tables", "common_weights"}
    assert files - helpers == set(names) - reused


def broken(monkeypatch: pytest.MonkeyPatch, after: str, damage: object) -> PassOptions:
    """A pipeline with one more pass, which does harm."""
    at = next(i for i, p in enumerate(PASSES) if p.name == after) + 1
    extra = Pass("sabotage", damage)  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline, "PASSES", (*PASSES[:at], extra, *PASSES[at:]))
    return PassOptions(F32, RANGES, verify=True)


def test_a_wrong_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def double_a_gemm(graph: Graph, options: PassOptions) -> int:
        node = next(n for n in graph.nodes if isinstance(n.op, Gemm) and n.op.residual)
        node.op = replace(node.op, scale=1.01)  # type: ignore[call-arg]
        return 1

    options = broken(monkeypatch, "gemm_epilogue", double_a_gemm)
    with pytest.raises(GraphError, match=r"pass sabotage: logits differ from before the pass by .*e-0"):
        optimize(imported("llama", kv_heads=2), options)
    optimize(imported("llama", kv_heads=2), replace(options, verify=False))  # the verifier alone cannot see it


def test_an_invalid_graph_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(graph: Graph, options: PassOptions) -> int:
        graph.nodes.reverse()
        return 1

    options = replace(broken(monkeypatch, "rope", reverse), verify=False)
    with pytest.raises(GraphError, match=r"pass sabotage: the graph breaks \d+ invariants"):
        optimize(imported("llama", kv_heads=2), options)


def test_nan_logits_are_noticed() -> None:
    graph = imported("llama", kv_heads=2)
    test = DifferentialTest(graph, RANGES, None)
    test.expected[3, 3] = np.nan
    with pytest.raises(GraphError, match="nan"):
        test.check(graph, F32)


def test_dump_ir(tmp_path: Path) -> None:
    optimize(imported("qwen3", kv_heads=2), PassOptions(BF16, RANGES, dump_ir=tmp_path / "ir"))
    files = sorted((tmp_path / "ir").iterdir())
    assert [f.name for f in files] == ["00-imported.txt"] + [f"{i:02d}-{p.name}.txt" for i, p in enumerate(PASSES, 1)]
    for file in files:
        verify(parse_graph(file.read_text()))


def test_dump_ir_to_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="--dump-ir"):
        optimize(imported("llama", kv_heads=2), PassOptions(BF16, RANGES, dump_ir=tmp_path / "file"))


def test_two_outputs_are_refused() -> None:
    graph = imported("llama", kv_heads=2)
    graph.outputs *= 2
    with pytest.raises(GraphError, match="pass gather_rows: a model has one output"):
        optimize(graph, PassOptions(F32, RANGES))


def test_random_steps_fit_small_ranges() -> None:
    short = msgspec.structs.replace(RANGES, max_seq_len=4)
    for step in random_steps(50, 1, short):
        assert step.positions.max() < 4
        assert step.block_tables[0].shape[1] == short.max_blocks_per_seq


# precision

SOURCE = Source("w", (4, 6), BF16)
WIDE = CastTo(SOURCE, F32)


@pytest.mark.parametrize(
    ("expr", "dtype", "expected"),
    [
        (WIDE, BF16, SOURCE),
        (WIDE, F32, WIDE),
        (WIDE, F16, CastTo(SOURCE, F16)),
        (Source("w", (4, 6), F32), F32, Source("w", (4, 6), F32)),
        (Pack(Stack((WIDE, WIDE)), "panel16"), BF16, Pack(Stack((SOURCE, SOURCE)), "panel16")),
        (Interleave((WIDE, WIDE), 16), BF16, Interleave((SOURCE, SOURCE), 16)),
        (Permute(Reshaped(WIDE, (6, 4)), (1, 0)), BF16, Permute(Reshaped(SOURCE, (6, 4)), (1, 0))),
        (AddScalar(WIDE, 1.0), BF16, CastTo(AddScalar(WIDE, 1.0), BF16)),
        (CastTo(CastTo(SOURCE, F16), F32), BF16, CastTo(CastTo(SOURCE, F16), BF16)),  # a rounding stays
    ],
)
def test_weights_in_dtype(expr: object, dtype: DType, expected: object) -> None:
    assert in_dtype(expr, dtype) == expected  # type: ignore[arg-type]


GEMM = (
    '{"out_features": OUT, "compute": "COMPUTE", "dtype": "DTYPE", "prologue": "none", "eps": 0.0, "bias": false,'
    ' "activation": "none", "gated": false, "softcap": null, "scale": 1.0, "residual": RES}'
)


def gemm(out: int, compute: str, dtype: str, residual: str = "false") -> str:
    text = GEMM.replace("OUT", str(out)).replace("COMPUTE", compute).replace("DTYPE", dtype)
    return text.replace("RES", residual)


def test_precision() -> None:
    """What feeds a GEMM is stored rounded; what is also a residual stays fp32."""
    text = """
    weight %e: {W}[40,8] = {E}
    weight %w: {W}[8,8]@panel16 = {P}
    weight %n: f32[8] = source("n", f32[8])
    %x: f32[T,8] = embedding(%token_ids, %e) {{"dtype": "f32", "scale": 1.0}}
    %i: {H}[T,8] = rms_norm(%x, %n) {{"eps": 0.5, "dtype": "{H}", "residual": false}}
    %a: {H}[T,8] = gemm(%i, %w) {A}
    %b: f32[T,8] = gemm(%a, %w, %x) {B}
    %c: f32[T,8] = gemm(%b, %w, %b) {B}
    output %c
    """
    before = text.format(
        W="f32",
        H="f32",
        E='source("e", f32[40,8])',
        P='pack(source("w", f32[8,8]), panel16)',
        A=gemm(8, "f32", "f32"),
        B=gemm(8, "f32", "f32", "true"),
    )
    expected = text.format(
        W="bf16",
        H="bf16",
        E='cast(source("e", f32[40,8]), bf16)',
        P='pack(cast(source("w", f32[8,8]), bf16), panel16)',
        A=gemm(8, "bf16", "bf16"),
        B=gemm(8, "bf16", "f32", "true"),
    )
    check(lambda g: precision.apply(g, BF16), before, expected, bound=2e-2)


def test_a_table_with_other_readers_is_copied() -> None:
    graph = snippet(
        """
        weight %e: f32[40,8] = source("e", f32[40,8])
        %x: f32[T,8] = embedding(%token_ids, %e) {"dtype": "f32", "scale": 1.0}
        %s: f32[40,1] = slice(%e) {"axis": 1, "start": 0, "stop": 1, "step": 1}
        output %x
        output %s"""
    )
    source = RandomSource(graph)
    precision.apply(graph, BF16)
    verify(graph)
    assert [(v.name, str(v.type)) for v in graph.weights] == [("e", "f32[40,8]"), ("e.2", "bf16[40,8]")]
    assert source.names() == ["e"]
