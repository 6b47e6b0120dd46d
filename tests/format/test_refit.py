"""Refit: new weights in an old engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pelton.runtime.errors import CheckpointError, EngineFormatError
from pelton.runtime.format.container import EngineFile, EngineWriter, TensorSpec
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.refit import NOTE, encode_expressions, read_expressions, refit
from pelton.runtime.format.tensor_source import DictSource
from pelton.runtime.format.weight_eval import evaluate, evaluate_chunks
from pelton.runtime.format.weight_expr import AddScalar, CastTo, Pack, Source, Stack, WeightExpr

from .engines import GOLDEN, manifest, sections

Q, K = Source("q", (20, 6), DType.F32), Source("k", (4, 6), DType.F32)
EXPRESSIONS: dict[str, WeightExpr] = {
    "qk": Pack(CastTo(Stack((Q, K)), DType.BF16), "panel16"),
    "norm": AddScalar(Source("norm", (6,), DType.F32), 1.0),
}
SPECS = (
    TensorSpec("qk", DType.BF16, (24, 6), "panel16"),
    TensorSpec("constant", DType.F32, (3,)),
    TensorSpec("norm", DType.F32, (6,)),
)


def checkpoint(seed: int) -> DictSource:
    generator = np.random.default_rng(seed)
    shapes = {"q": (20, 6), "k": (4, 6), "norm": (6,)}
    return DictSource({name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def build(path: Path, source: DictSource, golden: bool = True, expressions: object = EXPRESSIONS) -> Path:
    data = {k: v for k, v in sections().items() if not k.startswith("plan/")}
    data["weights"] = encode_expressions(expressions)  # type: ignore[arg-type]
    with EngineWriter(path, manifest(targets=()), SPECS, data, {"golden": 50} if golden else {}) as writer:
        writer.write_tensor("qk", evaluate_chunks(EXPRESSIONS["qk"], source))
        writer.write_tensor("constant", [np.float32([1, 2, 3])])
        writer.write_tensor("norm", evaluate_chunks(EXPRESSIONS["norm"], source))
        if golden:
            writer.fill("golden", GOLDEN)
    return path


def test_refit_equals_a_build_of_the_new_weights(tmp_path: Path) -> None:
    old = build(tmp_path / "old.engine", checkpoint(1))
    new = refit(old, checkpoint(2), tmp_path / "new.engine", provenance={"checkpoint_hash": "def"})
    with EngineFile.open(new, verify_weights="before") as engine, EngineFile.open(old) as before:
        assert engine.check() == []
        for name, expr in EXPRESSIONS.items():
            assert engine.tensor(name).tobytes() == evaluate(expr, checkpoint(2)).tobytes()
        assert engine.tensor("constant").tolist() == [1, 2, 3]
        assert engine.section("tokenizer") == before.section("tokenizer")
        assert not engine.has_section("golden")
        assert engine.manifest.provenance == {"checkpoint_hash": "def"}
        assert engine.manifest.notes == ("a note", NOTE)
        assert read_expressions(engine) == EXPRESSIONS
        assert engine.identity != before.identity


def test_refit_in_place_and_twice(tmp_path: Path) -> None:
    path = build(tmp_path / "e", checkpoint(1))
    refit(path, checkpoint(2), path)
    first = path.read_bytes()
    refit(path, checkpoint(2), path)
    assert path.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_source_that_does_not_fit_leaves_all_as_it_was(tmp_path: Path) -> None:
    path = build(tmp_path / "e", checkpoint(1))
    before = path.read_bytes()
    shapes = {"q": (20, 5), "k": (4, 6), "norm": (6,)}
    wrong = DictSource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    with pytest.raises(CheckpointError, match=r"'q' is f32\[20, 5\] in the source"):
        refit(path, wrong, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_expressions_that_do_not_fit_the_engine(tmp_path: Path) -> None:
    wrong_type = EXPRESSIONS | {"norm": Source("norm", (6,), DType.BF16)}
    missing = EXPRESSIONS | {"gone": Source("norm", (6,), DType.F32)}
    impossible = EXPRESSIONS | {"norm": Stack(())}
    for expressions, message in (
        (wrong_type, r"'norm' should be bf16\[6\] and is stored as f32\[6\]"),
        (missing, "'gone' should be .* and is missing"),
        (impossible, "section 'weights' is damaged: cannot stack"),
        ({"norm": {"type": "nonsense"}}, "section 'weights' is damaged"),
    ):
        path = build(tmp_path / "e", checkpoint(1), golden=False, expressions=expressions)
        with pytest.raises(EngineFormatError, match=message):
            refit(path, checkpoint(2), tmp_path / "out")
    with EngineWriter(tmp_path / "bare", manifest(targets=()), [], {}):
        pass
    with pytest.raises(EngineFormatError, match="does not say how its weights were made"):
        refit(tmp_path / "bare", checkpoint(2), tmp_path / "out")
    assert not (tmp_path / "out").exists()
