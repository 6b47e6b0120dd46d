"""One check for every pass: the expected text, a second run that changes nothing, and equal results."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from pelton.builder.graph import Graph
from pelton.builder.passes.differential import RandomSource
from pelton.builder.passes.rewriting import drop_unused
from pelton.builder.verifier import verify
from tests.builder.snippets import outputs, renamed, snippet


def check(apply: Callable[[Graph], object], before: str, expected: str, bound: float = 1e-5) -> Graph:
    """``apply`` turns ``before`` into ``expected``; results agree to ``bound`` (0: to the bit)."""
    graph = snippet(before)
    source = RandomSource(graph)
    reference = outputs(graph, source)
    apply(graph)
    drop_unused(graph)
    verify(graph)
    assert without_origins(graph) == without_origins(used(expected))
    for actual, wanted in zip(outputs(graph, source), reference, strict=True):
        if bound == 0:
            np.testing.assert_array_equal(actual, wanted)
        elif actual.dtype.kind != "b":
            scale = float(np.max(np.abs(wanted))) or 1.0
            assert float(np.max(np.abs(actual.reshape(wanted.shape) - wanted))) <= bound * scale
    again = renamed(graph)
    apply(graph)
    drop_unused(graph)
    assert renamed(graph) == again, "a second run changed the graph again"
    return graph


def without_origins(graph: Graph) -> str:
    """Snippets name no modules; the golden files show origins."""
    return re.sub(r' from "[^"]*"', "", renamed(graph))


def unchanged(apply: Callable[[Graph], object], text: str) -> None:
    """The pass leaves a near miss alone."""
    graph = snippet(text)
    apply(graph)
    drop_unused(graph)
    assert renamed(graph) == renamed(used(text))


def used(text: str) -> Graph:
    """The snippet without what nobody reads."""
    graph = snippet(text)
    drop_unused(graph)
    return graph
