"""Each invariant of the verifier is broken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pelton.builder.graph import Graph, Value
from pelton.builder.ops.elementwise import Unary
from pelton.builder.passes.pipeline import PassOptions, optimize
from pelton.builder.text import print_graph
from pelton.builder.text_parser import parse_graph
from pelton.builder.verifier import INVARIANTS, verify
from pelton.runtime.errors import GraphError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import KVGroup
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.format.weight_expr import Permute, Source
from tests.builder.tiny_engines import RANGES, imported

TEXT = print_graph(optimize(imported("llama", num_hidden_layers=1), PassOptions(DType.BF16, RANGES)))


def node(graph: Graph, name: str) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n.op.name == name)


def swap_inputs(g: Graph) -> None:
    g.inputs[0].type = TensorType(DType.I64, ("T",))


def same_name(g: Graph) -> None:
    g.nodes[3].outputs[0].name = g.nodes[2].outputs[0].name


def lost_producer(g: Graph) -> None:
    g.nodes[2].outputs[0].node = None


def wrong_kind(g: Graph) -> None:
    next(iter(g.weights)).kind = "constant"


def late_definition(g: Graph) -> None:
    g.nodes[2], g.nodes[3] = g.nodes[3], g.nodes[2]


def foreign_value(g: Graph) -> None:
    g.nodes[2].inputs[0] = Value("stranger", TensorType(DType.I32, ("T",)), "node")


def foreign_output(g: Graph) -> None:
    g.outputs = [Value("stranger", TensorType(DType.I32, ("T",)), "node")]


def no_output(g: Graph) -> None:
    g.outputs = []


def defined_twice(g: Graph) -> None:
    g.nodes.insert(3, g.nodes[2])


def wrong_result_type(g: Graph) -> None:
    value = g.nodes[node(g, "embedding")].outputs[0]
    value.type = TensorType(DType.BF16, value.type.shape)


def refused_operands(g: Graph) -> None:
    at = node(g, "gemm")
    g.nodes[at].inputs.pop()


def too_few_operands(g: Graph) -> None:
    at = node(g, "gather_rows")
    g.nodes[at].op = Unary("exp")
    g.nodes[at].inputs = []


def odd_dim(g: Graph) -> None:
    weight = next(iter(g.weights))
    weight.type = TensorType(weight.type.dtype, ("Q", -1))


def wrong_weight_type(g: Graph) -> None:
    weight = next(v for v in g.weights if v.type.rank == 1)
    g.weights[weight] = Source("x", (3,), DType.F32)


def impossible_weight(g: Graph) -> None:
    weight = next(v for v in g.weights if v.type.rank == 1)
    g.weights[weight] = Permute(Source("x", (3,), DType.F32), (1, 0))


def wrong_constant(g: Graph) -> None:
    g.constants[next(iter(g.constants))] = np.zeros(3, np.float64)


def symbolic_constant(g: Graph) -> None:
    constant = next(iter(g.constants))
    constant.type = TensorType(DType.F32, ("T",))


def missing_state(g: Graph) -> None:
    g.states = [s for s in g.states if s.name != "kv.0"]


def missing_history(g: Graph) -> None:
    g.states = [s for s in g.states if s.name != "history"]


def double_state(g: Graph) -> None:
    g.states.append(g.states[0])


def wrong_state_dtype(g: Graph) -> None:
    g.states[0] = msgspec.structs.replace(g.states[0], dtype=DType.F32)


def wrong_group(g: Graph) -> None:
    g.states[0] = msgspec.structs.replace(g.states[0], group=1)


def wrong_window(g: Graph) -> None:
    g.kv_groups = [KVGroup(name="window4", window=4)]


def second_write(g: Graph) -> None:
    at = node(g, "qkv_rope_write")
    g.nodes.insert(at + 1, g.make_node(g.nodes[at].op, g.nodes[at].inputs))


def read_without_token(g: Graph) -> None:
    write, read = node(g, "qkv_rope_write"), node(g, "paged_attention")
    other = g.make_node(g.nodes[write].op, g.nodes[write].inputs)
    other.op = replace(other.op, state="kv.1")  # type: ignore[call-arg]
    g.states.append(msgspec.structs.replace(g.states[0], name="kv.1"))
    g.nodes.insert(write, other)
    g.nodes[read + 1].inputs[1] = other.outputs[1]


def rows_too_early(g: Graph) -> None:
    value = g.nodes[node(g, "embedding")].outputs[0]
    value.type = TensorType(DType.F32, ("C", value.type.shape[1]))


def resolve_late(g: Graph) -> None:
    g.nodes[0], g.nodes[1] = g.nodes[1], g.nodes[0]


def sample_early(g: Graph) -> None:
    g.nodes.append(g.make_node(Unary("neg"), [g.nodes[-2].outputs[0]]))


BREAKS: list[tuple[str, Callable[[Graph], None], str]] = [
    ("inputs", swap_inputs, "token_ids i32"),
    ("unique names", same_name, "two values are named"),
    ("producers", lost_producer, "does not point back"),
    ("producers", wrong_kind, "listed as a weight"),
    ("definition before use", late_definition, "not defined before it"),
    ("definition before use", foreign_value, "%stranger"),
    ("definition before use", foreign_output, "output %stranger"),
    ("definition before use", no_output, "no outputs"),
    ("definition before use", defined_twice, "defined twice"),
    ("inferred types", wrong_result_type, r"embedding \(from model.embed_tokens\) has types"),
    ("inferred types", refused_operands, "gemm: takes 3 operands, got 2"),
    ("inferred types", too_few_operands, "unary: takes 1 operands, got 0"),
    ("dims", odd_dim, "impossible dim 'Q'"),
    ("weight types", wrong_weight_type, "its expression gives"),
    ("weight types", impossible_weight, "are not an order of"),
    ("constant types", wrong_constant, "its data is float64"),
    ("constant types", symbolic_constant, "constants have constant dims"),
    ("states", missing_state, "'kv.0', which does not exist"),
    ("states", missing_history, "'history', which does not exist"),
    ("states", double_state, "two states share a name"),
    ("states", wrong_state_dtype, "does not fit state"),
    ("states", wrong_group, "KV group 1; there are 1"),
    ("states", wrong_window, "has window None, its KV group has 4"),
    ("effects", second_write, "a second time"),
    ("effects", read_without_token, "without the token of its write"),
    ("tail", rows_too_early, "before any were gathered"),
    ("tail", resolve_late, "must be the first node"),
    ("tail", sample_early, "must be the last node"),
]


@pytest.mark.parametrize(("invariant", "damage", "message"), BREAKS, ids=lambda x: getattr(x, "__name__", None))
def test_damage_is_found(invariant: str, damage: Callable[[Graph], None], message: str) -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    damage(graph)
    with pytest.raises(GraphError, match=message):
        verify(graph)
    assert any(True for _ in INVARIANTS[invariant](graph))


def test_every_invariant_is_tested() -> None:
    assert {name for name, _, _ in BREAKS} == set(INVARIANTS)


def test_long_lists_of_problems_are_cut() -> None:
    graph = parse_graph(TEXT)
    for n in graph.nodes:
        for value in n.outputs:
            value.name = "same"
    with pytest.raises(GraphError, match=r"and \d+ more"):
        verify(graph)
