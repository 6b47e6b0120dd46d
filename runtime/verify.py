"""Check an engine: hashes of every byte, tokenizer vectors, golden vectors on every target this machine runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .drivers.cpu.driver import CpuDriver
from .drivers.cpu.host import host_features
from .format.container import EngineFile
from .golden import GoldenVectors, check_golden
from .text.vectors import check_vectors


@dataclass(frozen=True)
class Check:
    """One check's outcome; ``problems`` is empty when it passed."""

    name: str
    detail: str
    problems: tuple[str, ...] = ()
    skipped: bool = False


def verify_engine(path: Path, *, threads: int | None = None, run: bool = True) -> Iterator[Check]:
    """Yield one Check after another. Raises EngineFormatError where the file cannot even be opened."""
    engine = EngineFile.open(path, verify_weights="off")
    try:
        problems = tuple(engine.check(weights=True))
        yield Check("hashes", f"{len(engine.tensors)} tensors, {path.stat().st_size} bytes", problems)
        if problems:
            return  # altered code must not run
        if engine.has_section("tokenizer"):
            yield Check("tokenizer", "vectors", tuple(check_vectors(engine.section("tokenizer"))))
        else:
            yield Check("tokenizer", "the engine has none", skipped=True)
        if run:
            yield from _golden_checks(engine, threads)
    finally:
        engine.close()


def _golden_checks(engine: EngineFile, threads: int | None) -> Iterator[Check]:
    if not engine.has_section("golden"):
        yield Check("golden", "the engine has no golden vectors", skipped=True)
        return
    golden = engine.json_section("golden", GoldenVectors)
    features = host_features()
    for target in engine.manifest.targets:
        name = f"golden {target.key}"
        missing = sorted(set(target.features) - features)
        if target.kind != "cpu" or missing:
            why = f"this machine lacks {' '.join(missing)}" if missing else f"kind {target.kind} has no code to run"
            yield Check(name, why, skipped=True)
            continue
        driver = CpuDriver(engine, target, threads=threads, weights="map")
        try:
            problems = tuple(check_golden(driver, golden, engine.manifest.model.dtype))
        finally:
            driver.close()
        yield Check(name, f"{len(golden.rows)} positions against the reference target", problems)
