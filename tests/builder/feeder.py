"""Feeds a driver steps by hand: block tables, slots and positions, as a scheduler would keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pelton.runtime.drivers.base import Driver
from pelton.runtime.step import StepInputs, StepOutputs, greedy_sampling


@dataclass
class Feeder:
    """Blocks are handed out from the end of the pool, so that tables are not the identity."""

    driver: Driver
    num_blocks: int = 64
    num_slots: int = 8
    tokens: dict[int, int] = field(default_factory=dict)  # sequence -> tokens fed
    blocks: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = len(self.driver.plan.kv_groups)
        self.driver.allocate((self.num_blocks,) * groups, self.num_slots)
        self.free = list(range(self.num_blocks))

    def inputs(self, parts: Sequence[tuple[int, Sequence[int]]]) -> StepInputs:
        """A step that gives each (sequence, tokens) its next tokens, with logits of every token."""
        ranges = self.driver.plan.ranges
        ids, positions, row_seq, start = [], [], [], [0]
        table = np.full((len(parts), ranges.max_blocks_per_seq), -1, np.int32)
        for index, (sequence, tokens) in enumerate(parts):
            done = self.tokens.get(sequence, 0)
            owned = self.blocks.setdefault(sequence, [])
            while len(owned) * ranges.tokens_per_block < done + len(tokens):
                owned.append(self.free.pop())
            table[index, : len(owned)] = owned
            ids += tokens
            positions += range(done, done + len(tokens))
            row_seq += [index] * len(tokens)
            start.append(len(ids))
            self.tokens[sequence] = done + len(tokens)
        return StepInputs(
            token_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            query_start=np.array(start, np.int32),
            seq_slots=np.array([sequence for sequence, _ in parts], np.int32),
            block_tables=(table,) * len(self.driver.plan.kv_groups),
            logits_rows=np.arange(len(ids), dtype=np.int32),
            row_seq=np.array(row_seq, np.int32),
            sampling=greedy_sampling(len(ids)),
            want_logits=True,
        )

    def feed(self, *parts: tuple[int, Sequence[int]]) -> list[np.ndarray]:
        """Run one step; the logits [tokens, V] of each part."""
        inputs = self.inputs(parts)
        logits = self.run(inputs).logits
        assert logits is not None
        return np.split(logits, inputs.query_start[1:-1])

    def run(self, inputs: StepInputs) -> StepOutputs:
        return self.driver.execute(inputs).result()
