"""Fuzzers of all that reads an engine. Each takes a random.Random and a folder; only EngineFormatError may occur.

The tests run them for a moment under hypothesis, scripts/fuzz for as long as you like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.engine_header import METADATA, NO_HASH, PAGE, SECTION
from pelton.runtime.format.manifest import decode_manifest, encode_manifest
from pelton.runtime.format.plan import encode_plan
from pelton.runtime.format.refit import encode_expressions, read_expressions
from pelton.runtime.format.weight_expr import CastTo, Interleave, Pack, Permute, Reshaped, Source

from .engines import GOLDEN, KEY, manifest, plan

SPECS = (
    TensorSpec("proj", DType.BF16, (40, 8), "packed12"),
    TensorSpec("embed", DType.BF16, (40, 7), "panel16"),
    TensorSpec("norm", DType.F32, (7,)),
)
_LEAF = Source("x", (7, 40), DType.F32)
_EXPRESSION = Pack(CastTo(Interleave((Reshaped(Permute(_LEAF, (1, 0)), (40, 7)),), 8), DType.BF16), "panel16")
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 15, 4096, 1 << 20, 1 << 31, 1 << 40, 1 << 61, 1 << 63, 1 << 64, -(1 << 63), 1e308, 0.5),
    *("", "f32", "U8", "F32", "T", "raw", "deflate", "reserved", "\x00", "\ud7ff", "9" * 400),
    *("panel16", "packed12", "rows"),
    *([], [0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], {}, {"a": 1}, [[[[]]]]),
)


def engine_bytes(folder: Path) -> bytes:
    """A small sound engine with every kind of section."""
    path = folder / "sound.engine"
    if not path.exists():
        sections = {
            f"plan/{KEY}": encode_plan(plan()),
            f"code/{KEY}": b"\x7fELF" * 9,
            "tokenizer": b"tokenizer " * 50,
            "weights": encode_expressions({"embed": _EXPRESSION}),
        }
        with EngineWriter(path, manifest(), SPECS, sections, {"golden": 100}) as writer:
            for spec in SPECS:
                writer.write_tensor(
                    spec.name, [bytes(range(spec.nbytes % 251)) + bytes(spec.nbytes - spec.nbytes % 251)]
                )
            writer.fill("golden", GOLDEN)
    return path.read_bytes()


def use(path: Path) -> None:
    """Open an engine and read all of it; raises EngineFormatError or nothing."""
    with EngineFile.open(path, verify_weights="off") as engine:
        problems = engine.check()
        for name in engine.sections:
            try:
                engine.section(name)
            except EngineFormatError:
                if not problems:
                    raise AssertionError(f"check() found nothing, and section {name!r} cannot be read") from None
        for name, spec in engine.tensors.items():
            array = engine.tensor(name)
            offset, nbytes = engine.tensor_location(name)
            if array.nbytes != spec.nbytes or nbytes != spec.nbytes or offset + nbytes > path.stat().st_size:
                raise AssertionError(f"tensor {name!r} is not what its spec says")
        for target in engine.manifest.targets:
            engine.plan(target.key)
            engine.code(target.key)
        read_expressions(engine)


def fuzz_bytes(random: Random, folder: Path) -> None:
    """Any bytes of the file overwritten, inserted, removed, repeated or cut off: never accepted unless equal."""
    sound = engine_bytes(folder)
    data = _damage(random, sound)
    path = folder / "fuzzed.engine"
    path.write_bytes(data)
    try:
        with EngineFile.open(path, verify_weights="off") as engine:
            accepted = not engine.check()
    except EngineFormatError:
        accepted = False
    if accepted != (data == sound):
        raise AssertionError("an altered engine was accepted" if accepted else "the sound engine was refused")


def fuzz_header(random: Random, folder: Path) -> None:
    """The header's JSON changed, and its hash made right again."""
    data = engine_bytes(folder)
    start, document = split(data)
    for key in ("sections", "manifest"):
        document[METADATA][key] = msgspec.json.decode(document[METADATA][key])
    for _ in range(random.randint(1, 3)):
        document = _mutate(random, document)
    _use_bytes(folder, seal(document) + data[start:])


def fuzz_sections(random: Random, folder: Path) -> None:
    """Stored bytes of sections changed, and all hashes made right again."""
    data = bytearray(engine_bytes(folder))
    start, document = split(bytes(data))
    sections = msgspec.json.decode(document[METADATA]["sections"])
    for name in random.sample(sorted(sections), random.randint(1, 3)):
        low, high = document[SECTION + name]["data_offsets"]
        part = _damage(random, bytes(data[start + low : start + high]))[: high - low].ljust(high - low, b"\0")
        data[start + low : start + high] = part
        sections[name]["sha256"] = hashlib.sha256(part).hexdigest()
    document[METADATA]["sections"] = sections
    document[METADATA]["manifest"] = msgspec.json.decode(document[METADATA]["manifest"])
    _use_bytes(folder, seal(document) + bytes(data[start:]))


def fuzz_contents(random: Random, folder: Path) -> None:
    """Well-formed engines whose plan, expressions or manifest say odd things."""
    documents = {
        f"plan/{KEY}": msgspec.json.decode(encode_plan(plan())),
        "weights": msgspec.json.decode(encode_expressions({"embed": _EXPRESSION})),
    }
    name = random.choice(sorted(documents))
    documents[name] = _mutate(random, documents[name])
    path = folder / "fuzzed.engine"
    encoded = {key: msgspec.json.encode(value) for key, value in documents.items()}
    with EngineWriter(path, manifest(), SPECS, encoded | {f"code/{KEY}": b""}) as writer:
        for spec in SPECS:
            writer.write_tensor(spec.name, [bytes(spec.nbytes)])
    _use_path(path)


def fuzz_manifest(random: Random, folder: Path) -> None:
    """The manifest's JSON, changed in its values or its bytes."""
    data = encode_manifest(manifest())
    if random.random() < 0.5:
        data = msgspec.json.encode(_mutate(random, msgspec.json.decode(data)))
    else:
        data = _damage(random, data)
    try:
        decode_manifest(data)
    except EngineFormatError:
        pass


TARGETS: dict[str, Callable[[Random, Path], None]] = {
    "engine.bytes": fuzz_bytes,
    "engine.header": fuzz_header,
    "engine.sections": fuzz_sections,
    "engine.contents": fuzz_contents,
    "engine.manifest": fuzz_manifest,
}


def _use_bytes(folder: Path, data: bytes) -> None:
    path = folder / "fuzzed.engine"
    path.write_bytes(data)
    _use_path(path)


def _use_path(path: Path) -> None:
    try:
        use(path)
    except EngineFormatError:
        pass


def split(data: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the header's JSON."""
    start = 8 + int.from_bytes(data[:8], "little")
    return start, msgspec.json.decode(data[8:start])


def seal(document: Any) -> bytes:
    """A header in canonical form with the right hash, as far as the document still allows one."""
    metadata = document.get(METADATA) if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        return _frame(document)
    for key in ("sections", "manifest"):
        if not isinstance(metadata.get(key), str):
            metadata[key] = msgspec.json.encode(metadata.get(key)).decode()
    if "root" in metadata:
        metadata["root"] = NO_HASH
        metadata["root"] = hashlib.sha256(_frame(document)).hexdigest()
    return _frame(document)


def _frame(document: Any) -> bytes:
    text = msgspec.json.encode(document)
    size = -(-(8 + len(text)) // PAGE) * PAGE
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _mutate(random: Random, node: Any) -> Any:
    """The document with one random node replaced, removed, repeated or swapped with a neighbour."""
    children = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    if not children or random.random() < 0.08:
        if isinstance(node, int) and not isinstance(node, bool) and random.random() < 0.5:
            return node + random.choice((-4096, -64, -1, 1, 64, 4096))
        return random.choice(_ODD)
    key = random.choice(children)
    action = random.random()
    copy = dict(node) if isinstance(node, dict) else list(node)
    if action < 0.1:
        del copy[key]
    elif action < 0.2 and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif action < 0.3:
        other = random.choice(children)
        copy[key], copy[other] = copy[other], copy[key]
    elif action < 0.35 and isinstance(copy, dict):
        copy = {(f"{k}x" if k == key else k): v for k, v in copy.items()}
    else:
        copy[key] = _mutate(random, copy[key])
    return copy


def _damage(random: Random, data: bytes) -> bytes:
    """One to three edits of bytes."""
    out = bytearray(data)
    for _ in range(random.randint(1, 3)):
        # Often near the start, where the structure is.
        limit = random.choice((9, 200, 4096, len(out)))
        at = random.randrange(max(1, min(limit, len(out))))
        length = random.choice((1, 1, 2, 8, 100, 4096))
        edit = random.randrange(6)
        if edit == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif edit == 1:
            out[at : at + length] = random.randbytes(min(length, len(out) - at))
        elif edit == 2:
            out[at:at] = random.randbytes(length)
        elif edit == 3:
            del out[at : at + length]
        elif edit == 4:
            out[at:at] = out[at : at + length]
        else:
            del out[random.randrange(len(out) + 1) :]
    return bytes(out)
