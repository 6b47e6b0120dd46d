"""Run a Graph by the reference meanings of its ops, without plan, arena or layouts."""

from __future__ import annotations

import numpy as np

from ..runtime.errors import GraphError
from ..runtime.format.plan import Ranges
from ..runtime.format.tensor_source import TensorSource
from ..runtime.format.weight_eval import evaluate, simplify, unpack
from ..runtime.format.weight_expr import WeightExpr
from ..runtime.step import StepInputs, StepOutputs
from .graph import Graph, Value
from .ops import StepContext


class Interpreter:
    """Interprets graphs over one weight source. Weights are evaluated once and kept until ``forget_weights``.

    ``states`` outlive a call: several steps can be run one after another, as a driver would.
    """

    def __init__(self, source: TensorSource, ranges: Ranges) -> None:
        self.source = source
        self.ranges = ranges
        self.states: dict[str, np.ndarray] = {}
        self._cache: dict[WeightExpr, np.ndarray] = {}

    def allocate(self, graph: Graph, num_blocks: int, num_slots: int) -> None:
        """Fresh, zeroed state storage for ``graph``: blocks in every KV group, and per-sequence slots."""
        self.states = {}
        for spec in graph.states:
            shape: tuple[int, ...] = (num_slots, *spec.shape)
            if spec.kind == "paged_kv":
                shape = (num_blocks, self.ranges.tokens_per_block, 2, *spec.shape)
            self.states[spec.name] = np.zeros(shape, spec.dtype.numpy)

    def forget_weights(self) -> None:
        """Free the weights evaluated so far."""
        self._cache = {}

    def run(self, graph: Graph, step: StepInputs) -> tuple[list[np.ndarray], StepOutputs]:
        """One step, all R rows in one chunk: the graph's outputs, and the step outputs that sample filled."""
        context = StepContext(
            step=step,
            states=self.states,
            state_groups={spec.name: spec.group for spec in graph.states},
            tokens_per_block=self.ranges.tokens_per_block,
            row_start=0,
            row_count=step.num_rows,
            outputs=empty_outputs(step, graph, self.ranges),
        )
        values: dict[Value, np.ndarray] = dict(graph.constants)
        for value, data in zip(graph.inputs, (step.token_ids, step.positions), strict=True):
            values[value] = data
        last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
        for index, node in enumerate(graph.nodes):
            operands = [values[v] if v in values else self._weight(graph, v) for v in node.inputs]
            results = node.op.reference(context, *operands)
            if len(results) != len(node.outputs):
                raise GraphError(f"{node.op.name} at {node.origin!r} gave {len(results)} results")
            values.update(zip(node.outputs, results, strict=True))
            for value in node.inputs:
                if value.kind == "node" and last_use[value] == index and value not in graph.outputs:
                    values.pop(value, None)
        assert context.outputs is not None
        return [values[v] for v in graph.outputs], context.outputs

    def _weight(self, graph: Graph, value: Value) -> np.ndarray:
        expr = simplify(graph.weights[value])
        if expr not in self._cache:
            self._cache[expr] = unpack(evaluate(expr, self.source), value.type)
        return self._cache[expr]


def empty_outputs(step: StepInputs, graph: Graph, ranges: Ranges) -> StepOutputs:
    """Step outputs for sample to fill, of the right shapes."""
    rows, top = step.num_rows, ranges.max_logprobs
    vocab = next((n.op.vocab_size for n in graph.nodes if n.op.name == "sample"), 0)  # type: ignore[attr-defined]
    return StepOutputs(
        tokens=np.zeros(rows, np.int32),
        logprobs=np.zeros(rows, np.float32),
        ranks=np.zeros(rows, np.int32),
        top_ids=np.full((rows, top), -1, np.int32),
        top_logprobs=np.zeros((rows, top), np.float32),
        logits=np.zeros((rows, vocab), np.float32) if step.want_logits else None,
    )
