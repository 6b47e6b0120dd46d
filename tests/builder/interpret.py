"""Run a Graph by its ops' numpy meanings, over packed sequences and paged state: an oracle for the front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pelton.builder.graph import Graph, Value
from pelton.builder.ops.base import StepContext
from pelton.runtime.format.tensor_source import TensorSource
from pelton.runtime.format.weight_eval import evaluate
from pelton.runtime.step import StepInputs, greedy_sampling

TOKENS_PER_BLOCK = 16
MAX_SEQ_LEN = 128


class Interpreter:
    """Keeps the KV state of up to ``max_seqs`` sequences between steps."""

    def __init__(self, graph: Graph, source: TensorSource, max_seqs: int = 4) -> None:
        self.graph = graph
        self._fixed: dict[Value, np.ndarray[Any, Any]] = dict(graph.constants)
        self._fixed.update({value: evaluate(expr, source) for value, expr in graph.weights.items()})
        self._blocks = MAX_SEQ_LEN // TOKENS_PER_BLOCK
        pages = max_seqs * self._blocks
        self._states = {
            s.name: np.full((pages, TOKENS_PER_BLOCK, 2, *s.shape), np.nan, s.dtype.numpy) for s in graph.states
        }

    def step(self, parts: Mapping[int, tuple[int, Sequence[int]]]) -> dict[int, np.ndarray[Any, Any]]:
        """One step: sequence -> (position of the first new token, new token ids); returns logits [n, V] of each."""
        step = self._inputs(parts)
        groups = {s.name: s.group for s in self.graph.states}
        context = StepContext(step, self._states, groups, TOKENS_PER_BLOCK)
        env = dict(self._fixed)
        env.update(zip(self.graph.inputs, (step.token_ids, step.positions), strict=True))
        for node in self.graph.nodes:
            results = node.op.reference(context, *(env[value] for value in node.inputs))
            for value, result in zip(node.outputs, results, strict=True):
                expected = value.type.max_shape(context.symbols)
                assert result.shape == expected, f"{node.op} gave {result.shape}, its type says {value.type}"
                assert result.dtype == value.type.dtype.numpy, f"{node.op} gave {result.dtype}"
                env[value] = result
        logits = env[self.graph.outputs[0]][0]
        bounds = step.query_start
        return {sequence: logits[bounds[i] : bounds[i + 1]] for i, sequence in enumerate(parts)}

    def _inputs(self, parts: Mapping[int, tuple[int, Sequence[int]]]) -> StepInputs:
        tokens = [np.asarray(ids, np.int32) for _, ids in parts.values()]
        positions = [np.arange(start, start + len(ids), dtype=np.int32) for start, ids in parts.values()]
        table = np.stack([np.arange(self._blocks, dtype=np.int32) + s * self._blocks for s in parts])
        none = np.zeros(0, np.int32)
        return StepInputs(
            token_ids=np.concatenate(tokens),
            positions=np.concatenate(positions),
            query_start=np.cumsum([0, *map(len, tokens)]).astype(np.int32),
            seq_slots=np.asarray(list(parts), np.int32),
            block_tables=tuple(table for _ in self.graph.kv_groups),
            logits_rows=none,
            row_seq=none,
            sampling=greedy_sampling(0),
        )
