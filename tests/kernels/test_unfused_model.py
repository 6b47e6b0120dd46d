"""A model whose patterns no pass recognises still runs, on generic kernels, and the engine says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pelton
from pelton.builder.passes import pipeline
from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.drivers.cpu.host import select_target
from pelton.runtime.format.container import EngineFile
from tests.builder.feeder import Feeder
from tests.models import make_tiny, reference_logits

#: Passes that recognise patterns; without them norms, rope, MLP and projections stay as traced.
RECOGNISERS = {
    "rms_norm",
    "rope",
    "gated_mlp",
    "merge_qkv",
    "linear_to_gemm",
    "gemm_prologue",
    "gemm_epilogue",
    "fuse_qkv_rope_write",
}
PROMPT = [int(t) for t in np.random.default_rng(3).integers(5, 300, 40)]


def test_unrecognised_patterns_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PASSES", tuple(p for p in pipeline.PASSES if p.name not in RECOGNISERS))
    folder, out = make_tiny("qwen3", tmp_path / "model"), tmp_path / "model.engine"
    result = pelton.build(folder, out, dtype="float32")
    assert any("generic" in note for note in result.notes)
    engine = EngineFile.open(out)
    target = select_target(engine.manifest.targets)
    logits = []
    for threads, chunk in ((2, 40), (1, 7)):
        driver = CpuDriver(engine, target, threads=threads)
        kernels = {driver.plan.kernels[launch.kernel].kernel for launch in driver.plan.launches}
        assert {"cpu.generic.binary", "cpu.generic.linear", "cpu.generic.reduce", "cpu.generic.concat"} <= kernels
        feeder = Feeder(driver)
        parts = [feeder.feed((0, PROMPT[i : i + chunk]))[0] for i in range(0, len(PROMPT), chunk)]
        logits.append(np.concatenate(parts))
        driver.close()
    engine.close()
    np.testing.assert_array_equal(logits[0], logits[1])
    want = reference_logits(folder, PROMPT)
    assert np.abs(logits[0] - want).max() < 1e-5 * np.abs(want).max()
