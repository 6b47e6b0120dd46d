"""The driver on a real engine file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pelton.runtime.drivers.cpu.driver import CpuDriver
from pelton.runtime.drivers.cpu.host import select_target
from pelton.runtime.errors import DriverError, EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.manifest import SCHEMA, Manifest, ModelInfo
from pelton.runtime.format.plan import StateSpec, encode_plan

from .tiny import RANGES, TARGET, VOCAB, TinyEngine, make_step


@pytest.fixture
def path(code, tmp_path):
    """An engine of the small kernels, whose weight is 0.75."""
    model = ModelInfo(
        architecture="Tiny",
        name="tiny",
        vocab_size=VOCAB,
        hidden_size=1,
        num_layers=3,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position_embeddings=64,
        dtype=DType.F32,
        eos_token_ids=(0,),
        bos_token_id=None,
        pad_token_id=None,
        generation_defaults={},
    )
    manifest = Manifest(
        schema=SCHEMA, pelton_version="0", model=model, ranges=RANGES, targets=(TARGET,), provenance={}, notes=()
    )
    plan = TinyEngine(code, ["bump_and_check cells errors"], ["tail w"]).plan(TARGET.key)
    sections = {f"plan/{TARGET.key}": encode_plan(plan), f"code/{TARGET.key}": code}
    where = tmp_path / "tiny.engine"
    with EngineWriter(where, manifest, [TensorSpec("w", DType.F32, (1,), "rows")], sections) as writer:
        writer.write_tensor("w", [np.array([0.75], np.float32)])
    return where


def test_weights_are_read_from_the_mapping(path):
    engine = EngineFile.open(path, verify_weights="before")
    driver = CpuDriver(engine, select_target(engine.manifest.targets), threads=2)
    driver.allocate((4, 4), 2)
    assert driver._bound.weights.addresses == [engine.tensor("w").ctypes.data]
    assert driver._bound.weights.addresses[0] % 4096 == 0
    engine.close()  # what the driver uses stays
    assert driver.execute(make_step()).result().logprobs.tolist() == [0.75]
    driver.close()


def test_a_kernel_cannot_write_to_weights(path):
    engine = EngineFile.open(path)
    assert not engine.tensor("w").flags.writeable
    engine.close()


def test_no_descriptor_or_mapping_is_left(path):
    def used() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("tiny.engine") + maps.count("pelton-code")

    before = used()
    for _ in range(3):
        engine = EngineFile.open(path, verify_weights="off")
        driver = CpuDriver(engine, TARGET, threads=2)
        driver.allocate((4, 4), 2)
        driver.execute(make_step())
        assert used() != before
        driver.close()
        engine.close()
        del engine, driver
    assert used() == before


def test_damage_found_in_the_background_stops_the_next_step(load):
    engine, driver = load(["bump cells"])
    driver.execute(make_step())
    engine.problem = "weights differ from their hash"
    with pytest.raises(EngineFormatError, match="differ"):
        driver.execute(make_step())
    assert (engine.read(driver, "cells") == 1).all()


def test_an_unknown_kv_layout_is_refused(code):
    states = (StateSpec(name="kv.0", kind="paged_kv", dtype=DType.F32, shape=(1, 2), layout="rows"),)
    with pytest.raises(DriverError, match="kv.0 has layout 'rows'"):
        CpuDriver(TinyEngine(code, [], states=states), TARGET, threads=1)
