"""Golden vectors: what the reference target computed at build time, to compare a driver's logits with.

The engine's section "golden" holds them; ``pelton verify`` runs the same tokens on this machine's target.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from .drivers.base import Driver
from .errors import DriverError, EngineFormatError
from .format.dtypes import DType
from .format.plan import Plan
from .step import FROM_HISTORY, StepInputs, greedy_sampling

#: Largest |logit - golden| / max |golden logit| by engine precision. 16-bit types round attention
#: probabilities and GEMM inputs; targets may differ in the order of a dot product's additions.
TOLERANCE = {DType.F32: 1e-4, DType.F16: 5e-3, DType.BF16: 3e-2}


class GoldenRow(msgspec.Struct, frozen=True):
    """The highest logits at one position: ids and fp32 values, best first."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]


class GoldenVectors(msgspec.Struct, frozen=True):
    """Tokens fed at positions 0, 1, ... and the rows that came out. ``scale`` = max |logit| over all rows."""

    token_ids: tuple[int, ...]
    rows: tuple[GoldenRow, ...]
    scale: float


def prompt_logits(driver: Driver, token_ids: list[int]) -> NDArray[np.float32]:
    """fp32 logits [len, V] of one sequence fed in a single step. The driver must have been given a slot and blocks."""
    plan: Plan = driver.plan
    count = len(token_ids)
    if FROM_HISTORY in token_ids:
        raise ValueError("prompt_logits takes real token ids")
    table = np.full((1, plan.ranges.max_blocks_per_seq), -1, np.int32)
    blocks = -(-count // plan.ranges.tokens_per_block)
    table[0, :blocks] = np.arange(blocks)
    inputs = StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        seq_slots=np.zeros(1, np.int32),
        block_tables=tuple(table for _ in plan.kv_groups),
        logits_rows=np.arange(count, dtype=np.int32),
        row_seq=np.zeros(count, np.int32),
        sampling=greedy_sampling(count),
        want_logits=True,
    )
    logits = driver.execute(inputs).result().logits
    if logits is None:
        raise DriverError("the driver returned no logits although they were asked for")
    return logits


def allocate_for(driver: Driver, tokens: int) -> None:
    """Give a fresh driver room for one sequence of ``tokens`` tokens."""
    blocks = -(-tokens // driver.plan.ranges.tokens_per_block)
    driver.allocate(tuple(blocks for _ in driver.plan.kv_groups), 1)


def _contradiction(golden: GoldenVectors, plan: Plan) -> str:
    """What in the vectors no build of this plan writes; empty if nothing."""
    ranges, count = plan.ranges, len(golden.token_ids)
    most = min(ranges.max_logits_rows, ranges.max_num_tokens, ranges.max_seq_len)
    if not 0 < count <= most or len(golden.rows) > count:
        return f"{count} tokens and {len(golden.rows)} rows where at most {most} are possible"
    if any(not row.ids or len(row.ids) != len(row.logits) for row in golden.rows):
        return "a row has not one value for each id"
    known = range(plan.vocab_size)
    strange = [i for ids in (golden.token_ids, *(row.ids for row in golden.rows)) for i in ids if i not in known]
    return f"token id {strange[0]} in a vocabulary of {plan.vocab_size}" if strange else ""


def check_golden(driver: Driver, golden: GoldenVectors, precision: DType) -> list[str]:
    """Run the golden tokens on a fresh driver; returns what differs by more than the precision's tolerance.

    Raises EngineFormatError for vectors that are not of this engine.
    """
    if wrong := _contradiction(golden, driver.plan):
        raise EngineFormatError(f"section 'golden' is damaged: {wrong}; build the engine again")
    allocate_for(driver, len(golden.token_ids))
    logits = prompt_logits(driver, list(golden.token_ids))
    bound = TOLERANCE[precision] * golden.scale
    problems = []
    for position, row in enumerate(golden.rows):
        got = logits[position, list(row.ids)]
        error = float(np.max(np.abs(got - np.array(row.logits, np.float32))))
        if not error <= bound:  # also catches NaN
            problems.append(f"position {position}: logits differ from the reference by {error:.3g}, bound {bound:.3g}")
    return problems
