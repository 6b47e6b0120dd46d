"""Small graphs as text: the two inputs are declared already, and results are compared whatever values are called."""

from __future__ import annotations

import numpy as np

from pelton.builder.graph import Graph
from pelton.builder.interpreter import Interpreter
from pelton.builder.passes.differential import RandomSource, random_steps
from pelton.builder.text import print_graph
from pelton.builder.text_parser import parse_graph
from pelton.builder.verifier import verify
from pelton.runtime.format.plan import Ranges

RANGES = Ranges(
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=32,
    opt_num_tokens=8,
    max_logits_rows=32,
    logits_chunk=4,
    tokens_per_block=16,
    max_logprobs=2,
)
INPUTS = "input %token_ids: i32[T]\ninput %positions: i32[T]\n"
VOCAB = 40


def snippet(text: str) -> Graph:
    """Parse and verify a graph written without its inputs."""
    graph = parse_graph(INPUTS + text)
    graph._next = 1000  # fresh names must not meet the names in the text
    verify(graph)
    return graph


def renamed(graph: Graph) -> str:
    """The graph's text with values numbered in order, so that equal graphs have equal text."""
    for prefix, values in (("c", graph.constants), ("w", graph.weights)):
        for number, value in enumerate(values):
            value.name = f"{prefix}{number}" if prefix == "c" else value.name
    number = 0
    for node in graph.nodes:
        for value in node.outputs:
            value.name = str(number)
            number += 1
    graph._next = 0
    lines = print_graph(graph).splitlines()
    declarations = sorted(line for line in lines if line.startswith(("weight ", "constant ")))
    return "\n".join([*declarations, *(line for line in lines if line not in declarations)])


def outputs(graph: Graph, source: RandomSource) -> list[np.ndarray]:
    """What the graph computes over a few ragged steps with random weights."""
    interpreter = Interpreter(source, RANGES)
    interpreter.allocate(graph, num_blocks=8, num_slots=4)
    found: list[np.ndarray] = []
    for step in random_steps(VOCAB, max(1, len(graph.kv_groups)), RANGES):
        found += interpreter.run(graph, step)[0]
    return found
