"""Engines of the real model and of tiny ones, built once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pelton
from pelton.cli import build_engine_main
from tests.models import make_tiny

from .refusals import Run

ROOT = Path(__file__).resolve().parents[2]
ESSAY = (ROOT / "tests" / "data" / "essay.txt").read_text()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real checkpoint's folder; `scripts/test` fetches it."""
    path = Path(os.environ.get("PELTON_TEST_MODEL", ROOT / "models" / "smollm2-135m-instruct"))
    if not (path / "config.json").exists():
        pytest.skip("the real model is not here: scripts/get_model smollm2-135m-instruct")
    return path


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``engines(checkpoint, **build options)``: the engine, built at the first call with these arguments."""
    folder = tmp_path_factory.mktemp("engines")
    built: dict[tuple[object, ...], Path] = {}

    def get(checkpoint: Path, **options: object) -> Path:
        key = (checkpoint, *sorted(options.items()))
        if key not in built:
            path = folder / f"{len(built)}.engine"
            pelton.build(checkpoint, path, cache_dir=folder / "cache", **options)
            built[key] = path
        return built[key]

    return get


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family, **options)``: a tiny random checkpoint's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[object, ...], Path] = {}

    def get(family: str, **options: object) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny(family, folder / str(len(made)), **options)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*arguments, entry=...)`` a console script in this process: (status, stdout, stderr)."""

    def call(*arguments: object, entry: Callable[..., int] = build_engine_main) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = entry([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
