"""Row locality: what mixes tokens of different sequences is found, what does not is let through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pelton.builder.graph import Graph, Value
from pelton.builder.importer import import_graph
from pelton.builder.locality import verify_locality
from pelton.builder.ops.base import Op
from pelton.builder.ops.elementwise import Binary, Cast, Unary
from pelton.builder.ops.fused import Embedding, GatherRows
from pelton.builder.ops.generic import (
    Attention,
    Concat,
    Expand,
    Gather,
    Linear,
    MatMul,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    Transpose,
)
from pelton.builder.trace import trace
from pelton.runtime.errors import UnsupportedModelError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.format.weight_expr import Source
from tests.builder.test_trace import untrained


class Build:
    """A graph under construction: embedded tokens x [1,T,8], positions p f32[1,T,1], a weight w [8,8]."""

    def __init__(self) -> None:
        self.graph = Graph()
        tokens = self.graph.add_input("token_ids", TensorType(DType.I32, ("T",)))
        positions = self.graph.add_input("positions", TensorType(DType.I32, ("T",)))
        table = self.weight("table", 20, 8)
        self.w = self.weight("w", 8, 8)
        self.x = self.emit(Embedding(dtype=DType.F32), self.emit(Reshape((1, "T")), tokens), table)
        self.p = self.emit(Cast(DType.F32), self.emit(Reshape((1, "T", 1)), positions))

    def weight(self, name: str, *shape: int) -> Value:
        return self.graph.add_weight(name, TensorType(DType.F32, shape), Source(name, shape, DType.F32))

    def emit(self, op: Op, *inputs: Value) -> Value:
        return self.graph.append(op, inputs, "model.layers.0")[0]

    def check(self, value: Value) -> None:
        """Verify the graph whose output is ``value`` plus the positions."""
        self.graph.outputs = [self.emit(Binary("add"), self.x, self.p), value]
        verify_locality(self.graph)


def heads(b: Build) -> Value:
    return b.emit(Transpose((0, 2, 1, 3)), b.emit(Reshape((1, "T", 2, 4)), b.x))


LOCAL: dict[str, Callable[[Build], Value]] = {
    "linear": lambda b: b.emit(Linear(), b.x, b.w),
    "norm": lambda b: b.emit(Binary("mul"), b.x, b.emit(Unary("rsqrt"), b.emit(Reduce("mean", (2,), True), b.x))),
    "heads": heads,
    "softmax over features": lambda b: b.emit(Softmax(2), b.x),
    "slice of features": lambda b: b.emit(Slice(2, 0, 4), b.x),
    "concat of features": lambda b: b.emit(Concat(2), b.x, b.x),
    "positions looked up": lambda b: b.emit(Gather(0), b.w, b.graph.inputs[1]),
    "product per token": lambda b: b.emit(
        MatMul(), b.emit(Reshape(("T", 2, 4)), b.x), b.emit(Reshape(("T", 4, 2)), b.x)
    ),
    "expand": lambda b: b.emit(Expand((3, "T", 8)), b.x),
    "attention": lambda b: b.emit(Attention(0, "causal", None, 1.0), heads(b), heads(b), heads(b)),
    "unit axes": lambda b: b.emit(Reshape((1, 1, "T", 8)), b.x),
}

MIXING: dict[str, tuple[Callable[[Build], Value], str]] = {
    "reshape across": (lambda b: b.emit(Reshape((1, "T", 8)), heads(b)), "moves elements from one token to another"),
    "token to feature": (lambda b: b.emit(Reshape((8, "T")), b.x), "moves elements from one token to another"),
    "every pair": (
        lambda b: b.emit(Binary("add"), b.p, b.emit(Transpose((0, 2, 1)), b.p)),
        "two token axes",
    ),
    "token features": (
        lambda b: b.emit(MatMul(), b.x, b.emit(Transpose((0, 2, 1)), b.x)),
        "two token axes",
    ),
    "lookup among tokens": (
        lambda b: b.emit(Attention(0, "causal", None, 1.0), *[b.emit(Reshape((1, "T", 1, 8)), b.x)] * 3),
        "token axis is not where",
    ),
    "unknown op": (lambda b: b.emit(GatherRows(), b.emit(Reshape(("T", 8)), b.x)), "no row locality rule"),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_graphs_pass(name: str) -> None:
    build = Build()
    build.check(LOCAL[name](build))


@pytest.mark.parametrize("name", MIXING)
def test_mixing_graphs_are_refused_with_place_and_shapes(name: str) -> None:
    make, reason = MIXING[name]
    build = Build()
    if name == "lookup among tokens":
        # A token axis in the place of heads: infer lets a graph of one head through only with T third.
        build.graph.nodes.clear()
        build = Build()
        wrong = build.graph.make_node(Attention(0, "causal", None, 1.0), [heads(build)] * 3, "model.layers.0")
        wrong.inputs = [build.emit(Reshape((1, "T", 2, 4)), build.x)] * 3
        build.graph.nodes.append(wrong)
        value = wrong.outputs[0]
    else:
        value = make(build)
    with pytest.raises(UnsupportedModelError, match=rf"model.layers.0: \w+\(.*T.*\): .*{reason}.*adapter"):
        build.check(value)


@pytest.mark.parametrize(
    "op, axis_ops",
    [
        (Reduce("sum", (1,), True), 1),
        (Softmax(1), 1),
        (Slice(1, 0, 1), 1),
        (Concat(1), 2),
        (Gather(1), 0),
    ],
)
def test_work_along_the_token_axis_is_refused(op: Op, axis_ops: int) -> None:
    """These have no type along T, so the rules are shown a node whose operand was swapped afterwards."""
    build = Build()
    constant = build.graph.add_constant(np.ones((1, 3, 8), np.float32), TensorType(DType.F32, (1, 3, 8)))
    index = build.graph.add_constant(np.zeros(2, np.int32), TensorType(DType.I32, (2,)))
    operands = [constant] * axis_ops if axis_ops else [constant, index]
    node = build.graph.make_node(op, operands, "model.layers.0")
    node.inputs[0] = build.x
    build.graph.nodes.append(node)
    with pytest.raises(UnsupportedModelError, match="model.layers.0: .*token|tokens"):
        build.check(node.outputs[0])


def test_contraction_over_tokens_is_refused() -> None:
    build = Build()
    left = build.graph.add_constant(np.ones((1, 8, 3), np.float32), TensorType(DType.F32, (1, 8, 3)))
    right = build.graph.add_constant(np.ones((1, 3, 8), np.float32), TensorType(DType.F32, (1, 3, 8)))
    node = build.graph.make_node(MatMul(), [left, right], "model.layers.0")
    node.inputs = [build.emit(Transpose((0, 2, 1)), build.x), build.x]
    build.graph.nodes.append(node)
    with pytest.raises(UnsupportedModelError, match="contracts over the token axis"):
        build.check(node.outputs[0])


def test_positions_must_be_live() -> None:
    build = Build()
    build.graph.outputs = [build.emit(Linear(), build.x, build.w)]
    with pytest.raises(UnsupportedModelError, match="do not depend on position_ids"):
        verify_locality(build.graph)


@pytest.mark.parametrize(
    "model_type, settings, reason",
    [
        ("bloom", {"n_head": 4}, "attention"),
        ("bart", {"d_model": 32, "is_encoder_decoder": False}, "counts the tokens|encoder-decoder"),
        ("bert", {"intermediate_size": 32}, "not causal"),
        ("roberta", {"intermediate_size": 32, "is_decoder": True}, "token|position|cumsum|not understood"),
    ],
)
def test_models_that_break_packing_are_refused(
    model_type: str, settings: dict[str, int | bool], reason: str, tmp_path: Path
) -> None:
    checkpoint = untrained(model_type, tmp_path / "m", **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        import_graph(trace(checkpoint, max_seq_len=32), checkpoint)


def test_absolute_positions_looked_up_in_a_table_are_local(tmp_path: Path) -> None:
    checkpoint = untrained("gpt2", tmp_path / "m", n_head=4, n_positions=64)
    graph = import_graph(trace(checkpoint, max_seq_len=32), checkpoint)
    verify_locality(graph)
    assert sum(isinstance(node.op, Embedding) for node in graph.nodes) == 2
