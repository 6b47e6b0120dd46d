"""Paged attention: against its meaning, and bit for bit over chunks, mates and workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.builder.ops.base import StepContext
from pelton.builder.ops.fused import PagedAttention
from pelton.plugins.attention.cpu import AttentionTactic, CpuPagedAttention
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TOKEN_TYPE, TensorType

from .harness import (
    BEST_OF_VECTORS,
    BF16,
    F16,
    F32,
    RANGES,
    Compiled,
    Inputs,
    bits,
    compiled,
    host_skus,
    make_call,
    pack_kv16,
    random_array,
    relative_error,
    sku_params,
)

TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: DType = F32
    window: int | None = None
    softcap: float | None = None
    tokens_per_block: int = 32
    out: DType = F32


class World:
    """Some sequences with random queries, keys and values for all their positions."""

    def __init__(self, shape: Shape, lengths: list[int], sku: str, seed: int = 0) -> None:
        self.shape, self.sku = shape, sku
        rng = np.random.default_rng(seed)
        size = shape.tokens_per_block
        self.lengths = lengths
        self.queries = [random_array(rng, (n, shape.heads, shape.dim), shape.dtype) for n in lengths]
        self.max_blocks = max(-(-n // size) for n in lengths) + 1
        count = sum(-(-n // size) for n in lengths) + 2
        self.pages = np.full((count, size, 2, shape.kv_heads, shape.dim), np.nan, np.float32).astype(shape.dtype.numpy)
        order = iter(rng.permutation(count))
        self.table = np.full((len(lengths), self.max_blocks), -1, np.int32)
        for s, n in enumerate(lengths):
            for b in range(-(-n // size)):
                self.table[s, b] = next(order)
                self.pages[self.table[s, b]] = random_array(rng, self.pages.shape[1:], shape.dtype)
        ranges = msgspec.structs.replace(RANGES, tokens_per_block=size)
        op = PagedAttention(
            state="",
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            scale=shape.dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            compute=shape.dtype,
            kv_dtype=shape.dtype,
            dtype=shape.out,
        )
        self.call = make_call(
            op, TensorType(shape.dtype, ("T", shape.heads, shape.dim)), TOKEN_TYPE, kv=True, ranges=ranges
        )

    def run(
        self, chunks: list[tuple[int, int, int]], workers: int = 1, tactic: AttentionTactic | None = None
    ) -> np.ndarray:
        """Outputs of one step over (sequence, start, stop) chunks. What the step must not see is NaN."""
        pages, table = self.pages.copy(), np.full((len(chunks), self.max_blocks), -1, np.int32)
        size = self.shape.tokens_per_block
        for row, (s, start, stop) in enumerate(chunks):
            table[row] = self.table[s]
            for position in range(stop, -(-self.lengths[s] // size) * size):
                pages[table[row, position // size], position % size] = np.nan
            first = 0 if self.shape.window is None else max(0, start - self.shape.window + 1)
            table[row, : first // size] = -1
            for position in range(first // size * size, first):
                pages[table[row, position // size], position % size] = np.nan
        step = self._step(chunks, table)
        q = np.concatenate([self.queries[s][a:b] for s, a, b in chunks])
        kernel = self.kernel(tactic)
        return kernel(np.ascontiguousarray(q), None, step=step, states=[pack_kv16(pages)], workers=workers)[0]

    def kernel(self, tactic: AttentionTactic | None = None) -> Compiled:
        return compiled(self.call, self.sku, None if tactic is None else CpuPagedAttention(tactic=tactic))

    def reference(self, chunks: list[tuple[int, int, int]]) -> np.ndarray:
        inputs = self._step(chunks, self.table[[s for s, _, _ in chunks]])
        step: Any = SimpleNamespace(
            query_start=inputs.query_start,
            positions=inputs.positions,
            num_seqs=len(chunks),
            block_tables=(inputs.block_table,),
        )
        context = StepContext(step, {"": self.pages}, {"": 0}, self.shape.tokens_per_block)
        q = np.concatenate([self.queries[s][a:b] for s, a, b in chunks])
        return self.call.op.reference(context, q, np.zeros(()))[0]

    @staticmethod
    def _step(chunks: list[tuple[int, int, int]], table: np.ndarray) -> Inputs:
        starts = np.cumsum([0, *(b - a for _, a, b in chunks)])
        positions = np.concatenate([np.arange(a, b) for _, a, b in chunks])
        return Inputs(int(starts[-1]), positions, starts, table)


SHAPES = {
    "mha_f32": Shape(4, 4, 32),
    "gqa_f32": Shape(6, 2, 20, window=50),
    "mqa_f32": Shape(5, 1, 16, softcap=5.0, tokens_per_block=16),
    "wide_group_f32": Shape(35, 1, 8),
    "gqa_bf16": Shape(9, 3, 64, BF16, out=BF16),
    "odd_bf16": Shape(6, 2, 18, BF16, window=33, tokens_per_block=16),
    "big_bf16": Shape(2, 1, 160, BF16, tokens_per_block=64),
    "gqa_f16": Shape(4, 2, 24, F16, out=F16, softcap=3.0),
    "window_bf16": Shape(4, 2, 32, BF16, window=64),
    "capped_bf16": Shape(3, 1, 32, BF16, softcap=5.0),
}
LONG = {**SHAPES, "long_window_bf16": Shape(4, 2, 32, BF16, window=700)}
LENGTHS = [3, 100, 64, 300]


@pytest.mark.parametrize(("name", "sku"), [p for n, s in SHAPES.items() for p in sku_params(s.dtype, n)])
def test_matches_reference_and_never_depends_on_chunks_mates_or_workers(name: str, sku: str) -> None:
    check_bits(World(SHAPES[name], LENGTHS, sku))


def check_bits(world: World) -> None:
    """The reference's values, and the same bits whatever the chunks, the mates and the workers."""
    everything = [(s, 0, n) for s, n in enumerate(world.lengths)]
    whole = world.run(everything)
    assert relative_error(whole, world.reference(everything)) < TOLERANCE[world.shape.dtype]
    for workers in (2, 3):
        assert bits(world.run(everything, workers)) == bits(whole)
    ends = np.cumsum([0, *world.lengths])
    for chunk in (1, 7, 64):
        for s, length in enumerate(world.lengths):
            starts = list(range(0, length, chunk))
            if chunk == 1:  # every edge, and some others
                starts = sorted(
                    {0, length - 1, *(e + d for e in range(0, length, 16) for d in (-1, 0, 1))} & set(starts)
                )
            for start in starts:
                stop = min(start + chunk, length)
                alone = world.run([(s, start, stop)], workers=1 + start % 3)
                assert bits(alone) == bits(whole[ends[s] + start : ends[s] + stop]), (chunk, s, start)
    long = world.lengths[3]
    mixed = [(3, long - 45, long), (1, 99, 100), (0, 1, 2), (2, 10, 30)]
    expected = np.concatenate([whole[ends[s] + a : ends[s] + b] for s, a, b in mixed])
    assert bits(world.run(mixed, workers=2)) == bits(expected)


@pytest.mark.parametrize("name", ["gqa_f32", "gqa_bf16", "long_window_bf16"])
def test_long_sequence_is_shared_by_workers(name: str) -> None:
    world = World(LONG[name], [1500], BEST_OF_VECTORS)
    chunk = [(0, 1490, 1500)]
    whole = world.run(chunk)
    assert relative_error(whole, world.reference(chunk)) < TOLERANCE[LONG[name].dtype]
    for workers in (2, 3, 8):
        for position in (1490, 1499):
            alone = world.run([(0, position, position + 1)], workers)
            assert bits(alone) == bits(whole[position - 1490 :][:1])


@pytest.mark.parametrize("name", ["gqa_f32", "gqa_bf16", "wide_group_f32", "big_bf16"])
def test_never_depends_on_the_tactic(name: str) -> None:
    shape = SHAPES[name]
    world = World(shape, LENGTHS, BEST_OF_VECTORS)
    chunks = [(s, 0, n) for s, n in enumerate(LENGTHS)]
    whole = world.run(chunks)
    heads = shape.heads // shape.kv_heads
    for tactic in (AttentionTactic(1, 1, 1, 1, 1), AttentionTactic(5, min(heads, 3), 4, 2, 4)):
        assert bits(world.run(chunks, 2, tactic)) == bits(whole)
        last = [(3, 299, 300)]
        assert bits(world.run(last, 3, tactic)) == bits(whole[-1:])


@pytest.mark.parametrize("sku", sku_params(BF16))
def test_every_candidate_gives_the_same_bits(sku: str) -> None:
    world = World(SHAPES["gqa_bf16"], LENGTHS, sku)
    whole = world.run([(3, 0, 300)])
    kernel = compiled(world.call, sku).kernel
    assert isinstance(kernel, CpuPagedAttention)
    for variant in kernel.variants(world.call, compiled(world.call, sku).target):
        for rows in (1, 5, 17, 67):
            chunk = [(3, 300 - rows, 300)]
            assert bits(world.run(chunk, 2, variant.tactic)) == bits(whole[-rows:]), (variant, rows)


def test_huge_scores_stay_finite() -> None:
    world = World(SHAPES["gqa_f32"], [80], host_skus()[-1])
    world.queries[0] *= np.float32(1e4)
    chunk = [(0, 0, 80)]
    assert relative_error(world.run(chunk), world.reference(chunk)) < 1e-4


def test_reads_its_own_groups_block_table() -> None:
    world = World(SHAPES["gqa_f32"], [40], host_skus()[-1])
    step = world._step([(0, 0, 40)], world.table)
    step.kv_group = 3
    call = dataclasses.replace(world.call, kv_group=3)
    operands = (world.queries[0], None)
    (got,) = compiled(call, world.sku)(*operands, step=step, states=[pack_kv16(world.pages)])
    assert bits(got) == bits(world.run([(0, 0, 40)]))
