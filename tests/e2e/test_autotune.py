"""`build-engine --autotune --timing-cache`, from the command line to the tokens, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pelton
from pelton.builder.tactic_timer import TacticTimer
from pelton.builder.target import CPU_SKUS, host
from pelton.cli import main

from .refusals import Run

HOST = str(host())


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", kv_heads=2, dtype="bfloat16")


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Short turns, and one object cache for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pelton.builder.tactic_timer._SECONDS", 0.01)
        patch.setenv("PELTON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def timed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an autotuned engine, a.engine, and its timing cache, t.json."""
    folder = tmp_path_factory.mktemp("timed")
    pelton.build(
        model,
        folder / "a.engine",
        max_batch_size=4,
        max_num_tokens=64,
        autotune=True,
        timing_cache=folder / "t.json",
        golden=False,
    )
    return folder


SIZES = ("--max-batch-size", 4, "--max-num-tokens", 64, "--no-golden")


def sources(engine: Path) -> dict[str, set[str]]:
    """Where tactics came from, by target, as the build's report tells."""
    report = json.loads(engine.with_name(engine.name + ".report.json").read_text())
    found: dict[str, set[str]] = {}
    for tactic in report["tactics"]:
        found.setdefault(tactic["target"], set()).add(tactic["source"])
    return found


def no_timing(*arguments: object) -> list[list[float]]:
    raise AssertionError("something was timed")


def test_second_build_times_nothing_and_has_the_same_bytes(
    model: Path, timed: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources(timed / "a.engine") == {HOST: {"timed"}}
    before = (timed / "t.json").read_bytes()
    monkeypatch.setattr(TacticTimer, "__call__", no_timing)
    cache = ("--timing-cache", timed / "t.json")
    for name, flags in (("b", ("--autotune", *cache)), ("c", cache)):
        out = tmp_path / f"{name}.engine"
        status, _, err = run(model, "-o", out, *SIZES, *flags)
        assert status == 0, err
        assert f"{HOST}: tactics of" in err
        assert "from the timing cache" in err
        assert sources(out) == {HOST: {"cache"}}
        assert out.read_bytes() == (timed / "a.engine").read_bytes()
    assert (timed / "t.json").read_bytes() == before


def test_tactics_change_no_bit(model: Path, timed: Path, tmp_path: Path, run: Run) -> None:
    assert run(model, "-o", tmp_path / "m.engine", *SIZES)[0] == 0
    ids = list(range(5, 45))
    with pelton.LLM(timed / "a.engine") as one, pelton.LLM(tmp_path / "m.engine") as two:
        assert (one.logits(ids) == two.logits(ids)).all()


def test_a_file_decides_what_is_built(model: Path, timed: Path, tmp_path: Path, run: Run) -> None:
    """As if from a machine where the last tactic of each kernel is the best: CI without that CPU builds for it."""
    document = json.loads((timed / "t.json").read_text())
    wanted = set()
    for kernel in document["kernels"].values():
        for tactics in kernel["seconds"].values():
            *_, last = tactics
            tactics[last] = [time / 10 for time in tactics[last]]
            wanted.add(last)
    cache = tmp_path / "t.json"
    cache.write_text(json.dumps(document))
    out = tmp_path / "c.engine"
    assert run(model, "-o", out, *SIZES, "--timing-cache", cache, "-q")[0] == 0
    status, text, _ = run("inspect", out, "--json", entry=main)
    assert status == 0
    kernels = json.loads(text)["report"]["targets"][HOST]["kernels"]
    assert {kernel["tactic"] for kernel in kernels} - {""} == wanted
    assert {kernel["tactic_by"].partition(" on ")[0] for kernel in kernels if kernel["tactic"]} == {"timed"}
    with pelton.LLM(out) as one, pelton.LLM(timed / "a.engine") as two:
        assert (one.logits([5, 6, 7]) == two.logits([5, 6, 7])).all()


def test_inspect_shows_tactics(model: Path, timed: Path, tmp_path: Path, run: Run) -> None:
    _, text, _ = run("inspect", timed / "a.engine", entry=main)
    for part in (f"tactics of {HOST}", "super_rows", "block_panels", "timed on"):
        assert part in text
    assert run(model, "-o", tmp_path / "m.engine", *SIZES, "-q")[0] == 0
    assert "timed on" not in run("inspect", tmp_path / "m.engine", entry=main)[1]
    assert sources(tmp_path / "m.engine") == {HOST: {"model"}}


def test_targets_of_other_machines_keep_the_models_choice(model: Path, timed: Path, tmp_path: Path, run: Run) -> None:
    from pelton.runtime.drivers.cpu.host import host_features

    foreign = [sku for sku in CPU_SKUS.values() if not host_features().issuperset(sku.features)]
    if not foreign:
        pytest.skip("this machine runs every target")
    key, out = f"cpu:{foreign[0].name}", tmp_path / "x.engine"
    flags = ("--target", "host", "--target", key, "--autotune", "--timing-cache", timed / "t.json")
    status, _, err = run(model, "-o", out, *SIZES, *flags)
    assert status == 0, err
    assert sources(out) == {HOST: {"cache"}, key: {"model"}}
    assert f"{key}: tactics of" in err
    assert "not timed, because this machine lacks" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 9}', "has schema 9, and this pelton reads 1"),
        ("not json", "damaged or no timing cache"),
        (None, "does not exist; make it"),
    ],
    ids=["newer", "damaged", "missing"],
)
def test_refused_files(model: Path, tmp_path: Path, run: Run, text: str | None, message: str) -> None:
    """At once, before anything is traced, and nothing is overwritten."""
    cache, out = tmp_path / "t.json", tmp_path / "a.engine"
    if text is not None:
        cache.write_text(text)
    for flags in ((), ("--autotune",)) if text is not None else ((),):
        status, _, err = run(model, "-o", out, *SIZES, "--timing-cache", cache, *flags)
        assert status == 2
        assert err.startswith("error: ")
        assert message in err
        assert not out.exists()
    if text is not None:
        assert cache.read_text() == text


def test_the_cache_is_not_the_engine(model: Path, tmp_path: Path, run: Run) -> None:
    for name in ("a.engine", "a.engine.report.json"):
        status, _, err = run(model, "-o", tmp_path / "a.engine", "--autotune", "--timing-cache", tmp_path / name)
        assert status == 2
        assert "is a file that this build writes" in err
    assert list(tmp_path.iterdir()) == []
