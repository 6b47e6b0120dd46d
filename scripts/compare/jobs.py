"""What is measured, and one measured process: a job in a file, a runner in its own Python, a result in a file.

A job: model, prompts [n][length], repeats (prompts of each measured run), warmup_prompts, warmup_tokens, new_tokens,
threads, setting, probe (see placement.py; may be None), output. A result: times (seconds to the first tokens and from
there to the last, a pair for each run), round_trips (before, between and after these two; None where nobody could
look), tokens (the first of each prompt of the first run), logprobs ({id: log-probability} of each, or None), versions,
system.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pelton.builder.codegen.toolchain import find_compiler

from .placement import placement

ROOT = Path(__file__).resolve().parents[2]
Setting = dict[str, bool | str]
WARMUP_TOKENS = 4


@dataclass(frozen=True)
class Line:
    """A line of the table: ``batch`` prompts of ``length`` tokens, greedy, ``new_tokens`` each."""

    title: str
    batch: int
    length: int
    new_tokens: int
    repeats: int

    def rate(self, first: float, rest: float) -> float:
        """Tokens a second: of the prompts where there is one new token, else of all new tokens after the first."""
        if self.new_tokens == 1:
            return self.batch * self.length / first
        return self.batch * (self.new_tokens - 1) / rest

    def placement(self, before: float, between: float | None, after: float) -> str | None:
        """Where the CPUs lay in the part of a run that ``rate`` is about, by the round trips; None if they moved."""
        if between is None:
            return placement(before, after)
        return placement(before, between) if self.new_tokens == 1 else placement(between, after)

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        """Token ids [batch][length] of a run; no two runs begin alike, and run 0 is the one that is checked."""
        generator = np.random.default_rng([self.batch, self.length, run])
        return [[int(i) for i in row] for row in generator.integers(5, vocab_size, (self.batch, self.length))]


LINES = {
    "prefill": Line("prefill, 512 tokens", 1, 512, 1, 4),
    "decode": Line("decode, batch 1", 1, 128, 33, 8),
    "batch": Line("decode, 16 at once", 16, 128, 33, 2),
}


def _llama(flash_attn: bool, bf16_kv: bool = False, mmap: bool = True, unified: bool = False) -> Setting:
    return {"flash_attn": flash_attn, "bf16_kv": bf16_kv, "mmap": mmap, "unified": unified}


#: What a survey tries, by system and name. "limit" is the machine's own; it and pelton have nothing to choose.
SETTINGS: dict[str, dict[str, Setting]] = {
    "pelton": {"default": {}},
    "llama.cpp": {
        "flash attention": _llama(True),
        "no flash attention": _llama(False),
        "flash attention, bf16 KV": _llama(True, bf16_kv=True),
        "no flash attention, bf16 KV": _llama(False, bf16_kv=True),
        "flash attention, no mmap": _llama(True, mmap=False),
        "no flash attention, bf16 KV, no mmap": _llama(False, bf16_kv=True, mmap=False),
        "flash attention, unified KV": _llama(True, unified=True),
    },
    "OpenVINO GenAI": {
        "paged attention, latency": {"paged": True, "hint": "LATENCY"},
        "stateful, latency": {"paged": False, "hint": "LATENCY"},
        "paged attention, throughput": {"paged": True, "hint": "THROUGHPUT"},
        "stateful, throughput": {"paged": False, "hint": "THROUGHPUT"},
    },
    "limit": {"roofs": {}},
}


def settings_for(system: str, line: str) -> list[str]:
    """The settings worth trying: one cache for all sequences is a question only where there are several."""
    return [name for name, setting in SETTINGS[system].items() if LINES[line].batch > 1 or not setting.get("unified")]


@dataclass(frozen=True)
class Record:
    """One measured process; ``rate`` in tokens/s, the median of its runs. ``kind``: "survey" or "round".

    ``placed``: rates of the runs during which the CPUs stayed where they were, by placement.
    """

    kind: str
    line: str
    system: str
    setting: str
    rate: float
    check: str
    versions: dict[str, str] = field(default_factory=dict)
    details: str = ""
    placed: dict[str, list[float]] = field(default_factory=dict)


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All records of a results file; none if it is not there."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def compile_probe(folder: Path) -> Path:
    """The library for ``placement.load_probe``, written to ``folder``."""
    compiler, library = find_compiler(), folder / "round_trip.so"
    source = Path(__file__).with_name("round_trip.cpp")
    flags = [*compiler.extra_flags, "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", f"-I{ROOT}/cpp/runtime"]
    subprocess.run([*compiler.command, *flags, str(source), "-o", str(library)], check=True)
    return library


class ProcessFailed(RuntimeError):
    """A measuring process ended without a result."""


def run_process(python: str, runner: str, job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job in a new process; ProcessFailed with its last words when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "job.json", Path(folder) / "result.json"
        file.write_text(json.dumps(job | {"output": str(output)}))
        command = [python, str(Path(__file__).parent / runner), str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        if done.returncode or not output.exists():
            raise ProcessFailed(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-2000:]}")
        return dict(json.loads(output.read_text()))


def make_job(
    line: Line, model: Path, vocab_size: int, threads: int, setting: Setting, probe: Path | None = None
) -> dict[str, Any]:
    prompts = line.prompts(vocab_size, 0)
    # A warm-up of several sequences needs not be as long as they are.
    warmup = [prompt[: line.length if line.batch == 1 else 32] for prompt in line.prompts(vocab_size, line.repeats)]
    return {
        "model": str(model),
        "prompts": prompts,
        "repeats": [line.prompts(vocab_size, run) for run in range(line.repeats)],
        "warmup_prompts": warmup,
        "warmup_tokens": min(WARMUP_TOKENS, line.new_tokens),
        "new_tokens": line.new_tokens,
        "threads": threads,
        "setting": setting,
        "probe": None if probe is None else str(probe),
    }


def median_rate(line: Line, times: Sequence[Sequence[float]]) -> float:
    return statistics.median(line.rate(first, rest) for first, rest in times)


def placed_rates(
    line: Line, times: Sequence[Sequence[float]], round_trips: Sequence[Sequence[Any]]
) -> dict[str, list[float]]:
    """Rates of the runs during which the CPUs stayed, by placement."""
    found: dict[str, list[float]] = {}
    for (first, rest), trips in zip(times, round_trips, strict=True):
        if (where := line.placement(*trips)) is not None:
            found.setdefault(where, []).append(line.rate(first, rest))
    return found


def pin(threads: int) -> list[int]:
    """Bind this process and its children to the first ``threads`` CPUs that it may use."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    if len(cpus) < threads:
        sys.exit(f"--threads {threads}: this process may use {len(cpus)} CPUs")
    os.sched_setaffinity(0, cpus)
    return cpus
