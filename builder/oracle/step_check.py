"""What a driver checks before it runs a step: every index a kernel would follow stays inside what was allocated."""

from __future__ import annotations

import numpy as np

from ...runtime.errors import DriverError
from ...runtime.format.plan import Plan
from ...runtime.step import FROM_HISTORY, NO_FORCED, ROW_PARAMETERS, StepInputs


def check_blocks(plan: Plan, num_blocks: tuple[int, ...], group: int, source: list[int], target: list[int]) -> None:
    """Raises DriverError unless the lists pair up and name existing blocks of an existing group."""
    if not 0 <= group < len(plan.kv_groups):
        raise DriverError(f"copy_blocks: there is no KV group {group}; the engine has {len(plan.kv_groups)}")
    if len(source) != len(target):
        raise DriverError(f"copy_blocks: {len(source)} sources and {len(target)} targets")
    for block in (*source, *target):
        if not 0 <= block < num_blocks[group]:
            raise DriverError(f"copy_blocks: block {block} of group {group}, which has {num_blocks[group]}")


def check_step(plan: Plan, step: StepInputs, num_blocks: tuple[int, ...], num_slots: int) -> None:
    """Raises DriverError naming the field, the index and what is allowed."""
    _check_sizes(plan, step)
    _check_sequences(plan, step, num_slots)
    _check_rows(plan, step)
    _check_tables(plan, step, num_blocks)
    _check_sampling(plan, step)


def _array(name: str, data: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if data.dtype != dtype or data.shape != shape or not data.flags.c_contiguous:
        wanted = f"contiguous {np.dtype(dtype)}{list(shape)}"
        raise DriverError(f"step input {name} is {data.dtype}{list(data.shape)}; it must be {wanted}")


def _each(name: str, data: np.ndarray, good: np.ndarray, allowed: str) -> None:
    """Every element must be good."""
    if not np.all(good):
        at = int(np.argmin(good))
        raise DriverError(f"step input {name}[{at}] is {data[at]}; allowed: {allowed}")


def _limit(count: int, least: int, most: int, what: str, flag: str) -> None:
    if not least <= count <= most:
        raise DriverError(f"the step has {count} {what}; this engine takes {least} to {most}; rebuild with {flag}")


def _check_sizes(plan: Plan, step: StepInputs) -> None:
    ranges = plan.ranges
    tokens, seqs, rows = step.num_tokens, step.num_seqs, step.num_rows
    _limit(tokens, 1, ranges.max_num_tokens, "tokens", "--max-num-tokens")
    _limit(seqs, 1, ranges.max_batch_size, "sequences", "--max-batch-size")
    _limit(rows, 0, ranges.max_logits_rows, "logits rows", "--max-logits-rows")
    _array("token_ids", step.token_ids, np.int32, (tokens,))
    _array("positions", step.positions, np.int32, (tokens,))
    _array("query_start", step.query_start, np.int32, (seqs + 1,))
    _array("seq_slots", step.seq_slots, np.int32, (seqs,))
    _array("logits_rows", step.logits_rows, np.int32, (rows,))
    _array("row_seq", step.row_seq, np.int32, (rows,))


def _check_sequences(plan: Plan, step: StepInputs, num_slots: int) -> None:
    """Each sequence owns one token at least, at consecutive positions, and a slot of its own."""
    start, positions = step.query_start, step.positions
    if start[0] != 0 or start[-1] != step.num_tokens or np.any(np.diff(start) < 1):
        raise DriverError(f"step input query_start {start.tolist()} does not cut {step.num_tokens} tokens into runs")
    ids = step.token_ids
    known = (ids == FROM_HISTORY) | ((ids >= 0) & (ids < plan.vocab_size))
    _each("token_ids", ids, known, f"0 to {plan.vocab_size - 1}, or {FROM_HISTORY} (from history)")
    most = plan.ranges.max_seq_len - 1
    _each("positions", positions, (positions >= 0) & (positions <= most), f"0 to {most}; or rebuild with --max-seq-len")
    inside = np.ones(step.num_tokens, bool)
    inside[start[:-1]] = False
    steps = np.diff(positions, prepend=positions[:1] - 1)
    _each("positions", positions, ~inside | (steps == 1), "one more than the position before it in the sequence")
    slots = step.seq_slots
    _each("seq_slots", slots, (slots >= 0) & (slots < num_slots), f"0 to {num_slots - 1}")
    if len(set(slots.tolist())) != len(slots):
        raise DriverError(f"step input seq_slots {slots.tolist()} gives one slot to two sequences")


def _check_rows(plan: Plan, step: StepInputs) -> None:
    rows, owners = step.logits_rows, step.row_seq
    _each("logits_rows", rows, (rows >= 0) & (rows < step.num_tokens), f"0 to {step.num_tokens - 1}")
    owned = np.searchsorted(step.query_start, rows, side="right") - 1
    _each("row_seq", owners, owners == owned, "the sequence that owns the row's token")


def _check_tables(plan: Plan, step: StepInputs, num_blocks: tuple[int, ...]) -> None:
    """Every block that the step writes or reads exists, and no two sequences write one block."""
    ranges = plan.ranges
    if len(step.block_tables) != len(plan.kv_groups):
        raise DriverError(f"the step has {len(step.block_tables)} block tables, not {len(plan.kv_groups)} (KV groups)")
    size = ranges.tokens_per_block
    for group, table in enumerate(step.block_tables):
        name, blocks = f"block_tables[{group}]", num_blocks[group]
        _array(name, table, np.int32, (step.num_seqs, ranges.max_blocks_per_seq))
        window = plan.kv_groups[group].window
        writers: dict[int, int] = {}
        for sequence, row in enumerate(table):
            begin, end = step.query_start[sequence], step.query_start[sequence + 1]
            first, last = int(step.positions[begin]), int(step.positions[end - 1])
            oldest = 0 if window is None else max(0, first - window + 1)
            for index in range(oldest // size, last // size + 1):
                block = int(row[index])
                if not 0 <= block < blocks:
                    raise DriverError(f"step input {name}[{sequence},{index}] is {block}; allowed: 0 to {blocks - 1}")
                if index >= first // size and writers.setdefault(block, sequence) != sequence:
                    raise DriverError(f"step input {name}: two sequences write block {block} in one step")


def _check_sampling(plan: Plan, step: StepInputs) -> None:
    sampling, rows = step.sampling, step.num_rows
    for name, dtype in {**ROW_PARAMETERS, "forced": np.int32}.items():
        _array(f"sampling.{name}", getattr(sampling, name), dtype, (rows,))
    most = plan.ranges.max_logprobs
    wanted, forced = sampling.num_logprobs, sampling.forced
    allowed = f"-1 to {most}; or rebuild with --max-logprobs"
    _each("sampling.num_logprobs", wanted, (wanted >= -1) & (wanted <= most), allowed)
    allowed = f"{NO_FORCED} (sample) to {plan.vocab_size - 1}"
    _each("sampling.forced", forced, (forced >= NO_FORCED) & (forced < plan.vocab_size), allowed)
    _array("sampling.bias_start", sampling.bias_start, np.int32, (rows + 1,))
    entries = int(sampling.bias_start[-1])
    _array("sampling.bias_ids", sampling.bias_ids, np.int32, (entries,))
    _array("sampling.bias_values", sampling.bias_values, np.float32, (entries,))
    if sampling.bias_start[0] != 0 or np.any(np.diff(sampling.bias_start) < 0):
        raise DriverError("step input sampling.bias_start must begin at 0 and not fall")
    ids = sampling.bias_ids
    _each("sampling.bias_ids", ids, (ids >= 0) & (ids < plan.vocab_size), f"0 to {plan.vocab_size - 1}")
    if sampling.mask is not None:
        _array("sampling.mask", sampling.mask, np.uint32, (rows, -(-plan.vocab_size // 32)))
