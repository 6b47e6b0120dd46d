"""Check a pass by running the graph before and after it on the same random steps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.plan import Ranges
from ...runtime.format.tensor_source import TensorInfo, TensorSource
from ...runtime.format.weight_eval import sources
from ...runtime.step import StepInputs, greedy_sampling
from ..graph import Graph
from ..interpreter import Interpreter

#: Largest difference of logits allowed, relative to the largest logit.
TOLERANCE = {DType.F32: 1e-4, DType.F16: 2e-2, DType.BF16: 1e-1}

#: Tokens that each sequence gets in each step: ragged, with a first chunk, a later one, and a decode.
_SCHEDULE = (((0, 7), (1, 1)), ((0, 1), (2, 5), (1, 6)), ((2, 1), (1, 1), (0, 2)))


class RandomSource:
    """A TensorSource of pseudo-random weights: each tensor depends on its name and shape only."""

    def __init__(self, graph: Graph) -> None:
        leaves = [leaf for expr in graph.weights.values() for leaf in sources(expr)]
        self._infos = {leaf.name: TensorInfo(leaf.dtype, leaf.shape) for leaf in leaves}

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        info = self._infos[name]
        rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
        data = rng.standard_normal(info.shape, dtype=np.float32)
        # vectors are norm weights and biases; rows of a matrix keep the size of their input
        data = data * 0.1 + 1 if len(info.shape) < 2 else data / np.sqrt(np.float32(info.shape[-1]))
        return data.astype(info.dtype.numpy)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.read(name)[start:stop]

    def release(self, name: str) -> None:
        """Nothing is kept."""


class DifferentialTest:
    """Logits of a few ragged steps, taken once from the first graph and compared with later ones."""

    def __init__(self, graph: Graph, ranges: Ranges, source: TensorSource | None) -> None:
        self.source = source if source is not None else RandomSource(graph)
        self.interpreter = Interpreter(self.source, ranges)
        self.vocab = int(graph.outputs[0].type.shape[-1])
        self.expected = self.logits(graph)

    def logits(self, graph: Graph) -> np.ndarray:
        """fp32 logits of all chosen rows of all steps, with fresh state."""
        self.interpreter.allocate(graph, _NUM_BLOCKS, _NUM_SEQS)
        rows = []
        groups = max(1, len(graph.kv_groups))
        for step in random_steps(self.vocab, groups, self.interpreter.ranges):
            outputs, sampled = self.interpreter.run(graph, step)
            if sampled.logits is not None and sampled.logits.size:
                rows.append(sampled.logits)
                continue
            logits = outputs[0].reshape(-1, self.vocab)
            rows.append(logits if _has_rows(graph) else logits[step.logits_rows])
        self.interpreter.forget_weights()
        return np.concatenate(rows)

    def check(self, graph: Graph, dtype: DType) -> None:
        """Raises GraphError if the logits moved by more than the dtype's rounding explains.

        After a pass that rounds, later ones are compared with its result.
        """
        actual = self.logits(graph)
        scale = float(np.max(np.abs(self.expected)))
        error = float(np.max(np.abs(actual - self.expected))) / scale
        if not error <= TOLERANCE[dtype]:
            raise GraphError(
                f"logits differ from before the pass by {error:.2e} of the largest ({TOLERANCE[dtype]:.0e} allowed):"
                " the pass changed what the model computes; please report this with the --dump-ir folder"
            )
        if dtype != DType.F32:
            self.expected = actual


_NUM_SEQS = 3
_NUM_BLOCKS = 8


def _has_rows(graph: Graph) -> bool:
    return graph.outputs[0].type.shape[0] == "C"


def random_steps(vocab: int, groups: int, ranges: Ranges) -> list[StepInputs]:
    """The schedule's steps: random tokens, shuffled slots and blocks, some rows wanted."""
    rng = np.random.Generator(np.random.PCG64(7))
    blocks = rng.permutation(_NUM_BLOCKS)[:_NUM_SEQS].astype(np.int32)
    slots = rng.permutation(_NUM_SEQS).astype(np.int32)
    done = [0] * _NUM_SEQS
    steps = []
    for parts in _SCHEDULE:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        row_seq: list[int] = []
        starts = [0]
        tables = np.full((len(parts), ranges.max_blocks_per_seq), -1, np.int32)
        for index, (sequence, wanted) in enumerate(parts):
            tables[index, 0] = blocks[sequence]
            # an engine for very short sequences: rather repeat the last position than leave the range
            count = min(wanted, max(1, ranges.max_seq_len - done[sequence]))
            done[sequence] = min(done[sequence], ranges.max_seq_len - count)
            for offset in range(count):
                if offset % 2 == 0 or offset == count - 1:
                    rows.append(len(ids))
                    row_seq.append(index)
                ids.append(int(rng.integers(vocab)))
                positions.append(done[sequence] + offset)
            done[sequence] += count
            starts.append(len(ids))
        steps.append(
            StepInputs(
                token_ids=np.array(ids, np.int32),
                positions=np.array(positions, np.int32),
                query_start=np.array(starts, np.int32),
                seq_slots=slots[[sequence for sequence, _ in parts]],
                block_tables=(tables,) * groups,
                logits_rows=np.array(rows, np.int32),
                row_seq=np.array(row_seq, np.int32),
                sampling=greedy_sampling(len(rows)),
                want_logits=True,
            )
        )
    return steps
