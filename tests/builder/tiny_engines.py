"""Tiny models brought down to a plan on the reference target, made once a test run."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pelton.builder.checkpoint import Checkpoint
from pelton.builder.graph import Graph
from pelton.builder.importer import import_graph
from pelton.builder.kernels import KernelRegistry
from pelton.builder.lower import Lowered, lower
from pelton.builder.oracle.kernels import REFERENCE_KERNELS
from pelton.builder.oracle.reference import ReferenceDriver
from pelton.builder.passes.pipeline import PassOptions, optimize
from pelton.builder.target import Target
from pelton.builder.text import print_graph
from pelton.builder.text_parser import parse_graph
from pelton.builder.trace import trace
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import Ranges
from pelton.runtime.format.weight_eval import evaluate
from tests.models import make_tiny

RANGES = Ranges(
    max_batch_size=4,
    max_num_tokens=48,
    max_seq_len=64,
    opt_num_tokens=16,
    max_logits_rows=48,
    logits_chunk=7,
    tokens_per_block=16,
    max_logprobs=5,
)


@dataclass(frozen=True)
class TinyEngine:
    """A checkpoint folder and everything a driver needs of it."""

    folder: Path
    graph: Graph
    lowered: Lowered
    tensors: dict[str, np.ndarray]

    def driver(self) -> ReferenceDriver:
        return ReferenceDriver(self.lowered.plan, self.tensors.__getitem__)


@functools.cache
def tiny_checkpoint(family: str, **settings: object) -> Checkpoint:
    folder = Path(tempfile.mkdtemp(prefix="pelton-tiny-"))
    return Checkpoint.open(make_tiny(family, folder, **settings))  # type: ignore[arg-type]


def imported(family: str, **settings: object) -> Graph:
    """A fresh graph of a tiny model, before any pass. Traced once; passes change their graph, so it is parsed anew."""
    return parse_graph(_imported_text(family, **settings))


@functools.cache
def _imported_text(family: str, **settings: object) -> str:
    checkpoint = tiny_checkpoint(family, **settings)
    return print_graph(import_graph(trace(checkpoint, max_seq_len=RANGES.max_seq_len), checkpoint))


@functools.cache
def tiny_engine(family: str, precision: DType = DType.F32, **settings: object) -> TinyEngine:
    """A tiny model, optimised and lowered for the reference target."""
    checkpoint = tiny_checkpoint(family, **settings)
    graph = optimize(imported(family, **settings), PassOptions(precision, RANGES))
    lowered = lower(graph, Target("reference"), KernelRegistry(REFERENCE_KERNELS), RANGES)
    tensors = {
        spec.name: origin if isinstance(origin, np.ndarray) else evaluate(origin, checkpoint.source)
        for spec, origin in lowered.tensors
    }
    return TinyEngine(checkpoint.path, graph, lowered, tensors)
