"""Random requests and datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pelton.inflight_batcher.bench.throughput import ThroughputOptions, _arrivals
from pelton.inflight_batcher.bench.workload import Length, random_jobs, read_dataset
from pelton.runtime.errors import RequestError


def test_the_same_seed_gives_the_same_jobs() -> None:
    first, second, other = (random_jobs(5, Length(20, 5), Length(8, 2), 100, seed) for seed in (1, 1, 2))
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.task_id, a.output_tokens) == (b.task_id, b.output_tokens)
    assert [j.token_ids.tolist() for j in first] != [j.token_ids.tolist() for j in other]
    assert all(j.token_ids.min() >= 0 and j.token_ids.max() < 100 and j.token_ids.dtype == np.int32 for j in first)


def test_lengths_have_mean_and_deviation() -> None:
    jobs = random_jobs(2000, Length(50, 10), Length(3, 5), 10, 0)
    lengths = [j.input_tokens for j in jobs]
    assert abs(np.mean(lengths) - 50) < 1
    assert abs(np.std(lengths) - 10) < 1
    assert min(j.output_tokens for j in jobs) == 1
    assert {j.input_tokens for j in random_jobs(9, Length(7), Length(1), 10, 0)} == {7}


@pytest.mark.parametrize(
    "text, length", [("128", Length(128)), ("128,16", Length(128, 16)), ("2.5, 1", Length(2.5, 1))]
)
def test_lengths_are_read(text: str, length: Length) -> None:
    assert Length.parse(text) == length


@pytest.mark.parametrize("text", ["", "a", "1,2,3", "0", "-4", "5,-1", "nan", "inf", "1,"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="length"):
        Length.parse(text)


def test_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"task_id": 7, "input_ids": [1, 2, 3], "output_tokens": 4}\n\n{"prompt": "ab", "output_tokens": 1}\n'
    )
    jobs = read_dataset(path, lambda text: [ord(c) for c in text])
    assert [(j.task_id, j.token_ids.tolist(), j.output_tokens) for j in jobs] == [(7, [1, 2, 3], 4), (2, [97, 98], 1)]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: got list"),
        ('{"prompt": "a"}', "output_tokens is None"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is True"),
        ('{"output_tokens": 1}', "neither"),
        ('{"prompt": "a", "output_tokens": 1}', "no tokenizer"),
        ('{"input_ids": [], "output_tokens": 1}', "at least one"),
        ('{"input_ids": [1.5], "output_tokens": 1}', "list of token ids"),
        ('{"input_ids": [-1], "output_tokens": 1}', "list of token ids"),
        ("", "no requests"),
    ],
)
def test_bad_datasets_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line)
    with pytest.raises(RequestError, match=message):
        read_dataset(path, None)
    with pytest.raises(RequestError, match="cannot be read"):
        read_dataset(tmp_path / "nothing.jsonl", None)


def test_arrivals() -> None:
    assert _arrivals(3, ThroughputOptions()) == [0.0, 0.0, 0.0]
    at = _arrivals(4000, ThroughputOptions(request_rate=100.0, seed=3))
    assert at[0] == 0.0
    assert at == sorted(at)
    assert 36 < at[-1] < 44


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
        {"request_rate": float("inf")},
        {"warmup": -1},
    ],
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="allowed"):
        ThroughputOptions(**options).check()  # type: ignore[arg-type]
