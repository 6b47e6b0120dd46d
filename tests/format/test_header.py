"""Forged headers: every hash is right, and yet each lie about the layout is refused by its own check."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter
from pelton.runtime.format.engine_header import METADATA, PAGE

from .engines import manifest, sections
from .fuzzing import engine_bytes, seal, split

Document = dict[str, Any]


def forge(folder: Path, change: Callable[[Document], None]) -> Path:
    """A sound engine with its header changed and sealed again."""
    data = engine_bytes(folder)
    start, document = split(data)
    for key in ("sections", "manifest"):
        document[METADATA][key] = msgspec.json.decode(document[METADATA][key])
    change(document)
    path = folder / "forged.engine"
    path.write_bytes(seal(document) + data[start:])
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(EngineFormatError, match=message):
        EngineFile.open(path, verify_weights="off")


def overlap(document: Document) -> None:
    """Let "norm" begin inside "embed"."""
    low, high = document["norm"]["data_offsets"]
    document["norm"]["data_offsets"] = [low - PAGE, high - PAGE]


def hole(document: Document) -> None:
    """Leave out the pad before "norm"."""
    pads = [name for name in document if name.startswith("__pad__")]
    del document[pads[-1]]


def beyond(document: Document) -> None:
    """Let the last tensor reach past the end of the file."""
    low, high = document["norm"]["data_offsets"]
    document["norm"] = {"dtype": "F32", "shape": [7 + PAGE], "data_offsets": [low, high + 4 * PAGE]}


def repeat_offsets(document: Document) -> None:
    """Two tensors over the same bytes."""
    document["again"] = document["norm"]


def section_behind_weights(document: Document) -> None:
    """A section where weights are."""
    document["section/late"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    end = document["norm"]["data_offsets"][1]
    gap = -end % PAGE
    document["__pad__.99"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
    document["section/late"]["data_offsets"] = [end + gap, end + gap]
    document["section/late"] = document.pop("section/late")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (overlap, "lies at .*, but the one before ends at"),
        (hole, "lies at .*, but the one before ends at"),
        (repeat_offsets, "'again' lies at"),
        (beyond, "file is truncated"),
        (section_behind_weights, "lies behind weights"),
        (lambda d: d["norm"].update(shape=[6]), r"'norm' has 28 bytes, not what F32\[6\] takes"),
        (lambda d: d["norm"].update(shape=[8]), r"not what F32\[8\] takes"),
        (lambda d: d["norm"].update(dtype="F8_E4M3"), "unknown dtype 'F8_E4M3'"),
        (lambda d: d["norm"].update(dtype="F64"), "unknown dtype"),
        (lambda d: d["embed"].update(shape=[3, 4, 32]), r"'embed' of type bf16\[40,7\]@panel16 is stored as"),
        (lambda d: d["section/golden"].update(dtype="I8"), "must be a row of bytes"),
        (lambda d: d[METADATA]["sections"].pop("golden"), "sections stored are not those"),
        (lambda d: d[METADATA].update(format="other"), "not a pelton engine"),
        (lambda d: d[METADATA].update(extra="x"), "unknown field `extra`"),
        (lambda d: d[METADATA]["manifest"].pop("targets"), "missing required field `targets`"),
    ],
)
def test_lie_in_the_header(tmp_path: Path, change: Callable[[Document], None], message: str) -> None:
    refused(forge(tmp_path, change), message)


def test_sealing_alone_changes_nothing(tmp_path: Path) -> None:
    path = forge(tmp_path, lambda document: None)
    assert path.read_bytes() == engine_bytes(tmp_path)
    with EngineFile.open(path) as engine:
        assert engine.check() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"__metadata__":', b'{ "__metadata__":'),
        (b'"norm":', b'"norm":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"norm":'),
        (b'"norm":', b'"n\\u006frm":'),
    ],
)
def test_one_form_only(tmp_path: Path, old: bytes, new: bytes) -> None:
    """A stray space, a duplicate key, an odd escape: the parsed header and so its root are the same."""
    data = engine_bytes(tmp_path)
    start = 8 + int.from_bytes(data[:8], "little")
    text = data[8:start].rstrip(b" ").replace(old, new, 1).ljust(start - 8)
    path = tmp_path / "forged.engine"
    path.write_bytes(data[:8] + text + data[start:])
    refused(path, "not in canonical form")


def replace_section(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """Put other stored bytes of the same length into a section, with its hash."""
    data = bytearray(engine_bytes(folder))
    start, document = split(bytes(data))
    low, high = (start + offset for offset in document[f"section/{name}"]["data_offsets"])
    stored = change(bytes(data[low:high]))
    assert len(stored) == high - low
    data[low:high] = stored
    entries = msgspec.json.decode(document[METADATA]["sections"])
    entries[name]["sha256"] = hashlib.sha256(stored).hexdigest()
    document[METADATA]["sections"] = msgspec.json.encode(entries).decode()
    path = folder / "forged.engine"
    path.write_bytes(seal(document) + bytes(data[start:]))
    return path


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("golden", lambda s: s[:-1] + b"x", "its length or padding is wrong"),
        ("golden", lambda s: (101).to_bytes(8, "little") + s[8:], "its length or padding is wrong"),
        ("golden", lambda s: b"\xff" * 8 + s[8:], "its length or padding is wrong"),
        ("tokenizer", lambda s: zlib.compress(b"short").ljust(len(s), b"\0"), "stream has another length"),
        ("tokenizer", lambda s: s[:-1] + b"\0", "section 'tokenizer' is damaged"),
        ("tokenizer", lambda s: bytes(len(s)), "section 'tokenizer' is damaged"),
    ],
)
def test_lie_in_a_section(tmp_path: Path, section: str, change: Callable[[bytes], bytes], message: str) -> None:
    with EngineFile.open(replace_section(tmp_path, section, change), verify_weights="off") as engine:
        with pytest.raises(EngineFormatError, match=message):
            engine.section(section)
        assert len(engine.check()) == 1


def test_order_of_the_given_sections_does_not_matter(tmp_path: Path) -> None:
    given = sections()
    for name, order in (("a", list(given)), ("b", list(reversed(given)))):
        with EngineWriter(tmp_path / name, manifest(), [], {key: given[key] for key in order}):
            pass
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
