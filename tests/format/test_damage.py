"""Damage of any kind is found: single bits anywhere, truncation anywhere, wrong schema, before and during use."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.hash_tree import LEAF, LeafHasher
from pelton.runtime.format.manifest import SCHEMA

from .engines import KEY, SPECS, manifest, plan, sections, write


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sound") / "tiny.engine")


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path / "tiny.engine"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def regions(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of the header, every tensor, section and pad: all bytes of the file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    yield "header", 0, start
    for name, entry in msgspec.json.decode(data[8:start]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            yield name, start + low, start + high


def is_found(path: Path) -> bool:
    """Whether opening and checking finds something wrong."""
    try:
        with EngineFile.open(path, verify_weights="off") as engine:
            return bool(engine.check())
    except EngineFormatError:
        return True


def test_regions_cover_the_file(path: Path) -> None:
    covered = 0
    for _, start, end in regions(path):
        assert start == covered
        covered = end
    assert covered == path.stat().st_size
    assert not is_found(path)


def test_any_flipped_bit_is_found(path: Path) -> None:
    """In each region: both ends, and places in between (the whole header text)."""
    for name, start, end in regions(path):
        step = 5 if name == "header" else max(1, (end - start) // 40)
        for offset in {*range(start, end, step), end - 1} if end > start else ():
            bit = offset % 8
            flip(path, offset, bit)
            assert is_found(path), f"bit {bit} of byte {offset} in {name}"
            flip(path, offset, bit)
    assert not is_found(path)


def test_truncation_at_any_length_is_an_error(path: Path) -> None:
    size = path.stat().st_size
    edges = {edge + d for _, start, end in regions(path) for edge in (start, end) for d in (-1, 0, 1)}
    lengths = {*edges, *range(0, 4200, 97), *range(0, size, 99_991), 7, 8, 9, size - 1, size + 1, size + 4096}
    for length in sorted((n for n in lengths if n >= 0 and n != size), reverse=True):  # what is left stays intact
        os.truncate(path, length)
        with pytest.raises(EngineFormatError, match="tiny.engine: "):
            EngineFile.open(path, verify_weights="off")


def test_damage_names_the_section(path: Path) -> None:
    places = {name: start for name, start, end in regions(path) if end > start}
    for section in ("tokenizer", f"plan/{KEY}", f"code/{KEY}", "golden", "report"):
        offset = places[f"section/{section}"]
        flip(path, offset)
        with EngineFile.open(path, verify_weights="off") as engine:
            with pytest.raises(EngineFormatError, match=f"tiny.engine: section '{section}' is damaged"):
                engine.section(section)
            assert len(engine.check(weights=False)) == 1
        flip(path, offset)


def test_code_is_refused_before_it_could_be_mapped(path: Path) -> None:
    places = {name: start for name, start, _ in regions(path)}
    flip(path, places[f"section/code/{KEY}"] + 100)
    with EngineFile.open(path) as engine, pytest.raises(EngineFormatError, match="code/.* is damaged"):
        engine.code(KEY)


def test_weights_before_use(path: Path) -> None:
    places = {name: start for name, start, _ in regions(path)}
    flip(path, places["big"] + LEAF + 5)
    with pytest.raises(EngineFormatError, match=r"weights are damaged at bytes \d+:\d+ \(big\)"):
        EngineFile.open(path, verify_weights="before")
    with EngineFile.open(path, verify_weights="off") as engine:
        assert engine.tensor("big").shape == (1 << 20, 2)


def test_weights_in_the_background(path: Path) -> None:
    places = {name: start for name, start, _ in regions(path)}
    flip(path, places["norm"])
    heard: list[str] = []
    with EngineFile.open(path, on_problem=heard.append) as engine:
        with pytest.raises(EngineFormatError, match="weights are damaged .*norm"):
            engine.wait_verified(30)
        assert engine.problems == heard
        assert len(heard) == 1
        for access in (lambda: engine.tensor("embed"), lambda: engine.section("report"), engine.raise_problems):
            with pytest.raises(EngineFormatError, match="copy or build the engine again"):
                access()


def test_background_check_of_a_sound_file_ends(path: Path) -> None:
    with EngineFile.open(path) as engine:
        assert engine.wait_verified(30)
        assert engine.problems == []


def test_file_cut_while_open_is_reported_not_a_crash(path: Path) -> None:
    with EngineFile.open(path, verify_weights="off") as engine:
        os.truncate(path, path.stat().st_size - LEAF)
        found = "\n".join(engine.check())
        assert "truncated" in found
        assert "weights are damaged" in found
        os.truncate(path, 5000)
        with pytest.raises(EngineFormatError, match="truncated"):
            engine.section("tokenizer")


def test_header_changed_after_opening(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.engine", pelton_version="1.2.4")
    with EngineFile.open(path, verify_weights="off") as engine:
        path.write_bytes(other.read_bytes())
        assert any("header has changed" in problem for problem in engine.check())


def test_closed_engine_reads_nothing(path: Path) -> None:
    engine = EngineFile.open(path)
    engine.close()
    engine.close()
    # The file opened here takes the number that the engine's descriptor had.
    with path.open("rb"), pytest.raises(EngineFormatError, match="cannot be read"):
        engine.section("report")


def test_newer_schema_says_upgrade(tmp_path: Path) -> None:
    path = write(tmp_path / "new.engine", schema=SCHEMA + 1, pelton_version="9.0")
    with pytest.raises(
        EngineFormatError, match=rf"schema '{SCHEMA + 1}' \(written by pelton 9.0\).*pip install -U pelton"
    ):
        EngineFile.open(path)
    path = write(tmp_path / "old.engine", schema=SCHEMA - 1)
    with pytest.raises(EngineFormatError, match="build it again"):
        EngineFile.open(path)


def test_what_is_not_an_engine(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello world, this is no engine")
    (tmp_path / "st").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "deep").write_bytes((1 << 20).to_bytes(8, "little") + b"[" * (1 << 20))
    (tmp_path / "bare").write_bytes(b"\xff" * 8)
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "dir": "not a file",
        "empty": "truncated or not an engine",
        "text": "damaged or not an engine",
        "st": "not a pelton engine",
        "deep": "header is damaged",
        "bare": "not an engine",
        "pipe": "not a file",
        "missing": "No such file",
    }
    for name, message in expected.items():
        with pytest.raises(EngineFormatError, match=message):
            EngineFile.open(tmp_path / name)


def test_plan_out_of_bounds_is_refused(tmp_path: Path) -> None:
    """Hashes are right, and still no index or offset may leave its table."""
    good = msgspec.to_builtins(plan())
    changes = [
        ("names kernel 1 of 1", lambda p: p["launches"][0].update(kernel=1)),
        ("names buffer 5 of 1", lambda p: p["launches"][0].update(outputs=[["buffer", 5]])),
        ("names input 2 of 2", lambda p: p["launches"][0].update(inputs=[["input", 2]])),
        ("names state -1 of 1", lambda p: p["launches"][0].update(states=[["state", -1]])),
        ("names scratch buffer 1 of 1", lambda p: p["launches"][0].update(scratch=1)),
        ("tail_start 2 is outside", lambda p: p.update(tail_start=2)),
        ("does not fit the arena", lambda p: p.update(arena_bytes=959)),
        ("at 32:928 does not fit", lambda p: p["buffers"][0].update(offset=32)),
        ("too small", lambda p: p["buffers"][0].update(nbytes=895)),
        ("unknown dims", lambda p: p["buffers"][0].update(shape=["Q"])),
        ("kernel 'k0': 'f32.Q.' is not a type", lambda p: p["kernels"][0].update(output_types=["f32[Q]"])),
        ("weight 'gone' is not in the file", lambda p: p["weights"][0].update(name="gone")),
        ("the plan wants f32", lambda p: p["weights"][0].update(dtype="f32")),
        ("KV group 1, and there are 1", lambda p: p["states"][0].update(group=1)),
        (r"\$.vocab_size", lambda p: p.update(vocab_size="many")),
        ("must be positive", lambda p: p.update(vocab_size=0)),
    ]
    for message, change in changes:
        changed = msgspec.json.decode(msgspec.json.encode(good))
        change(changed)
        data = sections() | {f"plan/{KEY}": msgspec.json.encode(changed)}
        spec = SPECS[0]
        with EngineWriter(tmp_path / "e", manifest(), [spec], data) as writer:
            writer.write_tensor(spec.name, [bytes(spec.nbytes)])
        with EngineFile.open(tmp_path / "e", verify_weights="off") as engine:
            with pytest.raises(EngineFormatError, match=message):
                engine.plan(KEY)
            assert len(engine.check()) == 1


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 4097])
def test_hash_tree_covers_weights_of_any_size(tmp_path: Path, size: int) -> None:
    specs = [TensorSpec("a", DType.U8, (size,)), TensorSpec("b", DType.U8, (10,)), TensorSpec("c", DType.U8, (0,))]
    with EngineWriter(tmp_path / "e", manifest(targets=()), specs, {}) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, [bytes(range(256)) * (spec.nbytes // 256), b"x" * (spec.nbytes % 256)])
    with EngineFile.open(tmp_path / "e", verify_weights="before") as engine:
        assert engine.check() == []


def test_leaf_hasher_does_not_mind_how_bytes_are_cut() -> None:
    data = os.urandom(1000) * 3000
    pieces = LeafHasher()
    for start in range(0, len(data), 77_777):
        pieces.update(data[start : start + 77_777])
    expected = [hashlib.sha256(data[i : i + LEAF]).digest() for i in range(0, len(data), LEAF)]
    assert pieces.digests() == b"".join(expected)
