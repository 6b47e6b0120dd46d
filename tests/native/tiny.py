"""A small engine, made of hand-written kernels and a hand-written plan, that the real driver runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.manifest import TargetEntry
from pelton.runtime.format.plan import (
    Buffer,
    KernelSpec,
    KVGroup,
    Launch,
    Operand,
    Plan,
    Ranges,
    StateSpec,
    WeightRef,
)
from pelton.runtime.step import SamplingInputs, StepInputs, greedy_sampling

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 10
TARGET = TargetEntry(key="cpu/tiny", kind="cpu", sku="tiny", features=(), rank=1, compiler="g++", flags=())
RANGES = Ranges(
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=64,
    opt_num_tokens=32,
    max_logits_rows=8,
    logits_chunk=3,
    tokens_per_block=16,
    max_logprobs=2,
)


def compile_kernels(folder: Path, source: Path | str = ROOT / "cpp/tests/tiny_kernels.cpp", *flags: str) -> bytes:
    """A freestanding shared object from a file or from text."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "these tests need g++ or clang++"
    if isinstance(source, str):
        path = folder / "source.cpp"
        path.write_text(source)
        source = path
    out = folder / "code.so"
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-nostdlib", "-ffreestanding", "-fvisibility=hidden"]
    command += [f"-I{ROOT / 'cpp/include'}", *flags, str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out.read_bytes()


class TinyEngine:
    """Launches are lines "symbol operand..."; operands log cells errors out w ids pos none kv, or nobarrier."""

    def __init__(self, code: bytes, head: Sequence[str], tail: Sequence[str] = (), **changes: Any) -> None:
        self.image = code
        self.problem = ""
        self.weight = np.array([0.25], np.float32)
        buffers = (
            Buffer(name="log", dtype=DType.I32, shape=(1024,), offset=0, nbytes=4096),
            Buffer(name="cells", dtype=DType.I32, shape=(4096,), offset=4096, nbytes=16384),
            Buffer(name="errors", dtype=DType.I32, shape=(64,), offset=20480, nbytes=256),
            Buffer(name="out", dtype=DType.I32, shape=(1024,), offset=20736, nbytes=4096),
        )
        self._buffers = {b.name: b for b in buffers}
        symbols = list(dict.fromkeys(line.split()[0] for line in (*head, *tail)))
        plan = Plan(
            ranges=RANGES,
            kv_groups=(KVGroup(name="full", window=None), KVGroup(name="sliding", window=8)),
            states=(
                StateSpec(name="kv.0", kind="paged_kv", dtype=DType.F32, shape=(1, 2), group=0, layout="kv16"),
                StateSpec(name="kv.1", kind="paged_kv", dtype=DType.BF16, shape=(3, 4), group=1, layout="kv16"),
                StateSpec(name="history", kind="slot", dtype=DType.I32, shape=(64,)),
                StateSpec(name="kv.2", kind="paged_kv", dtype=DType.F32, shape=(1, 2), group=0, layout="kv16"),
            ),
            weights=(WeightRef(name="w", dtype=DType.F32, shape=(1,), layout="rows"),),
            buffers=buffers,
            arena_bytes=65536,
            kernels=tuple(
                KernelSpec(symbol=s, kernel=s, op=s, attributes={}, input_types=(), output_types=()) for s in symbols
            ),
            launches=tuple(self._launch(line, symbols) for line in (*head, *tail)),
            tail_start=len(head),
            vocab_size=VOCAB,
        )
        self._plan = replace_struct(plan, **changes)

    def _launch(self, line: str, symbols: list[str]) -> Launch:
        symbol, *names = line.split()
        barrier = "nobarrier" not in names
        operands = tuple(self._operand(name) for name in names if name != "nobarrier")
        return Launch(kernel=symbols.index(symbol), inputs=operands, outputs=(), barrier=barrier, origin=line)

    def _operand(self, name: str) -> Operand:
        fixed = {"w": ("weight", 0), "ids": ("input", 0), "pos": ("input", 1), "none": ("none", 0), "kv": ("state", 0)}
        if name in fixed:
            space, index = fixed[name]
            return Operand(space, index)  # type: ignore[arg-type]
        return Operand("buffer", list(self._buffers).index(name))

    def plan(self, key: str) -> Plan:
        assert key == TARGET.key
        return self._plan

    def code(self, key: str) -> memoryview:
        return memoryview(self.image)

    def tensor(self, name: str) -> np.ndarray:
        return self.weight

    def tensor_location(self, name: str) -> tuple[int, int]:
        return 0, self.weight.nbytes

    def weights_file(self) -> None:
        return None

    def delegate_check(self, check: object) -> None:
        raise AssertionError("there is nothing to check")

    def raise_problems(self) -> None:
        if self.problem:
            raise EngineFormatError(self.problem)

    def read(self, driver: Any, name: str) -> np.ndarray:
        """An arena buffer of a driver that runs this engine, as int32."""
        buffer = self._buffers[name]
        return driver._bound.arena.bytes()[buffer.offset : buffer.offset + buffer.nbytes].view(np.int32)


def replace_struct(plan: Plan, **changes: Any) -> Plan:
    """A plan with some fields exchanged."""
    fields = {name: changes.get(name, getattr(plan, name)) for name in plan.__struct_fields__}
    return Plan(**fields)


def make_step(
    lengths: Sequence[int] = (3,), rows: Sequence[int] | None = None, start: int = 0, **changes: Any
) -> StepInputs:
    """Sequences of these many new tokens, from position ``start`` on; rows default to each sequence's last token."""
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1])
    seq = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    chosen = np.asarray(ends - 1 if rows is None else rows, np.int32)
    tables = np.arange(4 * len(lengths), dtype=np.int32).reshape(len(lengths), 4)
    inputs = StepInputs(
        token_ids=np.arange(total, dtype=np.int32) % VOCAB,
        positions=np.concatenate([np.arange(start, start + n, dtype=np.int32) for n in lengths]),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        seq_slots=np.arange(len(lengths), dtype=np.int32),
        block_tables=(tables, tables.copy()),
        logits_rows=chosen,
        row_seq=seq[chosen],
        sampling=make_sampling(len(chosen)),
    )
    return replace(inputs, **changes)


def make_sampling(rows: int, **changes: Any) -> SamplingInputs:
    """Greedy rows whose prompt is one token."""
    return replace(greedy_sampling(rows), **{"prompt_len": np.ones(rows, np.int32), **changes})
