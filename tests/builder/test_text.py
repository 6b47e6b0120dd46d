"""The textual form: printing and parsing are inverses, and the parser fails with line numbers only."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pelton.builder.graph import Graph
from pelton.builder.passes.pipeline import PassOptions, optimize
from pelton.builder.text import print_graph
from pelton.builder.text_parser import parse_graph
from pelton.builder.verifier import verify
from pelton.runtime.errors import GraphError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.format.weight_expr import AddScalar, CastTo, Interleave, Pack, Permute, Reshaped, Source, Stack
from tests.builder.snippets import INPUTS, renamed
from tests.builder.tiny_engines import RANGES, imported


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "llama-yarn"])
def test_models_round_trip_and_match_golden(family: str, golden: Callable[[str, str], None]) -> None:
    graph = imported(family, num_hidden_layers=1)
    before = print_graph(graph)
    assert print_graph(parse_graph(before)) == before
    optimize(graph, PassOptions(DType.BF16, RANGES))
    after = print_graph(graph)
    parsed = parse_graph(after)
    verify(parsed)
    assert print_graph(parsed) == after
    golden(f"ir/{family}.txt", renamed(parsed) + "\n")


def test_expressions_and_odd_names_round_trip() -> None:
    graph = parse_graph(INPUTS)
    source = Source('odd "name"\n, with ünïcode/slash', (6, 4), DType.F16)
    exprs = [
        (TensorType(DType.F32, (4, 6)), Permute(AddScalar(source, -1.5e-7), (1, 0))),
        (TensorType(DType.BF16, (12, 4)), CastTo(Stack((source, source)), DType.BF16)),
        (TensorType(DType.F16, (32, 4), "panel16"), Pack(Interleave((source, source), 16), "panel16")),
        (TensorType(DType.F16, (2, 12)), Reshaped(source, (2, 12))),
    ]
    for number, (type_, expr) in enumerate(exprs):
        graph.add_weight(f'w {number}"%', type_, expr)
    graph.outputs = list(graph.weights)
    verify(graph)
    text = print_graph(graph)
    parsed = parse_graph(text)
    assert list(parsed.weights.values()) == [e for _, e in exprs]
    assert print_graph(parsed) == text


@given(
    st.lists(st.floats(width=32), max_size=20),
    st.sampled_from([DType.F32, DType.F16, DType.BF16]),
)
@example([float("nan"), float("inf"), -0.0, 1e-45], DType.F32)
def test_float_constants_keep_their_bits(numbers: list[float], dtype: DType) -> None:
    with np.errstate(over="ignore"):
        data = np.array(numbers, np.float32).astype(dtype.numpy)
    graph = parse_graph(INPUTS)
    value = graph.add_constant(data, TensorType(dtype, data.shape))
    graph.outputs = [value]
    parsed = parse_graph(print_graph(graph))
    (again,) = parsed.constants.values()
    assert again.dtype == data.dtype
    assert again.tobytes() == data.tobytes()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integer_constants_round_trip(numbers: list[int]) -> None:
    graph = parse_graph(INPUTS)
    data = np.array(numbers, np.int64)
    graph.outputs = [graph.add_constant(data, TensorType(DType.I64, data.shape))]
    (again,) = parse_graph(print_graph(graph)).constants.values()
    np.testing.assert_array_equal(again, data)
    flags = data % 2 == 0
    graph.outputs = [graph.add_constant(flags, TensorType(DType.BOOL, flags.shape))]
    np.testing.assert_array_equal(list(parse_graph(print_graph(graph)).constants.values())[1], flags)


BAD = {
    "line 3: %a is used before it is defined": INPUTS + "output %a",
    "line 3: unknown op 'frobnicate'": INPUTS + "%a: f32[T] = frobnicate(%positions)",
    "line 3: %positions is defined twice": INPUTS + "input %positions: i32[T]",
    "line 4: expected ',' at column": INPUTS + "# a comment\n%a: i32[T,1] = reshape(%positions",
    "line 3: .*kind": INPUTS + "%a: f32[T] = unary(%positions)",
    "line 3: .*colour": INPUTS + '%a: f32[T] = unary(%positions) {"kind": "exp", "colour": 3}',
    "line 3: constant %c needs 8 bytes, got 4": INPUTS + 'constant %c: f32[2] = base64 "AACAPw=="',
    "line 3: constant %c needs 3 numbers, got 2": INPUTS + "constant %c: f32[3] = [1, 2]",
    "line 3: constant %c needs .* bytes": INPUTS + 'constant %c: f32[1000000,1000000] = base64 ""',
    "line 3: .*nested too deeply": INPUTS + "weight %w: f32[1] = " + "cast(" * 100 + "x",
    "line 3: unknown weight expression 'load'": INPUTS + "weight %w: f32[1] = load(x)",
    "line 3: .*'panel17'": INPUTS + "weight %w: f32[1]@panel17 = x",
    "line 3: expected the end of the line": INPUTS + "output %positions %positions",
    "line 3: .*'heap'": INPUTS + "state kv.0 heap f32 [2,8] group 0 layout rows",
    "line 3: .*not an integer": INPUTS + "names many",
    "line 2: the text ends without any input": "# nothing\n",
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_line(message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_graph(BAD[message])


def sample_text() -> str:
    return print_graph(optimize(imported("qwen3", num_hidden_layers=1), PassOptions(DType.BF16, RANGES)))


SAMPLE = sample_text()
ALPHABET = st.sampled_from([*"%{}[](),:=@\"'\\ \t\n-.0129aTCf", "null", "source(", "\x00", "é", "9" * 30, '{"', "from"])


def must_parse_or_fail_cleanly(text: str) -> None:
    try:
        graph = parse_graph(text)
    except GraphError as error:
        assert re.match(r"line \d+: ", str(error))
        return
    assert isinstance(graph, Graph)
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)


@given(st.integers(0, len(SAMPLE)), st.integers(0, 40), st.lists(ALPHABET, max_size=5))
def test_damaged_text_fails_cleanly(at: int, dropped: int, inserted: list[str]) -> None:
    must_parse_or_fail_cleanly(SAMPLE[:at] + "".join(inserted) + SAMPLE[at + dropped :])


@given(st.text())
def test_any_text_fails_cleanly(text: str) -> None:
    must_parse_or_fail_cleanly(INPUTS + text)


@given(st.lists(st.sampled_from(SAMPLE.splitlines()), max_size=12))
def test_shuffled_statements_fail_cleanly(lines: list[str]) -> None:
    must_parse_or_fail_cleanly("\n".join(lines))
