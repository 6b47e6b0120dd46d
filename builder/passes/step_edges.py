"""Put the step's edges on the graph: resolve token ids in front, sample at the end."""

from __future__ import annotations

from ...runtime.format.dtypes import DType
from ...runtime.format.plan import Ranges, StateSpec
from ..graph import Graph
from ..ops.fused import ResolveTokens, Sample
from ..ops.tokens import HISTORY
from .rewriting import Sweep


def apply(graph: Graph, ranges: Ranges) -> None:
    """Adds state "history"; the graph's output becomes sample's token."""
    graph.states.append(StateSpec(name=HISTORY, kind="slot", dtype=DType.I32, shape=(ranges.max_seq_len,)))
    s = Sweep(graph)
    token_ids = graph.inputs[0]
    resolved = s.emit(ResolveTokens(), token_ids)
    graph.replace_uses(token_ids, resolved)
    logits = graph.outputs[0]
    vocab = logits.type.shape[-1]
    assert isinstance(vocab, int)
    head = s.nodes
    s.nodes = []
    token = s.emit(Sample(vocab, ranges.max_logprobs), logits)
    graph.nodes = [*head, *graph.nodes, *s.nodes]
    graph.outputs = [token]
