"""Which matrices are packed into 12 bits: those that every reader takes, and whose values fit."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from pelton.builder.graph import Graph, Node
from pelton.builder.ops.fused import Embedding, Gemm
from pelton.builder.passes import pack_weights
from pelton.builder.passes.differential import RandomSource
from pelton.builder.passes.pipeline import PassOptions, optimize
from pelton.builder.verifier import verify
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.format.weight_eval import expr_type
from pelton.runtime.format.weight_expr import Pack, Source
from tests.builder.tiny_engines import RANGES, imported, tiny_checkpoint

BF16, F16, F32 = DType.BF16, DType.F16, DType.F32


def everything(node: Node, types: Sequence[TensorType]) -> bool:
    return True


def layouts(graph: Graph) -> dict[str, str]:
    """Of each matrix, by name."""
    return {value.name: value.type.layout for value in graph.weights if value.type.rank == 2}


def graph_layers(graph: Graph) -> int:
    return sum("down_proj" in name for name in layouts(graph))


def optimized(dtype: DType = BF16) -> Graph:
    return optimize(imported("llama", kv_heads=2, tie_word_embeddings=True), PassOptions(dtype, RANGES))


class OneOddWeight(RandomSource):
    """Random weights, but those of one tensor are any bits at all."""

    def read(self, name: str) -> np.ndarray:
        data = super().read(name)
        if name.endswith("down_proj.weight"):
            patterns = np.random.default_rng(0).integers(0, 1 << 15, data.shape, np.uint16)
            return np.nan_to_num(patterns.view(ml_dtypes.bfloat16).astype(np.float32)).astype(data.dtype)
        return data


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_matrices_are_packed_and_nothing_else_changes(family: str) -> None:
    source = tiny_checkpoint(family, kv_heads=2, tie_word_embeddings=True).source
    options = PassOptions(BF16, RANGES, verify=True, source=source, reads=everything)
    graph = optimize(imported(family, kv_heads=2, tie_word_embeddings=True), options)
    assert set(layouts(graph).values()) == {"packed12"}
    assert all(value.type == expr_type(expr) for value, expr in graph.weights.items())


@pytest.mark.parametrize("dtype", [F16, F32])
def test_other_types_stay(dtype: DType) -> None:
    graph = optimized(dtype)
    pack_weights.apply(graph, RandomSource(graph), everything)
    assert set(layouts(graph).values()) == {"panel16"}


def test_all_readers_must_take_it() -> None:
    """The embedding and the head share a table: if one of them cannot read it, it stays as it is."""
    graph = optimized()
    tied = next(node.inputs[1] for node in graph.nodes if isinstance(node.op, Embedding))
    asked: list[tuple[Node, TensorType]] = []

    def no_embedding(node: Node, types: Sequence[TensorType]) -> bool:
        asked.append((node, types[1]))
        return not isinstance(node.op, Embedding)

    pack_weights.apply(graph, RandomSource(graph), no_embedding)
    verify(graph)
    assert tied.type.layout == "panel16"
    assert {layout for name, layout in layouts(graph).items() if name != tied.name} == {"packed12"}
    assert {type_.layout for _, type_ in asked} == {"packed12"}


def test_values_that_do_not_fit_stay_and_the_report_says_so() -> None:
    graph = optimized()
    pack_weights.apply(graph, RandomSource(graph), everything)
    assert pack_weights.note(graph) is None
    graph = optimized()
    pack_weights.apply(graph, OneOddWeight(graph), everything)
    count = len(layouts(graph))
    assert f"{graph_layers(graph)} of {count} matrices stay in 16 bits" in (pack_weights.note(graph) or "")
    stayed = {name for name, layout in layouts(graph).items() if layout == "panel16"}
    assert stayed == {name for name in layouts(graph) if "down_proj" in name}
    assert stayed


@pytest.mark.parametrize(
    ("n", "k", "layout"),
    [(16, 512, "panel16"), (48, 512, "panel16"), (64, 8, "panel16"), (64, 512, "packed12"), (80, 512, "packed12")],
)
def test_what_would_not_be_smaller_stays(n: int, k: int, layout: str) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(BF16, ("T", k)))
    source = Source("w", (n, k), BF16)
    weight = graph.add_weight("w", TensorType(BF16, (n, k), "panel16"), Pack(source, "panel16"))
    graph.outputs = graph.append(Gemm(n, BF16, F32), [x, weight])
    pack_weights.apply(graph, RandomSource(graph), everything)
    assert weight.type.layout == layout


def test_nothing_is_packed_blindly() -> None:
    graph = optimized()
    pack_weights.apply(graph, None, everything)
    pack_weights.apply(graph, RandomSource(graph), None)
    assert set(layouts(graph).values()) == {"panel16"}
