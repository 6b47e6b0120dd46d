"""Layout packed12: bytes against a slow packer written from the definition, limits, streaming, engines, refit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.errors import BuildError, EngineFormatError, LayoutOverflow
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.packed12 import exception_capacity, fits_packed12, panel_bytes
from pelton.runtime.format.refit import encode_expressions, refit
from pelton.runtime.format.tensor_source import DictSource
from pelton.runtime.format.tensor_type import TensorType, parse_type
from pelton.runtime.format.weight_eval import evaluate, evaluate_chunks, expr_type, fits, pack, unpack
from pelton.runtime.format.weight_expr import CastTo, Pack, Source, Stack

from .engines import manifest

Array = np.ndarray[Any, Any]
BF16 = DType.BF16.numpy


def bits(rows: Any) -> Array:
    """A bf16 matrix of these 16-bit patterns."""
    return np.asarray(rows, np.uint16).view(BF16)


def packed_slowly(matrix: Array) -> bytes | None:
    """The storage of a bf16 matrix, an element at a time; None if there are too many exceptions."""
    n, k = matrix.shape
    values = matrix.view(np.uint16).tolist()
    capacity = 16 * -(-(k // 32 + 1) // 16)
    out = bytearray()
    for first in range(0, n, 32):
        panel = [values[row] if row < n else [0] * k for row in range(first, first + 32)]
        counts = Counter(value >> 8 for row in panel for value in row)
        table = sorted(sorted(counts, key=lambda high: (-counts[high], high))[:16])
        table += [table[-1]] * (16 - len(table))
        exceptions: tuple[list[int], list[int]] = ([], [])
        blocks = bytearray(384 * (k // 8))
        for column, row in enumerate(panel):
            half, c = divmod(column, 16)
            for depth, value in enumerate(row):
                high, low = divmod(value, 256)
                j, i = depth % 8 // 2, 2 * c + depth % 2
                q = 16 * (i // 8) + 8 * (j % 2) + i % 8
                at = 384 * (depth // 8) + 192 * half
                blocks[at + (64 if j >= 2 else 0) + q] = low
                if high in table:
                    blocks[at + 128 + q] |= table.index(high) << (4 if j >= 2 else 0)
                else:
                    exceptions[half].append((depth // 8) << 15 | (64 * (j // 2) + q) << 8 | high)
        out += bytes(table) + bytes(48)
        for found in exceptions:
            if len(found) > capacity - 1:
                return None
            for entry in sorted(found) + [0xFFFFFFFF] * (capacity - len(found)):
                out += entry.to_bytes(4, "little")
        out += blocks
    return bytes(out)


@st.composite
def matrices(draw: st.DrawFn) -> Array:
    """Any bits: a few common high bytes, and some elements with any high byte at all."""
    n, k = draw(st.integers(0, 70)), 8 * draw(st.integers(1, 12))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    common = generator.permutation(256)[: draw(st.sampled_from((1, 2, 15, 16, 17, 19, 256)))]
    values = common[generator.integers(0, len(common), (n, k))] << 8 | generator.integers(0, 256, (n, k))
    rare = generator.random((n, k)) < draw(st.sampled_from((0.0, 0.01, 0.05, 0.12)))
    return bits(np.where(rare, generator.integers(0, 1 << 16, (n, k)), values))


def with_strays(first: int, second: int, k: int = 8) -> Array:
    """A panel in which this many elements of its halves are outside the 16 most frequent high bytes."""
    values = (np.arange(32 * k) % 16 << 8).reshape(32, k)
    for row, strays in ((0, first), (16, second)):
        values[row : row + 16].reshape(-1)[:strays] = (100 + np.arange(strays) % 60 + row) << 8
    return bits(values)


def test_golden_bytes() -> None:
    storage = pack(bits([range(0x3F01, 0x3F09)]), "packed12")
    expected = bytearray(panel_bytes(8))
    expected[:16] = b"\x00" + b"\x3f" * 15
    expected[64:192] = b"\xff" * 128
    for place, low in ((0, 1), (1, 2), (8, 3), (9, 4), (64, 5), (65, 6), (72, 7), (73, 8)):
        expected[192 + place] = low
    for place in (0, 1, 8, 9):
        expected[192 + 128 + place] = 0x11
    assert storage.tobytes() == bytes(expected)


@settings(deadline=None, max_examples=150)
@given(matrices())
def test_bytes_are_as_defined(matrix: Array) -> None:
    expected = packed_slowly(matrix)
    fitting = all(fits_packed12(matrix[start : start + 32]) for start in range(0, len(matrix), 32))
    assert fitting == fits_packed12(matrix) == (expected is not None)
    if expected is None:
        with pytest.raises(LayoutOverflow, match="has room for 15"):
            pack(matrix, "packed12")
        return
    type_ = TensorType(DType.BF16, matrix.shape, "packed12")
    storage = pack(matrix, "packed12")
    assert storage.dtype == BF16
    assert storage.shape == type_.storage_shape()
    assert storage.nbytes == type_.nbytes() == len(expected)
    assert storage.flags.c_contiguous
    assert storage.tobytes() == expected
    assert unpack(storage, type_).tobytes() == matrix.tobytes()
    assert unpack(storage.reshape(-1), type_).shape == matrix.shape


@pytest.mark.parametrize("transposed", [False, True])
def test_large_and_transposed_matrices(transposed: bool) -> None:
    """More than one group of panels, depths of more than one line of exceptions, NaNs, zeros and subnormals."""
    generator = np.random.default_rng(3)
    for n, k in ((32 * 9 + 5, 576), (72, 8192), (40, 520)):
        matrix = generator.normal(size=(n, k)).astype(BF16)
        odd = bits([0x8000, 0x0001, 0x807F, 0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x0080])
        matrix[::31, 8:16] = odd
        if transposed:
            matrix = np.asfortranarray(matrix)
        storage = pack(matrix, "packed12")
        assert unpack(storage, TensorType(DType.BF16, (n, k), "packed12")).tobytes() == matrix.tobytes()
        last = matrix[n // 32 * 32 :]
        assert storage[-1].tobytes() == packed_slowly(np.ascontiguousarray(last))


@pytest.mark.parametrize("k", [8, 480, 512, 1056])
def test_room_for_exceptions(k: int) -> None:
    room = exception_capacity(k) - 1
    assert room + 1 == 16 * -(-(k // 32 + 1) // 16)
    full = with_strays(room, room, k)
    assert fits_packed12(full)
    assert pack(full, "packed12").tobytes() == packed_slowly(full)
    for strays in ((room + 1, 0), (0, room + 1)):
        over = with_strays(*strays, k)
        assert not fits_packed12(over)
        with pytest.raises(LayoutOverflow, match=f"have {room + 1} values .* room for {room}"):
            pack(np.concatenate([full, over]), "packed12")


def test_equal_counts_prefer_the_lower_byte() -> None:
    """17 high bytes of equal counts, and one more of all that is left."""
    highs = np.concatenate([np.repeat(np.arange(200, 217), 15), [200]])
    storage = pack(bits((highs << 8).reshape(32, 8)), "packed12")
    assert storage.view(np.uint8)[0, :16].tolist() == list(range(200, 216))


def test_three_quarters_of_the_bytes() -> None:
    for n, k in ((1024, 1024), (4096, 14336)):
        packed = TensorType(DType.BF16, (n, k), "packed12").nbytes()
        assert 0.75 < packed / (2 * n * k) < 0.76
    assert [panel_bytes(k) % 64 for k in range(8, 4096, 8)] == [0] * 511


def test_chunks_and_fits_stream_whole_panels() -> None:
    generator = np.random.default_rng(5)
    arrays = {name: generator.normal(size=(rows, 64)).astype(np.float32) for name, rows in (("q", 70), ("k", 43))}
    source = DictSource(arrays)
    parts = tuple(Source(name, array.shape, DType.F32) for name, array in arrays.items())
    expr = CastTo(Stack(parts), DType.BF16)
    whole = evaluate(Pack(expr, "packed12"), source)
    for chunk_bytes in (1, 32 * 64 * 2, 3 * 32 * 64 * 2, 1 << 20):
        chunks = [chunk.tobytes() for chunk in evaluate_chunks(Pack(expr, "packed12"), source, chunk_bytes)]
        assert b"".join(chunks) == whole.tobytes()
    assert fits(expr, source, "packed12")


class ReleasingSource(DictSource):
    """Remembers what was released."""

    released: str | None = None

    def release(self, name: str) -> None:
        self.released = name


def test_overflow_can_be_caught_and_names_the_tensor() -> None:
    source = ReleasingSource({"w": with_strays(16, 0)})
    leaf = Source("w", (32, 8), DType.BF16)
    assert not fits(leaf, source, "packed12")
    assert source.released == "w"
    assert fits(leaf, source, "panel16")
    assert not fits(Source("w", (32, 9), DType.BF16), source, "packed12")
    with pytest.raises(LayoutOverflow, match="cannot make a weight from w: .*has room for"):
        list(evaluate_chunks(Pack(leaf, "packed12"), source))
    with pytest.raises(BuildError, match="cannot work on a packed weight"):
        fits(Pack(leaf, "panel16"), source, "packed12")


@pytest.mark.parametrize(
    "leaf",
    [
        Source("w", (32, 12), DType.BF16),
        Source("w", (32, 0), DType.BF16),
        Source("w", (0, 1 << 20), DType.BF16),
        Source("w", (32, 8), DType.F16),
        Source("w", (32, 8), DType.F32),
        Source("w", (32,), DType.BF16),
        Source("w", (2, 32, 8), DType.BF16),
    ],
)
def test_weights_that_the_layout_does_not_take(leaf: Source) -> None:
    with pytest.raises(BuildError, match="packed12 takes a bf16 matrix"):
        expr_type(Pack(leaf, "packed12"))
    with pytest.raises(EngineFormatError, match="packed12 takes a bf16 matrix"):
        parse_type(f"{TensorType(leaf.dtype, leaf.shape)}@packed12")


def test_wrong_sizes_and_exceptions_outside_the_matrix() -> None:
    type_ = TensorType(DType.BF16, (32, 8), "packed12")
    storage = pack(with_strays(1, 0), "packed12")
    for wrong in (storage[:, 1:], storage.view(np.float16), np.concatenate([storage, storage])):
        with pytest.raises(BuildError, match="does not hold"):
            unpack(wrong, type_)
    storage.view(np.uint32)[0, 16] = 1 << 15
    with pytest.raises(BuildError, match="an exception in block 1; it is damaged"):
        unpack(storage, type_)


SPECS = (TensorSpec("w", DType.BF16, (48, 8), "packed12"), TensorSpec("norm", DType.F32, (3,)))
LEAF = Source("model.w", (48, 8), DType.BF16)


def build(path: Path, source: DictSource) -> Path:
    expr = Pack(LEAF, "packed12")
    data = {"weights": encode_expressions({"w": expr})}
    with EngineWriter(path, manifest(targets=()), SPECS, data) as writer:
        writer.write_tensor("w", evaluate_chunks(expr, source))
        writer.write_tensor("norm", [np.float32([1, 2, 3])])
    return path


def checkpoint(seed: int) -> DictSource:
    return DictSource({"model.w": np.random.default_rng(seed).normal(size=(48, 8)).astype(BF16)})


def test_engine_and_refit(tmp_path: Path) -> None:
    path = build(tmp_path / "e", checkpoint(1))
    refit(path, checkpoint(2), path)
    with EngineFile.open(path, verify_weights="before") as engine:
        assert engine.check() == []
        spec = engine.tensors["w"]
        assert spec == SPECS[0]
        assert unpack(engine.tensor("w"), spec.type).tobytes() == checkpoint(2).read("model.w").tobytes()


def test_refit_refuses_values_that_do_not_fit(tmp_path: Path) -> None:
    path = build(tmp_path / "e", checkpoint(1))
    before = path.read_bytes()
    wrong = DictSource({"model.w": np.concatenate([with_strays(0, 16), with_strays(0, 0)[:16]])})
    with pytest.raises(LayoutOverflow, match="weight 'w' is stored as .*model.w.*build the engine again") as caught:
        refit(path, wrong, path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize(("dtype", "shape"), [(DType.F16, (32, 8)), (DType.BF16, (32, 12)), (DType.BF16, (32, 0))])
def test_reader_refuses_an_impossible_entry(tmp_path: Path, dtype: DType, shape: tuple[int, int]) -> None:
    spec = TensorSpec("w", dtype, shape, "packed12")
    with EngineWriter(tmp_path / "e", manifest(targets=()), [spec], {}) as writer:
        writer.write_tensor("w", [bytes(spec.nbytes)])
    with pytest.raises(EngineFormatError, match="'w' of type .* cannot be: layout packed12 takes a bf16 matrix"):
        EngineFile.open(tmp_path / "e")
