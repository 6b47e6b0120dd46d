"""Rows to sample, and a compiled Sample kernel to run on them. Used by test_sample.py."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pelton.builder.ops.base import StepContext
from pelton.builder.ops.fused import Sample
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.step import NO_FORCED, SamplingInputs, StepInputs, StepOutputs

from .harness import F32, RANGES, Compiled, Inputs, Step, compiled, host_skus, make_call, run_workers

BEST_SKU = host_skus()[-1]
MAX_SEQ = 40
MAX_LOGPROBS = 6
SAMPLE_RANGES = msgspec.structs.replace(RANGES, max_seq_len=MAX_SEQ, max_logprobs=MAX_LOGPROBS)
_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "num_logprobs", "prompt_len", "forced", "bias_start", "bias_ids", "bias_values", "mask"),
)
_RESULTS = ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs", "logits")


def sampling(rows: int, **changes: Any) -> SamplingInputs:
    """Plain sampling at temperature 1 for every row; ``changes`` are numbers or whole arrays."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "num_logprobs": 0,
        "prompt_len": 1,
        "forced": NO_FORCED,
        "seed": np.arange(rows),
    }
    integers = ("top_k", "num_logprobs", "prompt_len", "forced")
    arrays: dict[str, Any] = {}
    for name, default in defaults.items():
        dtype = np.uint64 if name == "seed" else np.int32 if name in integers else np.float32
        arrays[name] = np.ascontiguousarray(np.broadcast_to(np.asarray(changes.pop(name, default)), rows), dtype)
    bias: list[dict[int, float]] = changes.pop("bias", [{}] * rows)
    arrays["bias_start"] = np.cumsum([0, *map(len, bias)]).astype(np.int32)
    arrays["bias_ids"] = np.array([i for row in bias for i in row], np.int32)
    arrays["bias_values"] = np.array([v for row in bias for v in row.values()], np.float32)
    return SamplingInputs(**arrays, **changes)


@dataclass
class Rows:
    """R rows of one step, each the last token of its own sequence."""

    logits: np.ndarray  # f32 [R, V]
    sampling: SamplingInputs
    positions: np.ndarray  # i32 [R]
    history: np.ndarray  # i32 [slots, MAX_SEQ]
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if self.slots.size == 0:
            self.slots = np.arange(len(self.logits), dtype=np.int32)

    @property
    def step(self) -> StepInputs:
        rows = np.arange(len(self.logits), dtype=np.int32)
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        zeros = np.zeros(len(rows), np.int32)
        return StepInputs(zeros, self.positions, starts, self.slots, (), rows, rows, self.sampling, want_logits=True)

    def only(self, row: int) -> Rows:
        """This row as a step of its own."""
        s, one = self.sampling, slice(row, row + 1)
        a, b = s.bias_start[row], s.bias_start[row + 1]
        changes: dict[str, Any] = {
            f.name: np.ascontiguousarray(getattr(s, f.name)[one])
            for f in dataclasses.fields(s)
            if not f.name.startswith("bias") and getattr(s, f.name) is not None
        }
        changes.update(
            bias_start=np.array([0, b - a], np.int32), bias_ids=s.bias_ids[a:b], bias_values=s.bias_values[a:b]
        )
        alone = dataclasses.replace(s, **changes)
        return Rows(self.logits[one], alone, self.positions[one], self.history, self.slots[one])


def plain(logits: np.ndarray, **changes: Any) -> Rows:
    """Rows at position 5 of fresh sequences."""
    logits = np.ascontiguousarray(logits, np.float32)
    rows = len(logits)
    return Rows(logits, sampling(rows, **changes), np.full(rows, 5, np.int32), np.zeros((rows, MAX_SEQ), np.int32))


def empty_outputs(rows: int, vocab: int) -> StepOutputs:
    return StepOutputs(
        np.full(rows, -7, np.int32),
        np.full(rows, 7, np.float32),
        np.full(rows, -7, np.int32),
        np.full((rows, MAX_LOGPROBS), -7, np.int32),
        np.full((rows, MAX_LOGPROBS), 7, np.float32),
        np.zeros((rows, vocab), np.float32),
    )


def by_meaning(rows: Rows) -> tuple[StepOutputs, np.ndarray]:
    """Outputs and the history afterwards, from the op's reference."""
    count, vocab = rows.logits.shape
    out, history = empty_outputs(count, vocab), rows.history.copy()
    with np.errstate(all="ignore"):
        context = StepContext(rows.step, {"history": history}, {}, 16, 0, count, out)
        Sample(vocab, MAX_LOGPROBS).reference(context, rows.logits)
    return out, history


def kernel_for(vocab: int, sku: str = BEST_SKU) -> Compiled:
    call = make_call(Sample(vocab, MAX_LOGPROBS), TensorType(F32, ("C", vocab)), ranges=SAMPLE_RANGES)
    return compiled(call, sku)


def native_step(step: StepInputs, out: StepOutputs | None, start: int, count: int) -> tuple[Step, Inputs]:
    """The C structure for rows start .. start + count, and what keeps its arrays alive."""
    inputs = Inputs(step.num_tokens, step.positions, step.query_start, logits_rows=step.logits_rows)
    inputs.row_start, inputs.row_count = start, count
    native = inputs.step()
    native.seq_slots = inputs._pointer(step.seq_slots)
    native.row_seq = inputs._pointer(step.row_seq)
    arrays = [getattr(step.sampling, name) for name in _FIELDS]
    arrays += [getattr(out, name) if out is not None else None for name in _RESULTS]
    native.sampling = (ctypes.c_void_p * 21)(*(None if a is None else a.ctypes.data for a in arrays))
    return native, inputs


def by_kernel(
    rows: Rows, sku: str = BEST_SKU, workers: int = 1, chunk: int | None = None, scratch: bool = True
) -> tuple[StepOutputs, np.ndarray]:
    """Outputs and the history afterwards, from the compiled kernel, ``chunk`` rows at a time."""
    count, vocab = rows.logits.shape
    kernel = kernel_for(vocab, sku)
    step = rows.step
    out, history = empty_outputs(count, vocab), rows.history.copy()
    # What a plan gives an engine whose chunks are this small, and beyond it bytes that must stay.
    ranges = msgspec.structs.replace(SAMPLE_RANGES, logits_chunk=chunk or count)
    size = kernel.kernel.scratch_bytes(dataclasses.replace(kernel.call, ranges=ranges), kernel.target)
    room = np.full(size + workers * (12 * vocab + 64) + 64, 0xFF, np.uint8)
    begin = -room.ctypes.data % 64
    aligned = room.ctypes.data + begin if scratch else None
    for start in range(0, count, chunk or count):
        part = np.ascontiguousarray(rows.logits[start : start + (chunk or count)])
        native, _alive = native_step(step, out, start, len(part))
        operands = (ctypes.c_void_p * 4)(part.ctypes.data, None, history.ctypes.data, aligned)
        run_workers(kernel.function, native, operands, workers)
    assert (room[begin + size :] == 0xFF).all(), "written beyond the scratch"
    return out, history


def random_rows(rng: np.random.Generator, count: int, vocab: int) -> Rows:
    """Every parameter at ordinary and extreme values, in all combinations that chance brings."""

    def pick(*values: float) -> np.ndarray:
        return rng.choice(np.array(values), count)

    bias: list[dict[int, float]] = []
    for _ in range(count):
        kind = rng.integers(6)
        if kind == 0:
            bias.append({int(i): float(rng.normal() * 5) for i in rng.integers(0, vocab, 3)})
        elif kind == 1 and vocab <= 1000:
            kept = int(rng.integers(vocab))
            bias.append({i: -np.inf for i in range(vocab) if i != kept})
        else:
            bias.append({})
    mask = rng.integers(0, 1 << 32, (count, -(-vocab // 32)), dtype=np.uint64).astype(np.uint32)
    parameters = sampling(
        count,
        temperature=pick(0, 1e-39, 1e-6, 0.1, 0.7, 1, 1, 2, 100, np.inf, np.nan),
        top_k=pick(0, 0, 0, 1, 2, 5, 50, vocab - 1, vocab, vocab + 10),
        top_p=pick(1, 1, 1, 0.99, 0.9, 0.5, 1e-9, 0, np.nan),
        min_p=pick(0, 0, 0, 0.05, 0.5, 1, np.nan),
        repetition_penalty=pick(1, 1, 1.3, 0.8),
        presence_penalty=pick(0, 0, 0.5, -1),
        frequency_penalty=pick(0, 0, 0.3, 2),
        seed=rng.integers(0, 1 << 64, count, dtype=np.uint64),
        num_logprobs=pick(-1, 0, 1, 3, MAX_LOGPROBS, 20),
        prompt_len=rng.integers(1, MAX_SEQ, count),
        forced=np.where(rng.random(count) < 0.1, rng.integers(0, vocab, count), NO_FORCED),
        bias=bias,
        mask=mask if rng.random() < 0.3 else None,
    )
    history = rng.integers(0, min(vocab, 30), (count + 3, MAX_SEQ)).astype(np.int32)
    slots = rng.permutation(count + 3)[:count].astype(np.int32)
    positions = rng.integers(0, MAX_SEQ, count).astype(np.int32)
    return Rows(random_logits(rng, count, vocab), parameters, positions, history, slots)


def random_logits(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Flat and steep rows, and now and then ties, NaN, infinities and huge numbers."""
    x = (rng.standard_normal((count, vocab)) * rng.choice([0.01, 1, 3, 10], (count, 1))).astype(np.float32)
    for row in x:
        kind = rng.integers(16)
        if kind == 0:
            row[:] = np.round(row)
        elif kind == 1:
            row[:] = 0
        elif kind == 2:
            row[:] = -np.inf
            row[rng.integers(vocab)] = 1
        elif kind == 3:
            row[rng.random(vocab) < 0.3] = np.nan
        elif kind == 4:
            row[:] = rng.choice([-np.inf, np.nan])
        elif kind == 5:
            row[rng.integers(vocab, size=2)] = np.inf
        elif kind == 6:
            row[:] = np.clip(row.astype(np.float64) * 1e37, -3e38, 3e38)
    return x
