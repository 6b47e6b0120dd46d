"""Sampling: the kernel against its meaning token by token, the meaning against first principles and chance."""

from __future__ import annotations

import ctypes
import dataclasses
import tempfile

import numpy as np
import pytest

from pelton.builder.codegen.cache import ObjectCache
from pelton.builder.codegen.cpu import compile_cpu
from pelton.builder.kernels import KernelRegistry, NoKernelError
from pelton.builder.ops.base import StepContext
from pelton.builder.ops.fused import ResolveTokens, Sample
from pelton.builder.ops.sampling_reference import WEIGHT_ONE, philox4x32, scaled_exponentials, uniform24
from pelton.builder.target import CPU_SKUS
from pelton.plugins import KERNELS
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TensorType
from pelton.runtime.step import FROM_HISTORY, StepInputs, StepOutputs

from .harness import F32, bits, compiled, make_call, run_workers, target_of
from .sampling_cases import (
    BEST_SKU,
    MAX_LOGPROBS,
    MAX_SEQ,
    SAMPLE_RANGES,
    by_kernel,
    by_meaning,
    native_step,
    plain,
    random_rows,
    sampling,
)

#: Known answers published with the Random123 library: counter, key, result.
PHILOX = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
#: 99.99 % quantile of chi-square by degrees of freedom.
CHI_SQUARE = {3: 21.11, 4: 23.51, 7: 29.88, 15: 44.26}


@pytest.mark.parametrize(("counter", "key", "want"), PHILOX)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]) -> None:
    assert philox4x32((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1])) == want


def test_philox_header_known_answers() -> None:
    source = """
#include "philox.h"
extern "C" void kat(const pelton_step *, void *const *args, pelton_worker *) {
  const uint32_t *in = static_cast<const uint32_t *>(args[0]);
  uint32_t *out = static_cast<uint32_t *>(args[1]);
  const pelton::PhiloxBlock b = pelton::philox4x32({{in[0], in[1], in[2], in[3]}}, in[4], in[5]);
  for (int i = 0; i < 4; ++i) out[i] = b.word[i];
  out[4] = pelton::uniform24((uint64_t{in[5]} << 32) | in[4], static_cast<int32_t>(in[0]));
}
"""
    data = compile_cpu([("kat", source)], CPU_SKUS["x86-64-v3"], cache=ObjectCache())
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        function = ctypes.CDLL(file.name).kat
    for counter, key, want in PHILOX:
        words, out = np.array([*counter, *key], np.uint32), np.zeros(5, np.uint32)
        function(None, (ctypes.c_void_p * 2)(words.ctypes.data, out.ctypes.data), None)
        assert tuple(out[:4]) == want
        assert out[4] == uniform24(
            key[1] << 32 | key[0], counter[0] if counter[0] < 1 << 31 else counter[0] - (1 << 32)
        )


def assert_same(got: StepOutputs, want: StepOutputs) -> None:
    for name in ("tokens", "ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, rtol=1e-6, atol=1e-5)
    assert got.logits is not None
    assert want.logits is not None
    assert bits(got.logits) == bits(want.logits)


@pytest.mark.parametrize(
    ("vocab", "batches", "sku"),
    [(1, 10, BEST_SKU), (17, 60, BEST_SKU), (1000, 60, BEST_SKU), (1000, 20, "x86-64-v3"), (49152, 2, BEST_SKU)],
)
def test_random_rows_against_meaning(vocab: int, batches: int, sku: str) -> None:
    rng = np.random.default_rng(vocab)
    for batch in range(batches):
        rows = random_rows(rng, int(rng.integers(1, 65)), vocab)
        want, history = by_meaning(rows)
        got, got_history = by_kernel(rows, sku, workers=1 + batch % 3)
        assert_same(got, want)
        np.testing.assert_array_equal(got_history, history)


def test_bits_do_not_depend_on_mates_chunks_or_workers() -> None:
    rng = np.random.default_rng(5)
    rows = random_rows(rng, 40, 1000)
    whole, history = by_kernel(rows)
    for workers, chunk in ((3, 40), (1, 7), (2, 1), (8, 33)):
        other, other_history = by_kernel(rows, workers=workers, chunk=chunk)
        for name in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
            assert bits(getattr(other, name)) == bits(getattr(whole, name)), (name, workers, chunk)
        np.testing.assert_array_equal(other_history, history)
    for row in range(40):
        alone, _ = by_kernel(rows.only(row))
        for name in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
            assert bits(getattr(alone, name)[0]) == bits(getattr(whole, name)[row]), (name, row)


def test_greedy_and_plain_sampling_need_no_scratch() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((8, 1000))
    greedy, _ = by_kernel(plain(logits, temperature=0, num_logprobs=5), scratch=False)
    np.testing.assert_array_equal(greedy.tokens, logits.astype(np.float32).argmax(1))
    by_kernel(plain(logits), scratch=False)


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 1e-40}]
)
def test_greedy_takes_the_lowest_id_of_a_tie(greedy: dict[str, float]) -> None:
    logits = np.zeros((1, 100))
    logits[0, [70, 40, 41]] = 3
    for outputs in (by_kernel(plain(logits, **greedy)), by_meaning(plain(logits, **greedy))):
        assert outputs[0].tokens[0] == 40


def frequencies(logits: np.ndarray, draws: int, **parameters: float) -> np.ndarray:
    """How often each id is drawn, over seeds."""
    rows = 64
    counts = np.zeros(len(logits))
    for start in range(0, draws, rows):
        case = plain(np.tile(logits, (rows, 1)), seed=np.arange(start, start + rows), **parameters)
        counts += np.bincount(by_kernel(case)[0].tokens, minlength=len(logits))
    return counts


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    allowed = probabilities > 0
    assert counts[~allowed].sum() == 0
    expected = counts.sum() * probabilities[allowed]
    return float(((counts[allowed] - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution() -> None:
    rng = np.random.default_rng(7)
    logits = rng.standard_normal(16).astype(np.float32)
    p = np.exp(logits.astype(np.float64) / 0.8)
    p /= p.sum()
    order = np.argsort(-p)
    counts = frequencies(logits, 19200, temperature=0.8)
    assert chi_square(counts, p) < CHI_SQUARE[15]

    best = np.zeros(16)
    best[order[:5]] = p[order[:5]]
    counts = frequencies(logits, 9600, temperature=0.8, top_k=5)
    assert chi_square(counts, best / best.sum()) < CHI_SQUARE[4]

    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.7)) + 1]
    nucleus = np.zeros(16)
    nucleus[kept] = p[kept]
    counts = frequencies(logits, 9600, temperature=0.8, top_p=0.7)
    assert chi_square(counts, nucleus / nucleus.sum()) < CHI_SQUARE[7 if len(kept) > 5 else 4]

    high = np.where(p >= 0.25 * p.max(), p, 0)
    counts = frequencies(logits, 9600, temperature=0.8, min_p=0.25)
    assert chi_square(counts, high / high.sum()) < CHI_SQUARE[15]


def test_top_p_follows_top_k_renormalised() -> None:
    """Probabilities 4:3:2:1; top_k 2 leaves 4/7 and 3/7; top_p 0.5 then leaves the first alone."""
    logits = np.log(np.array([2.0, 4.0, 1.0, 3.0]))
    assert frequencies(logits, 640, top_k=2, top_p=0.5).tolist() == [0, 640, 0, 0]
    both = frequencies(logits, 640, top_k=2, top_p=0.6)
    assert both[[0, 2]].tolist() == [0, 0]
    assert both.min(where=both > 0, initial=640) > 200
    assert frequencies(logits, 640, top_p=1e-9).tolist() == [0, 640, 0, 0]


def test_steps_and_seeds_give_independent_numbers() -> None:
    """The 24 bits that decide come out even over positions and over seeds, also those that differ in high bits only."""
    by_position = [uniform24(1, p) >> 20 for p in range(4000)]
    by_seed = [uniform24(s << 32, 9) >> 20 for s in range(4000)]
    for values in (by_position, by_seed):
        assert chi_square(np.bincount(values, minlength=16).astype(float), np.full(16, 1 / 16)) < CHI_SQUARE[15]
    assert np.mean(np.array(by_position) == np.array(by_seed)) < 0.1


def test_weights_are_close_to_exponentials_and_bins_stay_ordered() -> None:
    gap = np.linspace(0, 22, 300_001).astype(np.float32)
    got = scaled_exponentials(gap, np.float32(1))
    want = WEIGHT_ONE * np.exp(-gap.astype(np.float64))
    assert (np.abs(got - want) <= 2 * np.spacing(want.astype(np.float32))).all()
    assert got[0] == WEIGHT_ONE
    assert (np.diff(got) <= 0).all()


def test_penalties_by_hand() -> None:
    """History 1 2 | 2 3 3 4 with four prompt positions counted: the prompt is 1 2 2 3, the output 3 4."""
    logits = np.array([[1.0, 2.0, -2.0, 4.0, 4.0, 3.3]])
    rows = plain(
        logits, temperature=0, repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.5, prompt_len=4
    )
    rows.history[0, :6] = [1, 2, 2, 3, 3, 4]
    # 0: 1; 1: 2/2; 2: -2*2; 3: 4/2 - 0.5 - 0.25; 4: 4/2 - 0.75; 5: 3.3
    assert by_kernel(rows)[0].tokens[0] == 5
    banned = dataclasses.replace(rows, sampling=sampling(
        1, temperature=0, repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.5, prompt_len=4,
        bias=[{5: -np.inf}],
    ))  # fmt: skip
    for outputs, history in (by_kernel(banned), by_meaning(banned)):
        assert outputs.tokens[0] == 3
        assert history[0, 6] == 3
        assert outputs.logprobs[0] == pytest.approx(4 - np.log(np.exp(logits[0]).sum()), abs=1e-5), "of raw logits"


def test_frequency_counts_every_output_occurrence() -> None:
    logits = np.array([[0.0, 10.0, 9.0]])
    rows = plain(logits, temperature=0, frequency_penalty=0.4, prompt_len=2)
    rows.history[0, :6] = [1, 1, 1, 1, 0, 1]
    assert by_kernel(rows)[0].tokens[0] == 2, "10 - 3 * 0.4 < 9: prompt occurrences do not count"
    rows = plain(logits, temperature=0, frequency_penalty=0.3, prompt_len=2)
    rows.history[0, :6] = [1, 1, 1, 1, 0, 1]
    assert by_kernel(rows)[0].tokens[0] == 1


def test_mask_and_bias_decide_alone() -> None:
    logits = np.random.default_rng(8).standard_normal((3, 70)).astype(np.float32)
    mask = np.zeros((3, 3), np.uint32)
    mask[0, 2] = 1 << 5  # only token 69
    mask[1, 0] = 1 << 31  # only token 31
    mask[2] = 0xFFFFFFFF
    parameters = {"top_p": np.array([1, 0.9, 1]), "mask": mask, "bias": [{}, {}, {i: -np.inf for i in range(69)}]}
    for outputs, _ in (by_kernel(plain(logits, **parameters)), by_meaning(plain(logits, **parameters))):
        assert outputs.tokens.tolist() == [69, 31, 69]


def test_broken_logits_have_a_defined_result() -> None:
    logits = np.full((4, 50), np.nan)
    logits[1, 30] = -5
    logits[2] = -np.inf
    logits[3, [20, 30]] = np.inf
    for outputs, _ in (by_kernel(plain(logits)), by_meaning(plain(logits))):
        assert outputs.tokens[:3].tolist() == [0, 30, 0]
        assert outputs.tokens[3] in (20, 30)
        assert outputs.logprobs[[0, 2]].tolist() == [-np.inf, -np.inf]
        assert outputs.logprobs[1] == 0
        assert outputs.logprobs[3] == pytest.approx(-np.log(2), abs=1e-6)


#: Every way to a token: greedy, the draw in id order, the draw among the best.
WAYS: list[dict[str, float]] = [
    {"temperature": 0},
    {},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.5, "temperature": 1e-6},
    {"top_k": 2, "top_p": 0.99, "temperature": 1e6},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sku", dict.fromkeys(("x86-64-v3", BEST_SKU)))
def test_where_nothing_is_allowed_the_token_is_0(way: dict[str, float], sku: str) -> None:
    """All bits of the mask 0, or all by bias, or no logit that is a number; logprobs are of the raw logits."""
    logits = np.random.default_rng(3).standard_normal((3, 70)).astype(np.float32)
    logits[2] = np.nan
    mask = np.full((3, 3), 0xFFFFFFFF, np.uint32)
    mask[0] = 0
    rows = plain(logits, mask=mask, bias=[{}, {i: -np.inf for i in range(70)}, {}], num_logprobs=2, **way)
    for outputs, history in (by_kernel(rows, sku), by_meaning(rows)):
        assert outputs.tokens.tolist() == [0, 0, 0]
        assert (history[:, 6] == 0).all()
        wide = logits[:2].astype(np.float64)
        want = wide[:, 0] - np.log(np.exp(wide).sum(1))
        np.testing.assert_allclose(outputs.logprobs[:2], want, atol=1e-5)
        assert outputs.logprobs[2] == -np.inf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sku", dict.fromkeys(("x86-64-v3", BEST_SKU)))
def test_huge_logits_overflow_nothing(way: dict[str, float], sku: str) -> None:
    """Differences, penalties and biases that leave fp32: no NaN, and the same token as by the meaning."""
    big = np.float32(3.4e38)
    logits = np.full((5, 70), -big)
    logits[0, 33] = big  # the gap overflows
    logits[1, [12, 40]] = np.inf  # a tie of the largest
    logits[2, :] = big  # flat, and repetition divides or multiplies some away
    logits[3, 5] = np.nan
    logits[3, 6] = -np.inf
    logits[3, 7] = 0
    logits[4, 9] = big  # bias goes over the largest
    rows = plain(
        logits,
        repetition_penalty=np.array([1, 1, 0.5, 2, 1]),
        presence_penalty=np.array([0, 0, 0, 2, 0]),
        frequency_penalty=np.array([0, 2, 0, 0, -2]),
        bias=[{}, {12: 100.0}, {}, {5: 100.0, 6: 100.0}, {9: 100.0, 10: -100.0}],
        num_logprobs=3,
        **way,
    )
    rows.history[:, :6] = [1, 2, 3, 12, 12, 40]
    got, history = by_kernel(rows, sku)
    want, history_wanted = by_meaning(rows)
    assert_same(got, want)
    np.testing.assert_array_equal(history, history_wanted)
    assert got.tokens[0] == 33
    assert got.tokens[1] in (12, 40)
    assert got.tokens[3] == 7
    assert got.tokens[4] == 9
    assert not np.isnan(got.logprobs).any()
    assert not np.isnan(got.top_logprobs).any()
    assert got.logprobs[0] == 0
    assert got.logprobs[1] == pytest.approx(-np.log(2), abs=1e-6)


def test_logprobs_ranks_and_forced_rows() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0, 0.0]] * 3)
    rows = plain(logits, temperature=0, num_logprobs=np.array([3, 0, -1]), forced=np.array([2, -1, 4]))
    outputs, history = by_kernel(rows)
    logprobs = logits[0] - np.log(np.exp(logits[0]).sum())
    assert outputs.tokens.tolist() == [2, 1, 4]
    assert outputs.ranks.tolist() == [2, 1, 0]
    np.testing.assert_allclose(outputs.logprobs, [logprobs[2], logprobs[1], 0], atol=1e-6)
    assert outputs.top_ids.tolist() == [[1, 2, 3, -1, -1, -1], [-1] * 6, [-1] * 6]
    np.testing.assert_allclose(outputs.top_logprobs[0, :3], logprobs[[1, 2, 3]], atol=1e-6)
    assert history[:, 6].tolist() == [0, 1, 0], "forced rows leave the history alone"


def test_the_last_position_has_no_successor_in_the_history() -> None:
    rows = plain(np.eye(2, 9), temperature=0)
    rows.positions[:] = MAX_SEQ - 1
    outputs, history = by_kernel(rows)
    assert outputs.tokens.tolist() == [0, 1]
    assert not history.any()


@pytest.mark.parametrize("workers", [1, 3])
def test_resolve_tokens(workers: int) -> None:
    rng = np.random.default_rng(9)
    history = rng.integers(0, 100, (5, MAX_SEQ)).astype(np.int32)
    ids = rng.integers(0, 100, 11).astype(np.int32)
    ids[[2, 4, 10]] = FROM_HISTORY
    step = StepInputs(
        token_ids=ids,
        positions=np.array([7, 8, 9, 0, 39, 3, 4, 5, 6, 7, 8], np.int32),
        query_start=np.array([0, 3, 4, 5, 11], np.int32),
        seq_slots=np.array([4, 0, 2, 1], np.int32),
        block_tables=(),
        logits_rows=np.zeros(0, np.int32),
        row_seq=np.zeros(0, np.int32),
        sampling=sampling(0),
    )
    wanted = history.copy()
    (want,) = ResolveTokens().reference(StepContext(step, {"history": wanted}, {}, 16), ids)
    assert want[2] == history[4, 9]
    assert wanted[4, 7] == ids[0]
    kernel = compiled(make_call(ResolveTokens(), TensorType(DType.I32, ("T",)), ranges=SAMPLE_RANGES), BEST_SKU)
    out = np.zeros(11, np.int32)
    native, _alive = native_step(step, None, 0, 0)
    run_workers(
        kernel.function, native, (ctypes.c_void_p * 3)(ids.ctypes.data, out.ctypes.data, history.ctypes.data), workers
    )
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(history, wanted)


def test_scratch_is_for_the_rows_in_work() -> None:
    kernel = next(k for k in KERNELS if k.name == "cpu.sample")
    call = make_call(Sample(1000, MAX_LOGPROBS), TensorType(F32, ("C", 1000)), ranges=SAMPLE_RANGES)
    assert kernel.scratch_bytes(call, target_of("x86-64-v3")) == 64 * (12000 + 32)


def test_a_vocabulary_beyond_exact_sums_is_refused() -> None:
    call = make_call(Sample(1 << 23, 0), TensorType(F32, ("C", 1 << 23)))
    with pytest.raises(NoKernelError, match="larger than 4194304"):
        KernelRegistry(KERNELS).select(call, target_of("x86-64-v3"))
