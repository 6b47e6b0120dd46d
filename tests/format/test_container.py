"""The engine file: written, read back by our reader and by the official one, placed atomically."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from pelton.runtime.errors import BuildError, EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.weight_eval import unpack

from .engines import GOLDEN, KEY, SPECS, manifest, plan, sections, storage, write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("engine") / "tiny.engine")


def test_everything_comes_back(path: Path) -> None:
    with EngineFile.open(path, verify_weights="before") as engine:
        assert engine.manifest == manifest()
        assert engine.check() == []
        assert list(engine.tensors.values()) == list(SPECS)
        for name, data in sections().items():
            assert engine.section(name) == data
        assert engine.section("golden") == GOLDEN
        assert bytes(engine.code(KEY)) == sections()[f"code/{KEY}"]
        assert engine.plan(KEY) == plan()
        for name, array in storage().items():
            read = engine.tensor(name)
            assert read.dtype == array.dtype
            assert read.shape == array.shape
            assert read.tobytes() == array.tobytes()
            assert not read.flags.writeable
            offset, nbytes = engine.tensor_location(name)
            assert offset % 4096 == 0
            assert nbytes == array.nbytes
        assert unpack(engine.tensor("embed"), SPECS[0].type).shape == (40, 7)


def test_official_reader_opens_it(path: Path) -> None:
    arrays = storage()
    with safetensors.safe_open(path, framework="numpy") as official:
        assert official.metadata()["format"] == "pelton-engine"
        for name in ("norm", "table", "big", "scalar"):
            assert official.get_tensor(name).tobytes() == arrays[name].tobytes()
        assert official.get_tensor(f"section/code/{KEY}").tobytes() == sections()[f"code/{KEY}"]


def test_same_input_same_bytes(path: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "other.engine").read_bytes() == path.read_bytes()


def test_chunks_of_any_size_give_the_same_file(path: Path, tmp_path: Path) -> None:
    arrays = storage()
    out = tmp_path / "chunked.engine"
    with EngineWriter(out, manifest(), SPECS, sections(), {"golden": 100}) as writer:
        for spec in SPECS:
            data = arrays[spec.name].tobytes()
            writer.write_tensor(spec.name, (data[i : i + 65521] for i in range(0, len(data), 65521)))
        writer.fill("golden", GOLDEN)
    assert out.read_bytes() == path.read_bytes()
    assert out.stat().st_size == writer.file_size


def test_views_outlive_close(path: Path) -> None:
    engine = EngineFile.open(path)
    norm = engine.tensor("norm")
    engine.close()
    assert norm.tobytes() == storage()["norm"].tobytes()


def test_reader_sees_the_unfinished_file(tmp_path: Path) -> None:
    arrays = storage()
    with EngineWriter(tmp_path / "e", manifest(), SPECS, sections(), {"golden": 100}) as writer:
        with pytest.raises(BuildError, match="6 tensors are not written"):
            writer.reader()
        for spec in SPECS:
            writer.write_tensor(spec.name, [arrays[spec.name]])
        reader = writer.reader()
        assert reader.tensor("embed").tobytes() == arrays["embed"].tobytes()
        assert reader.plan(KEY) == plan()
        assert reader.manifest == manifest()
        writer.fill("golden", GOLDEN)
        assert not (tmp_path / "e").exists()
    assert sorted(os.listdir(tmp_path)) == ["e"]


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


@pytest.mark.parametrize("kind", [ValueError, Interrupt])
def test_exception_leaves_the_old_file_and_no_temporary(tmp_path: Path, kind: type[BaseException]) -> None:
    out = tmp_path / "e"
    out.write_bytes(b"old")

    def stop_midway() -> None:
        with EngineWriter(out, manifest(), SPECS, sections()) as writer:
            writer.write_tensor("embed", [storage()["embed"]])
            assert any(name.startswith(".e.tmp-") for name in os.listdir(tmp_path))
            raise kind

    with pytest.raises(kind):
        stop_midway()
    assert os.listdir(tmp_path) == ["e"]
    assert out.read_bytes() == b"old"


def test_incomplete_engine_is_not_placed(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match="not written yet: 'embed'"),
        EngineWriter(tmp_path / "e", manifest(), SPECS, {}),
    ):
        pass
    with (
        pytest.raises(BuildError, match="never filled: golden"),
        EngineWriter(tmp_path / "e", manifest(), [], {}, {"golden": 5}),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for out, message in ((tmp_path, "it is a folder"), (tmp_path / "no" / "e", "does not exist; create it")):
        with pytest.raises(BuildError, match=message), EngineWriter(out, manifest(), [], {}):
            pass

    def refuse(*arguments: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(BuildError, match="Permission denied in .*choose a folder you may write to"),
        EngineWriter(tmp_path / "e", manifest(), [], {}),
    ):
        pass


def test_no_room_is_noticed_before_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match="MB free; make room"),
        EngineWriter(tmp_path / "e", manifest(), [TensorSpec("huge", DType.U8, (1 << 44,))], {}),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_disk_full_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = storage()

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_up() -> None:
        with EngineWriter(tmp_path / "e", manifest(), SPECS, sections()) as writer:
            monkeypatch.setattr(os, "pwrite", full)
            writer.write_tensor("embed", [arrays["embed"]])

    with pytest.raises(BuildError, match="No space left .*make room"):
        fill_up()
    assert os.listdir(tmp_path) == []


def test_wrong_use_of_the_writer(tmp_path: Path) -> None:
    spec = TensorSpec("w", DType.F32, (2,))
    cases: list[tuple[str, Any]] = [
        ("gives 4 bytes, and its type", lambda w: w.write_tensor("w", [np.zeros(1, np.float32)])),
        ("more than its 8 bytes", lambda w: w.write_tensor("w", [b"123456789"])),
        ("is f32, and its data came as float64", lambda w: w.write_tensor("w", [np.zeros(2)])),
        ("the next is 'w'", lambda w: w.write_tensor("v", [])),
        ("was not reserved; reserved: golden", lambda w: w.fill("report", b"")),
        ("room for 5 bytes, not 6", lambda w: w.fill("golden", b"123456")),
    ]
    for message, use in cases:
        with (
            pytest.raises(BuildError, match=message),
            EngineWriter(tmp_path / "e", manifest(), [spec], {}, {"golden": 5}) as writer,
        ):
            use(writer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "section/x", "__pad__.0", "__metadata__", "a\nb"])
def test_reserved_tensor_names_are_refused(name: str) -> None:
    with pytest.raises(BuildError, match="cannot be the name of a tensor"):
        EngineWriter("e", manifest(), [TensorSpec(name, DType.F32, (1,))], {})


def test_other_impossible_arguments() -> None:
    spec = TensorSpec("w", DType.F32, (1,))
    with pytest.raises(BuildError, match="given twice"):
        EngineWriter("e", manifest(), [spec, spec], {})
    with pytest.raises(BuildError, match="cannot be the name of a section"):
        EngineWriter("e", manifest(), [], {"hash_tree": b""})
    with pytest.raises(BuildError, match="both given and reserved"):
        EngineWriter("e", manifest(), [], {"golden": b""}, {"golden": 1})


def test_what_is_not_there_is_named(path: Path) -> None:
    with EngineFile.open(path) as engine:
        with pytest.raises(EngineFormatError, match=r"no section 'x'; it has: .*tokenizer"):
            engine.section("x")
        with pytest.raises(EngineFormatError, match=f"no plan for target 'x'; there is: {KEY}"):
            engine.plan("x")
        with pytest.raises(EngineFormatError, match="no tensor 'x'"):
            engine.tensor("x")


def test_engine_without_weights(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "e", manifest(), [], {"report": b"{}"}):
        pass
    with EngineFile.open(tmp_path / "e", verify_weights="before") as engine:
        assert engine.section("report") == b"{}"
        assert [p for p in engine.check() if "plan" not in p] == []
