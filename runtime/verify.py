"""Check an engine: hashes of every byte, tokenizer vectors, golden vectors on every target this machine runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .drivers.cpu.driver import CpuDriver
from .drivers.cpu.host import host_features
from .format.container import EngineFile
from .golden import GoldenVectors, check_golden
from .text.vectors import check_vectors, count_vectors


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
        yield Check("hashes", f"{len(engine.tensors)} tensors, {path.stat().st_size / 1e6:.1f} MB", problems)
        if problems:
            return  # altered code must not run
        if engine.has_section("tokenizer"):
            section = engine.section("tokenizer")
            count = count_vectors(section)
            yield Check(
                "tokenizer", f"{count} vectors of the checkpoint's own tokenizer", tuple(check_vectors(section))
            )
        else:
            yield Check("tokenizer", "the engine has none", skipped=True)
        if run:
            yield from _golden_checks(engine, threads)
        else:
            yield Check("golden", "not run, as asked: hashes only", skipped=True)
    finally:
        engine.close()


def _golden_checks(engine: EngineFile, threads: int | None) -> Iterator[Check]:
    if not engine.has_section("golden"):
        yield Check("golden", "the engine has no golden vectors", skipped=True)
        return
    golden = engine.json_section("golden", GoldenVectors)
    features = host_features()
    ran = False
    for target in engine.manifest.targets:
        name = f"golden {target.key}"
        missing = sorted(set(target.features) - features)
        if target.kind != "cpu" or missing:
            why = f"not run: this machine lacks {' '.join(missing)}"
            if target.kind != "cpu":
                why = "not run: a plan without code, for tests; the golden vectors were made by it"
            yield Check(name, why, skipped=True)
            continue
        ran = True
        driver = CpuDriver(engine, target, threads=threads, weights="map")
        try:
            problems = tuple(check_golden(driver, golden, engine.manifest.model.dtype))
        finally:
            driver.close()
        yield Check(name, f"{len(golden.rows)} positions against the reference target", problems)
    if not ran:
        why = "no code of this engine was run: it has no target for this machine (pelton targets lists what runs here)"
        yield Check("golden", why, skipped=True)
