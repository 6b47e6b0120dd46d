"""A driver without a model: it checks every step against the contract and computes tokens from the true history.

A KV cell holds a link (position, hash of the tokens up to here, hash up to the position before). A query reads all
cells that attention would read and follows the links, so a cell that is unwritten, stale or another sequence's is
found at once. Hashes come only from cells and explicit tokens, never from bookkeeping of sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import KVGroup, Plan, Ranges, StateSpec
from pelton.runtime.step import FROM_HISTORY, NO_FORCED, SamplingInputs, StepInputs, StepOutputs

UNWRITTEN = -2
ROOT = 1


def make_plan(
    *,
    block: int = 16,
    max_batch: int = 8,
    max_tokens: int = 64,
    max_seq_len: int = 256,
    rows: int = 16,
    windows: tuple[int | None, ...] = (None,),
    vocab: int = 300,
) -> Plan:
    """A plan without launches."""
    ranges = Ranges(
        max_batch_size=max_batch,
        max_num_tokens=max_tokens,
        max_seq_len=max_seq_len,
        opt_num_tokens=max_tokens,
        max_logits_rows=rows,
        logits_chunk=min(rows, 8),
        tokens_per_block=block,
        max_logprobs=5,
    )
    groups = tuple(KVGroup(name=f"group{i}", window=window) for i, window in enumerate(windows))
    states = [StateSpec(name="history", kind="slot", dtype=DType.I32, shape=(max_seq_len,))]
    states += [
        StateSpec(name=f"kv{i}", kind="paged_kv", dtype=DType.F32, shape=(1, 2), group=i) for i in range(len(groups))
    ]
    return Plan(
        ranges=ranges,
        kv_groups=groups,
        states=tuple(states),
        weights=(),
        buffers=(),
        arena_bytes=0,
        kernels=(),
        launches=(),
        tail_start=0,
        vocab_size=vocab,
    )


def digest(*parts: object) -> int:
    """A 63-bit hash of the parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class FakeHandle:
    """A step that runs when its result is asked for, after all steps before it."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.outputs: StepOutputs | None = None

    def done(self) -> bool:
        return self.outputs is not None

    @property
    def tokens(self) -> list[int]:
        return self.result().tokens.tolist()

    def result(self) -> StepOutputs:
        while self.outputs is None:
            self.driver.run_oldest()
        return self.outputs


class FakeDriver:
    """Implements Driver. ``lazy``: steps run as late as the contract allows, so that early reuse of arrays shows."""

    def __init__(self, plan: Plan, *, lazy: bool = False, script: dict[int, list[int]] | None = None) -> None:
        self.plan = plan
        self.lazy = lazy
        self.script = script or {}  # first prompt token -> outputs to give
        self.cells: list[list[list[tuple[int, int, int] | None]]] = []
        self.queue: list[tuple[FakeHandle, StepInputs] | tuple[int, list[int], list[int]]] = []
        self.steps: list[tuple[int, int, int]] = []  # (tokens, sequences, rows) of each step
        self.copied_blocks = 0
        self.fail_next = False
        self.closed = False

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        block = self.plan.ranges.tokens_per_block
        self.cells = [[[None] * block for _ in range(count)] for count in num_blocks]
        self.history = np.full((num_slots, self.plan.ranges.max_seq_len), UNWRITTEN, np.int64)
        self.num_slots = num_slots

    def block_bytes(self, group: int) -> int:
        return 1024 * self.plan.ranges.tokens_per_block

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        assert not set(source) & set(target)
        self.copied_blocks += len(source)
        self.queue.append((group, list(source), list(target)))

    def execute(self, inputs: StepInputs) -> FakeHandle:
        self.check_shapes(inputs)
        handle = FakeHandle(self)
        self.queue.append((handle, inputs))
        if not self.lazy:
            handle.result()
        return handle

    def hold_near(self, objects: Iterable[object]) -> None:
        self.near = list(objects)

    def close(self) -> None:
        self.closed = True

    def run_oldest(self) -> None:
        item = self.queue.pop(0)
        if len(item) == 2:
            handle, inputs = item
            if self.fail_next:
                self.fail_next = False
                raise RuntimeError("the device is on fire")
            handle.outputs = self.run(inputs)
            return
        group, sources, targets = item
        for source, target in zip(sources, targets, strict=True):
            self.cells[group][target] = list(self.cells[group][source])

    # --- the contract -------------------------------------------------------------------------------------------

    def check_shapes(self, step: StepInputs) -> None:
        ranges = self.plan.ranges
        tokens, seqs, rows = step.num_tokens, step.num_seqs, step.num_rows
        assert 1 <= tokens <= ranges.max_num_tokens
        assert 1 <= seqs <= ranges.max_batch_size
        assert rows <= ranges.max_logits_rows
        self.steps.append((tokens, seqs, rows))
        expect = {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "query_start": (seqs + 1,),
            "seq_slots": (seqs,),
            "logits_rows": (rows,),
            "row_seq": (rows,),
        }
        for name, shape in expect.items():
            array = getattr(step, name)
            assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, np.int32, True), name
        assert len(step.block_tables) == len(self.plan.kv_groups)
        for table in step.block_tables:
            assert table.shape == (seqs, ranges.max_blocks_per_seq)
            assert table.dtype == np.int32
            assert table.flags.c_contiguous
        assert step.query_start[0] == 0
        assert step.query_start[-1] == tokens
        assert (np.diff(step.query_start) > 0).all()
        assert len(set(step.seq_slots.tolist())) == seqs
        assert (step.seq_slots >= 0).all()
        assert (step.seq_slots < self.num_slots).all()
        for s in range(seqs):
            positions = step.positions[step.query_start[s] : step.query_start[s + 1]]
            assert (np.diff(positions) == 1).all()
            assert positions[0] >= 0
            assert positions[-1] < ranges.max_seq_len
        for r in range(rows):
            s = step.row_seq[r]
            assert step.query_start[s] <= step.logits_rows[r] < step.query_start[s + 1]
        assert (step.token_ids >= FROM_HISTORY).all()
        assert (step.token_ids < self.plan.vocab_size).all()
        self.check_sampling(step.sampling, rows)

    def check_sampling(self, sampling: SamplingInputs, rows: int) -> None:
        kinds = {"seed": np.uint64, "top_k": np.int32, "num_logprobs": np.int32, "prompt_len": np.int32}
        kinds |= {"forced": np.int32, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
        kinds |= {f"{name}_penalty": np.float32 for name in ("repetition", "presence", "frequency")}
        for name, kind in kinds.items():
            array = getattr(sampling, name)
            assert (array.shape, array.dtype, array.flags.c_contiguous) == ((rows,), kind, True), name
        starts = sampling.bias_start
        assert starts.shape == (rows + 1,)
        assert starts.dtype == np.int32
        assert starts[0] == 0
        assert (np.diff(starts) >= 0).all()
        assert starts[-1] == len(sampling.bias_ids) == len(sampling.bias_values)
        for r in range(rows):
            ids = sampling.bias_ids[starts[r] : starts[r + 1]].tolist()
            assert len(set(ids)) == len(ids)
            assert all(0 <= i < self.plan.vocab_size for i in ids)
        assert (sampling.num_logprobs <= self.plan.ranges.max_logprobs).all()

    # --- the computation ----------------------------------------------------------------------------------------

    def run(self, step: StepInputs) -> StepOutputs:
        chains = np.zeros(step.num_tokens, np.int64)
        self.check_ownership(step)
        for s in range(step.num_seqs):
            for t in range(step.query_start[s], step.query_start[s + 1]):
                chains[t] = self.token(step, s, t)
        return self.sample(step, chains)

    def check_ownership(self, step: StepInputs) -> None:
        """A block that a sequence writes in this step is nobody else's."""
        block = self.plan.ranges.tokens_per_block
        for table in step.block_tables:
            holders: dict[int, list[int]] = {}
            for s in range(step.num_seqs):
                for b in table[s].tolist():
                    if b >= 0:
                        holders.setdefault(b, []).append(s)
                        assert len(set(holders[b])) == len(holders[b]), "a block twice in one table"
            for s in range(step.num_seqs):
                for t in range(step.query_start[s], step.query_start[s + 1]):
                    target = int(table[s, step.positions[t] // block])
                    assert target >= 0, "a query's own position has no block"
                    assert holders[target] == [s], "a shared block is written"

    def token(self, step: StepInputs, s: int, t: int) -> int:
        """Compute one query: store its cell in every group, then read what attention reads."""
        block, position, slot = self.plan.ranges.tokens_per_block, int(step.positions[t]), int(step.seq_slots[s])
        token = int(step.token_ids[t])
        if token == FROM_HISTORY:
            token = int(self.history[slot, position])
            assert token >= 0, "a token is read from the history that was never sampled"
        self.history[slot, position] = token
        chain = 0
        for g, group in enumerate(self.plan.kv_groups):
            table, cells = step.block_tables[g][s], self.cells[g]
            before = ROOT
            if position:
                cell = cells[table[(position - 1) // block]][(position - 1) % block] if self.sees(group, 1) else None
                assert not self.sees(group, 1) or cell is not None, "the position before was never stored"
                before = cell[1] if cell is not None else ROOT
            chain = digest(before, token)
            cells[table[position // block]][position % block] = (position, chain, before)
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for q in range(position, first - 1, -1):
                assert table[q // block] >= 0, "attention reads a position without a block"
                here = cells[table[q // block]][q % block]
                assert here is not None, "attention reads a cell that was never stored"
                assert here[0] == q, "attention reads a stale cell"
                if q > first:
                    below = cells[table[(q - 1) // block]][(q - 1) % block]
                    assert below is not None, "attention reads a cell that was never stored"
                    assert below[1] == here[2], "attention reads another sequence's cell"
            live = {i for i in range(first // block, position // block + 1)}
            stale = [i for i, b in enumerate(table.tolist()) if b >= 0 and i < min(live)]
            first_query = int(step.positions[step.query_start[s]])
            seen = 0 if group.window is None else max(0, first_query - group.window + 1)
            assert all(i >= seen // block for i in stale), "a block that fell out of the window is kept"
        return chain

    @staticmethod
    def sees(group: KVGroup, distance: int) -> bool:
        return group.window is None or distance < group.window

    def sample(self, step: StepInputs, chains: np.ndarray) -> StepOutputs:
        rows, most, vocab = step.num_rows, self.plan.ranges.max_logprobs, self.plan.vocab_size
        tokens = np.zeros(rows, np.int32)
        logprobs, ranks = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        top_ids = np.full((rows, most), -1, np.int32)
        top_logprobs = np.full((rows, most), -np.inf, np.float32)
        logits = np.zeros((rows, vocab), np.float32) if step.want_logits else None
        for r in range(rows):
            t, s = int(step.logits_rows[r]), int(step.row_seq[r])
            chain, position = int(chains[t]), int(step.positions[t])
            forced = int(step.sampling.forced[r])
            token = forced if forced != NO_FORCED else self.choose(step, r, chain, position)
            if forced == NO_FORCED:
                self.history[step.seq_slots[s], position + 1] = token  # IndexError past max_seq_len
            tokens[r] = token
            logprobs[r], ranks[r] = raw_logprob(chain, token), 1 + digest(chain, token) % vocab
            wanted = int(step.sampling.num_logprobs[r])
            for i in range(max(wanted, 0)):
                top_ids[r, i] = digest(chain, i) % vocab
                top_logprobs[r, i] = raw_logprob(chain, int(top_ids[r, i]))
            if logits is not None:
                logits[r] = logits_of(chain, vocab)
        return StepOutputs(tokens, logprobs, ranks, top_ids, top_logprobs, logits)

    def choose(self, step: StepInputs, r: int, chain: int, position: int) -> int:
        """A token from the chain, the seed and whatever else the row's parameters make it depend on."""
        sampling, vocab = step.sampling, self.plan.vocab_size
        history = self.history[step.seq_slots[step.row_seq[r]], : position + 1].tolist()
        prompt_len = int(sampling.prompt_len[r])
        start, end = sampling.bias_start[r], sampling.bias_start[r + 1]
        bias = dict(zip(sampling.bias_ids[start:end].tolist(), sampling.bias_values[start:end].tolist(), strict=True))
        if history[0] in self.script:
            outputs = self.script[history[0]]
            index = position + 1 - prompt_len
            token = outputs[index] if index < len(outputs) else 0
        else:
            parts: list[object] = [chain, position]
            if sampling.temperature[r] > 0:
                parts += [int(sampling.seed[r]), float(sampling.temperature[r]), float(sampling.top_p[r])]
            if sampling.repetition_penalty[r] != 1:
                parts += [tuple(history)]
            if sampling.presence_penalty[r] or sampling.frequency_penalty[r]:
                parts += [tuple(history[prompt_len:])]
            token = digest(*parts) % vocab
        while bias.get(token) == -np.inf:
            token = (token + 1) % vocab
        return token


def raw_logprob(chain: int, token: int) -> float:
    """The log-probability of a token after the tokens that a chain stands for."""
    return -(digest(chain, token, "lp") % 1000) / 100


def logits_of(chain: int, vocab: int) -> np.ndarray:
    """The logits after the tokens that a chain stands for."""
    return np.random.default_rng(chain).standard_normal(vocab).astype(np.float32)
