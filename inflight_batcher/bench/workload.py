"""What to run: random prompts of given lengths, or a dataset in the format of trtllm-bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import RequestError


@dataclass(frozen=True)
class Job:
    """One request: a prompt as token ids [L], and how many tokens to generate."""

    task_id: int | str
    token_ids: NDArray[np.int32]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True)
class Length:
    """A length in tokens: normal with ``mean`` and ``deviation``, rounded, at least 1; deviation 0 is exact."""

    mean: float
    deviation: float = 0.0

    def __post_init__(self) -> None:
        if not self.mean >= 1 or not self.deviation >= 0:
            raise RequestError(
                f"length {self.mean:g},{self.deviation:g}: the mean must be at least 1, the deviation at least 0"
            )

    @classmethod
    def parse(cls, text: str, what: str = "length") -> Length:
        """From "MEAN" or "MEAN,DEVIATION"; RequestError otherwise."""
        parts = text.split(",")
        try:
            mean, deviation = float(parts[0]), float(parts[1]) if len(parts) == 2 else 0.0
        except ValueError:
            mean = deviation = float("nan")
        if len(parts) > 2 or not np.isfinite([mean, deviation]).all():
            raise RequestError(f"{what}: got {text!r}; allowed: a number, or mean,deviation as in 128,16")
        return cls(mean, deviation)

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        values = np.rint(generator.normal(self.mean, self.deviation, count))
        return [max(1, int(value)) for value in values]


def random_jobs(count: int, inputs: Length, outputs: Length, vocab_size: int, seed: int) -> list[Job]:
    """``count`` jobs with random token ids; the same seed gives the same jobs."""
    if count < 1:
        raise RequestError(f"number of requests: got {count}; allowed: at least 1")
    generator = np.random.default_rng(seed)
    lengths = inputs.draw(count, generator)
    wanted = outputs.draw(count, generator)
    return [
        Job(i, generator.integers(0, vocab_size, length, dtype=np.int32), tokens)
        for i, (length, tokens) in enumerate(zip(lengths, wanted, strict=True))
    ]


def read_dataset(path: Path, encode: Callable[[str], list[int]] | None) -> list[Job]:
    """Jobs from a JSON-lines file, one a line: {"task_id", "prompt" or "input_ids", "output_tokens"}.

    ``encode`` turns prompts into token ids; None where the engine has no tokenizer. Raises RequestError with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"dataset {path}: cannot be read ({error})") from error
    jobs = [_job(f"dataset {path}, line {n}", line, encode, n) for n, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise RequestError(f"dataset {path} has no requests")
    return jobs


def _job(where: str, line: str, encode: Callable[[str], list[int]] | None, number: int) -> Job:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise RequestError(f"{where}: got {type(entry).__name__}; allowed: an object")
    tokens = entry.get("output_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise RequestError(f"{where}: output_tokens is {tokens!r}; allowed: a whole number from 1")
    ids = entry.get("input_ids")
    if ids is None:
        ids = _encoded(where, entry.get("prompt"), encode)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
        raise RequestError(f"{where}: input_ids must be a list of token ids, at least one")
    return Job(entry.get("task_id", number - 1), np.asarray(ids, np.int32), tokens)


def _encoded(where: str, prompt: object, encode: Callable[[str], list[int]] | None) -> list[int]:
    if not isinstance(prompt, str):
        raise RequestError(f'{where}: there is neither "prompt" (text) nor "input_ids" (token ids)')
    if encode is None:
        raise RequestError(f'{where}: this engine has no tokenizer, so the dataset must have "input_ids"')
    return encode(prompt)
