"""AMX tiles, emulated or the CPU's own: the instruction's arithmetic, the kernels' bits, the compiled object."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pelton.builder.codegen.cache import ObjectCache
from pelton.builder.codegen.cpu import compile_cpu
from pelton.builder.kernels import KernelRegistry
from pelton.plugins import KERNELS
from pelton.plugins.attention.cpu import CpuPagedAttention
from pelton.plugins.gemm.cpu import CpuGemm
from pelton.plugins.gemm.tactics import AmxTactic

from . import amx
from .harness import BF16, F32, RANGES, GuardedArrays, Inputs, bits, compiled, random_array, relative_error, target_of
from .test_attention import LONG, SHAPES, TOLERANCE, Shape, World, check_bits
from .test_gemm import CASES, PACKED_CASES, Case

pytestmark = pytest.mark.isa("avx512_bf16")
EMULATED, TRAPPED = amx.EMULATED_AMX.name, amx.TRAPPED_AMX.name
NAMES = ("direct_bf16", "crowded_bf16", "odd_bf16", "gated_bf16", "cast_bf16")
#: 35 steps of k, the last of which is 12 of 32.
DEEP = Case(80, 1100, 70, F32, BF16, F32, bias=True)


def special_values(rng: np.random.Generator, count: int) -> np.ndarray:
    """fp32 numbers near the least normal one, of all sizes, and zeros."""
    near = np.float32(2) ** rng.integers(-130, -120, count).astype(np.float32)
    wide = np.float32(2) ** rng.integers(-140, 60, count).astype(np.float32)
    values = np.where(rng.random(count) < 0.5, near, wide) * rng.choice([-1, 1], count) * (1 + rng.random(count))
    return np.where(rng.random(count) < 0.1, 0, values).astype(np.float32)


def as_bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(BF16.numpy).astype(np.float32)


def test_the_emulated_sum_of_a_product_is_exact() -> None:
    """Against rational arithmetic; also where a result is tiny before, but not after rounding, and the reverse."""
    rng = np.random.default_rng(5)
    fma = amx.trap().amx_fma
    a, b, c = (special_values(rng, 4000) for _ in range(3))
    cases = list(zip(as_bf16(a), as_bf16(b), c, strict=True))
    least = np.float32(2.0**-126)
    for eighths in range(1, 33):  # 2^-126 - eighths / 8 of 2^-150
        cases.append((np.float32(-eighths * 2.0**-70), np.float32(2.0**-83), least))
    for x, y, z in cases:
        want, got = amx.fma_model(x, y, z), np.float32(fma(x, y, z))
        assert got == want, (x, y, z)
        assert got == 0 or abs(got) >= least


def test_the_emulated_dot_product_sums_as_the_manual_says() -> None:
    rng = np.random.default_rng(6)
    run = amx.trap().amx_dot_row
    for scale in (1.0, 1e-19, 1e19):
        a = random_array(rng, (32,), BF16, scale)
        b = random_array(rng, (32, 16), BF16)
        start = random_array(rng, (16,), F32, scale)
        sums, tile = start.copy(), np.ascontiguousarray(b.reshape(16, 2, 16).transpose(0, 2, 1))
        run(sums.ctypes.data, a.ctypes.data, tile.ctypes.data, 16, 16)
        wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
        assert list(sums) == [amx.dot_model(wide_a, wide_b[:, n], start[n]) for n in range(16)]


@pytest.mark.parametrize("case", [*(CASES[n] for n in NAMES), DEEP], ids=[*NAMES, "deep"])
def test_every_row_count_gives_the_same_bits(case: Case) -> None:
    count = case.arrays[0].shape[0]
    whole = case.run(EMULATED, slice(0, count))
    assert relative_error(whole, case.reference(slice(0, count))) < 1e-2
    for rows in range(1, count + 1):
        start = (7 * rows) % (count - rows + 1)
        got = case.run(EMULATED, slice(start, start + rows), workers=1 + rows % 4)
        assert bits(got) == bits(whole[start : start + rows]), rows


TACTICS = [
    *(AmxTactic(64, 1000, 16), AmxTactic(32, 1, 1), AmxTactic(32, 2, 2), AmxTactic(96, 2, 3)),
    *(AmxTactic(64, 7, 1), AmxTactic(64, 1, 16), AmxTactic(1, 3, 2)),
]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda t: "-".join(map(str, dataclasses.astuple(t))))
def test_never_depends_on_the_tactic(tactic: AmxTactic) -> None:
    for case in (CASES["gated_bf16"], CASES["odd_bf16"], DEEP):
        kernel = dataclasses.replace(_kernel(case, EMULATED), tactic=tactic)
        count = case.arrays[0].shape[0]
        whole = case.run(EMULATED, slice(0, count))
        for rows, workers in ((count, 1), (count, 3), (65, 2), (33, 2), (17, 1), (5, 2)):
            assert bits(_run(case, EMULATED, rows, workers, kernel)) == bits(whole[:rows]), (rows, workers)


@pytest.mark.parametrize("name", ["half_a_panel", "gated", "blocks_of_k", "one_block"])
def test_packed_weights_give_the_same_bits(name: str) -> None:
    """What the same weight gives in panel16; the instructions themselves, too."""
    case = PACKED_CASES[name]
    packed = case.in_packed12()
    whole = case.run(EMULATED, slice(0, 67))
    for tactic in (None, AmxTactic(32, 2, 2), AmxTactic(64, 1, 3)):
        for rows in (1, 5, 16, 17, 32, 33, 48, 63, 67):
            got = packed.run(EMULATED, slice(0, rows), 1 + rows % 3, tactic)
            assert bits(got) == bits(whole[:rows]), (tactic, rows)
    with amx.tile_instructions():
        for rows in (40, 67):
            got = _run(packed, TRAPPED, rows, 2, _kernel(packed, TRAPPED))
            assert bits(got) == bits(whole[:rows])


@pytest.mark.parametrize("k", [8, 24, 40])
def test_a_pair_of_panels_with_fewer_steps_than_are_brought_ahead(k: int) -> None:
    """Panels are brought a step or two ahead: here of one or two pairs further on, and of none behind the last."""
    case = Case(200, k, 67, F32, BF16, F32, bias=True)
    whole = case.run(EMULATED, slice(0, 67))
    assert relative_error(whole, case.reference(slice(0, 67))) < 1e-2
    for layout, rows, workers in itertools.product((case, case.in_packed12()), (1, 16, 33, 64), (1, 2, 9)):
        got = layout.run(EMULATED, slice(3, 3 + rows), workers)
        assert bits(got) == bits(whole[3 : 3 + rows]), (layout.call.inputs[1].layout, rows, workers)


@pytest.mark.parametrize("k", [64, 1100])
def test_more_rows_than_pass_by_at_once(k: int) -> None:
    """The model's own tactic: its super rows are 512, or 256."""
    case = Case(40, k, 530, F32, BF16, F32, residual=True)
    case.call = dataclasses.replace(case.call, ranges=msgspec.structs.replace(RANGES, max_num_tokens=530))
    whole = case.run(EMULATED, slice(0, 530))
    assert relative_error(whole, case.reference(slice(0, 530))) < 1e-2
    assert bits(case.run(EMULATED, slice(0, 530), workers=3)) == bits(whole)
    for start in (0, 240, 500):
        assert bits(case.run(EMULATED, slice(start, start + 30))) == bits(whole[start : start + 30])


def test_a_weight_and_rows_are_not_read_past_their_ends() -> None:
    """Operands end where an unreadable page begins."""
    named = [CASES[name] for name in ("odd_bf16", "gated_bf16", "direct_bf16")]
    named += [PACKED_CASES[name].in_packed12() for name in ("half_a_panel", "residual", "one_block")]
    for case, rows in itertools.product(named, (1, 16, 40, 48, 67)):
        operands = [np.ascontiguousarray(a) for a in case.operands(slice(0, rows))]
        operands[1] = case.packed
        expected = bits(case.run(EMULATED, slice(0, rows)))
        with GuardedArrays() as guarded:
            placed = [guarded(a) if i < 2 else a for i, a in enumerate(operands)]
            got = compiled(case.call, EMULATED)(*placed, step=Inputs(rows), workers=2)[0]
        assert bits(got) == expected


def test_the_instructions_themselves_give_the_emulations_bits() -> None:
    """Compiled with AMX as for sapphirerapids; tile instructions are the CPU's, or trapped and done in software."""
    with amx.tile_instructions() as library:
        for case in (*(CASES[n] for n in NAMES), DEEP):
            before = library.amx_trap_count()
            for rows, workers in ((1, 1), (5, 2), (16, 1), (19, 1), (32, 3), (40, 2), (63, 2), (67, 2)):
                got = _run(case, TRAPPED, rows, workers, _kernel(case, TRAPPED))
                assert bits(got) == bits(case.run(EMULATED, slice(0, rows))), (rows, workers)
            assert amx.HAS_TILES or library.amx_trap_count() > before


ATTENTION = {
    **{name: SHAPES[name] for name in ("gqa_bf16", "odd_bf16", "big_bf16", "window_bf16", "capped_bf16")},
    "edges": Shape(17, 1, 40, BF16, window=5, softcap=3.0, tokens_per_block=48),
    "window_in_a_step": Shape(2, 1, 80, BF16, window=100),
    "itself_alone": Shape(2, 2, 32, BF16, window=1),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_tiles(name: str) -> None:
    """What every attention kernel must do; and the instructions themselves give the same bits."""
    world = World(ATTENTION[name], [3, 100, 64, 140], EMULATED)
    check_bits(world)
    everything = [(s, 0, n) for s, n in enumerate(world.lengths)]
    whole = world.run(everything)
    with amx.tile_instructions():
        got = World(ATTENTION[name], world.lengths, TRAPPED).run(everything)
    assert bits(got) == bits(whole)
    kernel = world.kernel()
    assert isinstance(kernel.kernel, CpuPagedAttention)
    variants = kernel.kernel.variants(world.call, kernel.target)
    assert len(variants) > 1
    for variant in variants:
        assert bits(world.run(everything, 2, variant.tactic)) == bits(whole)


def test_attention_on_tiles_shared_by_workers() -> None:
    world = World(LONG["long_window_bf16"], [900], EMULATED)
    whole = world.run([(0, 890, 900)])
    assert relative_error(whole, world.reference([(0, 890, 900)])) < TOLERANCE[BF16]
    for workers in (2, 3):
        assert bits(world.run([(0, 899, 900)], workers)) == bits(whole[-1:])
        assert bits(world.run([(0, 898, 900)], workers)) == bits(whole[-2:])


def test_the_object_for_sapphirerapids_has_tile_instructions(tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump (binutils)")
    target = target_of("sapphirerapids")
    kernel = _kernel(CASES["gated_bf16"], "sapphirerapids")
    assert kernel.name == "cpu.gemm.amx_bf16"
    assert target.sku is not None
    source = kernel.emit(CASES["gated_bf16"].call, target, "kernel")
    path = tmp_path / "kernel.so"
    path.write_bytes(compile_cpu([("kernel", source)], target.sku, cache=ObjectCache(tmp_path)))
    run = subprocess.run([objdump, "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True)
    found = Counter(line.split()[1] for line in run.stdout.splitlines() if line.startswith("    "))
    for name in ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tdpbf16ps", "tilestored"):
        assert found[name] > 0, name
    assert found["vdpbf16ps"] == 0


def _kernel(case: Case, sku: str) -> CpuGemm:
    kernel = KernelRegistry(KERNELS).select(case.call, target_of(sku))
    assert isinstance(kernel, CpuGemm)
    return kernel


def _run(case: Case, sku: str, rows: int, workers: int, kernel: CpuGemm) -> np.ndarray:
    operands = [np.ascontiguousarray(a) for a in case.operands(slice(0, rows))]
    operands[1] = case.packed
    return compiled(case.call, sku, kernel)(*operands, step=Inputs(rows), workers=workers)[0]
