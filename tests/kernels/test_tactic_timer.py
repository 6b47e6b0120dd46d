"""The tactic timer on real kernels: it runs every variant, times it, and compares its bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.builder.kernels import KernelCall, KernelRegistry
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Gemm
from pelton.builder.tactic_timer import TacticTimer
from pelton.builder.tactics import Tunable, variants_of, workloads
from pelton.builder.target import Target
from pelton.builder.trial import Trial
from pelton.plugins import KERNELS
from pelton.plugins.gemm.cpu import CpuGemm
from pelton.plugins.gemm.tactics import GemmTactic
from pelton.runtime.errors import TacticError
from pelton.runtime.format.tensor_type import TensorType

from ..builder.test_tactics import attention_call, gemm_call
from .harness import BF16, F32, host_skus, make_call, target_of


def fused_call() -> KernelCall:
    """A GEMM with every optional operand, rows of the tail."""
    op = Gemm(40, BF16, F32, prologue="rms_norm", eps=1e-5, bias=True, activation="silu", gated=True, residual=True)
    types = [TensorType(F32, ("C", 50)), TensorType(BF16, (96, 50), "panel16"), TensorType(F32, (50,))]
    return make_call(op, *types, TensorType(F32, (96,)), TensorType(F32, ("C", 40)))


CALLS = {
    "gemm": gemm_call(48, 64),
    "fused": fused_call(),
    "attention": attention_call(6, 2, 32),
    "window": dataclasses.replace(
        attention_call(6, 2, 32), op=dataclasses.replace(attention_call(6, 2, 32).op, window=20), kv_group=2
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_times_every_variant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.builder.tactic_timer._SECONDS", 0.01)
    call, target = CALLS[name], target_of(host_skus()[-1])
    variants = variants_of(KernelRegistry(KERNELS).select(call, target), call, target)[:3]
    steps = workloads(call)
    seconds = TacticTimer(None, tmp_path, 1)(call, target, variants, steps)
    assert [len(row) for row in seconds] == [len(steps)] * len(variants)
    assert len(variants) > 1
    assert all(0 < time < 1 for row in seconds for time in row)


@dataclass(frozen=True)
class WrongGemm:
    """A GEMM of which one tactic also scales: what a faulty template would be."""

    tactic: GemmTactic | None = None
    name: str = "cpu.gemm.wrong"
    op: type[Op] = Gemm
    generic: bool = False

    def _plain(self) -> CpuGemm:
        return CpuGemm("plain", 256, "none", tactic=self.tactic)

    def refuse(self, call: KernelCall, target: Target) -> str | None:
        return None

    def scratch_bytes(self, call: KernelCall, target: Target) -> int:
        return self._plain().scratch_bytes(call, target)

    def variants(self, call: KernelCall, target: Target) -> Sequence[Tunable]:
        return [WrongGemm(GemmTactic(rows, 1, 256, 64)) for rows in (4, 5)]

    def emit(self, call: KernelCall, target: Target, symbol: str) -> str:
        if self.tactic is not None and self.tactic.tile_rows == 5:
            call = dataclasses.replace(call, op=dataclasses.replace(call.op, scale=1.0000001))  # type: ignore[call-arg]
        return self._plain().emit(call, target, symbol)


def test_other_bits_are_an_error(tmp_path: Path) -> None:
    call, target = gemm_call(32, 48, F32), target_of(host_skus()[0])
    variants = variants_of(WrongGemm(), call, target)
    with pytest.raises(TacticError) as raised:
        TacticTimer(None, tmp_path, 1)(call, target, variants, workloads(call))
    for part in ("cpu.gemm.wrong", "tile_rows 5", "tile_rows 4", "8 tokens", "without --autotune"):
        assert part in str(raised.value)


@pytest.mark.parametrize("name", CALLS)
def test_trial_plans(name: str) -> None:
    """Every variant runs equally often, in other places of the turn; the cold operand changes from launch to launch."""
    call, target = CALLS[name], target_of(host_skus()[-1])
    variants = variants_of(KernelRegistry(KERNELS).select(call, target), call, target)
    trial = Trial(call, target, variants, workloads(call), 1 << 20)
    plan = trial.plan("")
    ran = [launch.kernel for launch in plan.launches]
    assert {ran.count(i) for i in range(len(variants))} == {len(ran) // len(variants)}
    cold = [(launch.states or launch.inputs[1:2])[0].index for launch in plan.launches]
    assert all(a != b for a, b in zip(cold, cold[1:], strict=False))
    assert {dim for buffer in plan.buffers for dim in buffer.shape if isinstance(dim, str)} == {"T"}
    outputs = {launch.outputs[0].index for launch in plan.launches}
    assert outputs == set(range(len(variants)))
    for workload in workloads(call):
        step = trial.step(workload)
        assert step.num_tokens == workload.tokens <= plan.ranges.max_num_tokens
        used = step.block_tables[0][step.block_tables[0] >= 0]
        assert len(set(used.tolist())) == used.size


def test_trial_values_are_no_padding_and_no_constant() -> None:
    call, target = gemm_call(512, 300), target_of(host_skus()[-1])
    trial = Trial(
        call, target, variants_of(KernelRegistry(KERNELS).select(call, target), call, target), workloads(call), 1
    )
    weight: Any = trial.tensor("1.0")
    values = weight.astype(np.float32)
    assert np.isfinite(values).all()
    assert 0.5 < values.std() * 300**0.5 < 2
    assert msgspec.structs.asdict(trial.plan("").weights[1])["layout"] == "panel16"
    rows = values.reshape(512 // 16, -1)
    assert len({row.tobytes() for row in rows}) == len(rows)
