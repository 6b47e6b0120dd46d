"""scripts/bench_compare: the GGUF file is the same model, the table says what the records say, the whole runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton import LLM, build
from pelton.builder.checkpoint import Checkpoint
from pelton.runtime.errors import UnsupportedModelError
from scripts.compare import jobs, placement
from scripts.compare.gguf_file import gguf_name, interleaved, write_gguf
from scripts.compare.jobs import LINES, Line, Record
from scripts.compare.placement import FAR, NEAR
from scripts.compare.table import best_setting, check, survey_table, table, tables
from tests.models import make_tiny, random_ids
from tests.random_models import write_random_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("llama-tiny", tmp_path_factory.mktemp("compare") / "tiny")


# -- the GGUF file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_gguf_has_the_same_weights(tied: bool, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny", dtype="bfloat16", tie_word_embeddings=tied)
    theirs, ours = Checkpoint.open(folder), Checkpoint.open(write_gguf(folder, tmp_path / "tiny.gguf"))
    assert set(ours.source.names()) == set(theirs.source.names())
    for name in theirs.source.names():
        expected = theirs.source.read(name).astype(np.float32)
        assert np.array_equal(ours.source.read(name).astype(np.float32), expected)
        ours.source.release(name)
    for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size", "intermediate_size"):
        assert ours.config[key] == pytest.approx(theirs.config[key])


def test_the_gguf_gives_the_same_logits(folder: Path, tmp_path: Path) -> None:
    gguf = write_gguf(folder, tmp_path / "tiny.gguf")
    ids = random_ids(40)
    logits = []
    for checkpoint in (folder, gguf):
        build(checkpoint, tmp_path / "tiny.engine", max_seq_len=256, golden=False)
        with LLM(tmp_path / "tiny.engine", threads=1, max_kv_tokens=1024) as llm:
            logits.append(llm.logits(ids))
    assert np.array_equal(logits[0], logits[1])


def test_interleaved_rows_rotate_alike() -> None:
    """Scores of rotated heads are the same for (i, i + half) and for neighbours on interleaved rows."""
    heads, half = 3, 4
    generator = np.random.default_rng(0)
    q, k = generator.standard_normal((2, heads * 2 * half, 5))
    x = generator.standard_normal(5)
    angles = generator.standard_normal((2, half))

    def halves(rows: Any, angle: Any) -> Any:
        a, b = rows.reshape(heads, 2, half).swapaxes(0, 1)
        return a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)

    def neighbours(rows: Any, angle: Any) -> Any:
        a, b = np.moveaxis(rows.reshape(heads, half, 2), 2, 0)
        return a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)

    def scores(rotate: Any, first: Any, second: Any) -> Any:
        (a, b), (c, d) = rotate(first @ x, angles[0]), rotate(second @ x, angles[1])
        return (a * c + b * d).sum(axis=1)

    mixed = scores(neighbours, interleaved(q, heads), interleaved(k, heads))
    np.testing.assert_allclose(mixed, scores(halves, q, k), rtol=1e-12)


@pytest.mark.parametrize("family, dtype", [("qwen2", "bfloat16"), ("llama-linear", "bfloat16"), ("llama", "float32")])
def test_other_models_are_refused(family: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "tiny", dtype=dtype)
    with pytest.raises(UnsupportedModelError, match="plain llama checkpoints in bf16"):
        write_gguf(folder, tmp_path / "tiny.gguf")
    assert not (tmp_path / "tiny.gguf").exists()


def test_unknown_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


# -- records and table --------------------------------------------------------------------------------


def record(kind: str, line: str, system: str, setting: str, rate: float) -> Record:
    return Record(kind, line, system, setting, rate, "equal")


def test_the_best_setting_is_the_surveys() -> None:
    records = [
        record("survey", "decode", "llama.cpp", "flash attention", 30.0),
        record("survey", "decode", "llama.cpp", "no flash attention", 35.0),
        record("round", "decode", "llama.cpp", "flash attention", 50.0),
    ]
    assert best_setting(records, "llama.cpp", "decode") == "no flash attention"
    assert best_setting(records, "llama.cpp", "prefill") == "flash attention"
    assert "| llama.cpp, no flash attention | - | 35.0 | - |" in survey_table(records, ["pelton", "llama.cpp"])


def test_the_table_has_medians_and_ratios_of_rounds() -> None:
    rates = [(60.0, 20.0), (50.0, 50.0), (10.0, 25.0)]
    records = []
    for ours, theirs in rates:
        records.append(record("round", "decode", "pelton", "default", ours))
        records.append(record("round", "decode", "llama.cpp", "flash attention", theirs))
    records.append(record("round", "decode", "pelton", "default", 70.0))  # a round cut short
    records.append(record("round", "decode", "llama.cpp", "no flash attention", 1.0))  # not the best setting
    lines = table(records, ["pelton", "llama.cpp"]).splitlines()
    assert lines[0] == "| tokens/s | rounds | pelton | llama.cpp | pelton's ratio |"
    row = "| 4 | 55.0 (10.0-70.0) | 25.0 (20.0-50.0), flash attention | 1.00 (0.40-3.00) |"
    assert lines[2:] == [f"| decode, batch 1 {row}"]


def test_placements_have_tables_of_their_own() -> None:
    """Only runs in which the CPUs stayed count there, and ratios are of rounds in which both had such runs."""
    records = []
    for ours, theirs in [({NEAR: [30.0, 34.0]}, {NEAR: [20.0]}), ({FAR: [60.0]}, {NEAR: [25.0]}), ({FAR: [50.0]}, {})]:
        for system, setting, placed in (("pelton", "default", ours), ("llama.cpp", "flash attention", theirs)):
            records.append(dataclasses.replace(record("round", "decode", system, setting, 1.0), placed=placed))
    whole, near, far = (text.splitlines() for text in tables(records, ["pelton", "llama.cpp"]).split("\n\n"))
    assert whole[0].startswith("| tokens/s | rounds |")
    assert "| decode, batch 1 | 3 | 1.0 " in whole[2]
    assert near[0].startswith("| tokens/s, CPUs on one chiplet | rounds |")
    row = "| decode, batch 1 | 2 | 32.0 (32.0-32.0) | 22.5 (20.0-25.0), flash attention | 1.60 (1.60-1.60) |"
    assert near[2:] == [row]
    assert far[2:] == ["| decode, batch 1 | 2 | 55.0 (50.0-60.0) | -, flash attention | - |"]


@pytest.mark.parametrize(
    "trips, where",
    [
        ([50e-9, 60e-9], NEAR),
        ([300e-9, None, 310e-9], FAR),
        ([50e-9, 300e-9], None),
        ([0.0, 0.0], None),
        ([0.0, 50e-9], None),
        ([5e-2, 5e-2], None),
    ],
)
def test_placement(trips: list[float | None], where: str | None) -> None:
    assert placement.placement(*trips) == where


def test_runs_in_which_the_cpus_moved_have_no_placement() -> None:
    near, far = 50e-9, 300e-9
    times = [[1.0, 2.0], [1.0, 4.0], [1.0, 8.0]]
    trips = [[near, near, far], [far, near, near], [far, None, far]]
    assert jobs.placed_rates(Line("", 1, 64, 9, 3), times, trips) == {NEAR: [2.0], FAR: [1.0]}
    assert jobs.placed_rates(Line("", 1, 64, 1, 3), times, trips) == {NEAR: [64.0], FAR: [64.0]}


def test_the_probe(tmp_path: Path) -> None:
    assert placement.load_probe(None)() == 0.0
    probe = placement.load_probe(jobs.compile_probe(tmp_path))
    before = os.sched_getaffinity(0)
    trip = min(probe() for _ in range(5))  # where others are busy, one may take long
    assert os.sched_getaffinity(0) == before
    assert 1e-9 < trip < 1e-2 if len(before) > 1 else trip == 0.0


def test_waiting_for_a_placement() -> None:
    trips = iter([300e-9, 300e-9, 50e-9])
    assert placement.wait_for(NEAR, lambda: next(trips), 60.0)
    assert next(trips, None) is None
    assert not placement.wait_for(NEAR, lambda: 300e-9, 0.15)


def test_rates() -> None:
    assert Line("", 1, 512, 1, 1).rate(2.0, 0.0) == 256
    assert Line("", 16, 128, 33, 1).rate(9.0, 4.0) == 128


def test_prompts_of_two_runs_begin_differently() -> None:
    first, second = (LINES["batch"].prompts(1000, run) for run in (0, 1))
    assert np.shape(first) == (16, 128)
    assert LINES["batch"].prompts(1000, 0) == first
    assert all(a[:4] != b[:4] for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "token, logprob, message",
    [(7, -1.1, None), (9, -1.1, None), (8, -1.1, "1.500 less likely"), (3, -1.1, "inf less"), (7, -1.6, "by 0.600")],
)
def test_another_model_is_noticed(token: int, logprob: float, message: str | None) -> None:
    reference = {"tokens": [7], "logprobs": [{"7": -1.0, "9": -1.125, "8": -2.5}]}
    result = {"tokens": [token], "logprobs": [{"7": logprob, "1": -5.0}]}
    if message is None:
        assert "log-probabilities within 0.100" in check(reference, result)
    else:
        with pytest.raises(RuntimeError, match=message):
            check(reference, result)


# -- processes ----------------------------------------------------------------------------------------


def test_a_failed_process_is_shown(tmp_path: Path) -> None:
    job = jobs.make_job(LINES["decode"], tmp_path / "none.engine", 300, 1, {})
    with pytest.raises(RuntimeError, match=r"(?s)run_pelton\.py .*none\.engine"):
        jobs.run_process(sys.executable, "run_pelton.py", job)


def test_the_whole_with_pelton_alone(folder: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/bench_compare"), str(folder), "--work", str(tmp_path)]
    command = [*script, "--rounds", "2", "--threads", "1", "--lines", "decode", "batch"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "llama.cpp: left out, no interpreter was named" in text
    assert "round, batch, pelton, default: " in text
    assert "16 of 16 first tokens equal" in text
    assert "| decode, batch 1 | 2 | " in text
    records = jobs.read_records(tmp_path / "results.jsonl")
    expected = [(line, system) for line in ("decode", "batch") for system in ("pelton", "limit")] * 2
    assert [(r.line, r.system) for r in records] == expected
    assert records[0].rate < records[1].rate
    assert "streaming read" in records[1].check
    assert dataclasses.asdict(records[0]) == json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    again = subprocess.run([*script, "--rounds", "0", "--survey", "0"], check=True, stdout=subprocess.PIPE, text=True)
    assert "| decode, 16 at once | 2 | " in again.stdout
