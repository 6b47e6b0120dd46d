"""The driver on a real engine file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pelton._core import WeightMap
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


@pytest.mark.parametrize("place", ["map", "background", "copy"])
def test_weights_outlive_the_engine_file(path, place):
    engine = EngineFile.open(path, verify_weights="before")
    driver = CpuDriver(engine, select_target(engine.manifest.targets), threads=2, weights=place)
    driver.allocate((4, 4), 2)
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


@pytest.mark.parametrize("place", ["map", "background", "copy"])
def test_damaged_weights_stop_the_driver_that_checks_them(path, place):
    with EngineFile.open(path) as engine:
        offset = engine.tensor_location("w")[0]
    with path.open("r+b") as stream:
        stream.seek(offset + 1)
        stream.write(b"\x55")
    heard = []
    with EngineFile.open(path, on_problem=heard.append) as engine:
        driver = CpuDriver(engine, TARGET, threads=2, weights=place)
        driver.allocate((4, 4), 2)
        with pytest.raises(EngineFormatError, match=r"weights are damaged at bytes \d+:\d+ \(w\)"):
            engine.wait_verified(30)
        assert len(heard) == 1
        assert engine.problems == heard
        with pytest.raises(EngineFormatError, match="damaged"):
            driver.execute(make_step())
        driver.close()


def test_a_driver_that_closes_early_leaves_the_check_undone_for_the_next(path, monkeypatch):
    monkeypatch.setattr(WeightMap, "start", lambda self: None)
    with EngineFile.open(path) as engine:
        CpuDriver(engine, TARGET, threads=1).close()
        assert not engine.wait_verified(0)
        assert engine.weights_file().digests
        driver = CpuDriver(engine, TARGET, threads=1, weights="copy")
        assert engine.wait_verified(0)
        assert not engine.weights_file().digests
        driver.close()


@pytest.mark.parametrize(("free", "moves"), [(0, False), (512 << 20, False), (1 << 40, True)])
def test_weights_stay_on_the_file_when_memory_is_short(path, monkeypatch, free, moves):
    monkeypatch.setattr("pelton.runtime.drivers.cpu.weights.available_memory", lambda: free)
    asked = []

    def make(fd, start, nbytes, digests, move):
        asked.append(move)
        return WeightMap(fd, start, nbytes, digests, move)

    monkeypatch.setattr("pelton.runtime.drivers.cpu.weights.WeightMap", make)
    with EngineFile.open(path) as engine:
        driver = CpuDriver(engine, TARGET, threads=1)
        driver.allocate((4, 4), 2)
        assert driver.execute(make_step()).result().logprobs.tolist() == [0.75]
        assert engine.wait_verified(30)  # checked all the same
        assert driver.moving_bytes == 0
        driver.close()
    assert asked == [moves]


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
