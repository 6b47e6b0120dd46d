"""Compute golden vectors with the reference target, from the weights as they lie in the new engine."""

from __future__ import annotations

import msgspec
import numpy as np

from ..runtime.format.container import EngineFile
from ..runtime.format.plan import Ranges
from ..runtime.golden import GoldenRow, GoldenVectors, allocate_for, prompt_logits
from .graph import Graph
from .kernels import KernelRegistry
from .lower import lower
from .oracle.kernels import REFERENCE_KERNELS
from .oracle.reference import ReferenceDriver
from .target import Target

_TOKENS = 8
_TOP = 16


def golden_vectors(graph: Graph, engine: EngineFile, ranges: Ranges) -> bytes:
    """The JSON of GoldenVectors for a fixed pseudo-random prompt of up to 8 tokens."""
    count = min(_TOKENS, ranges.max_logits_rows, ranges.max_num_tokens, ranges.max_seq_len)
    vocab = engine.manifest.model.vocab_size
    tokens = [int(t) for t in np.random.Generator(np.random.PCG64(0)).integers(0, vocab, count)]
    plan = lower(graph, Target("reference"), KernelRegistry(REFERENCE_KERNELS), ranges).plan
    # Read, not mapped, and not kept: a build holds one tensor at a time.
    driver = ReferenceDriver(plan, lambda name: _read(engine, name), keep_weights=False)
    try:
        allocate_for(driver, count)
        logits = prompt_logits(driver, tokens)
    finally:
        driver.close()
    rows: list[GoldenRow] = []
    for row in logits:
        best = np.argsort(-row, kind="stable")[:_TOP]
        rows.append(GoldenRow(tuple(int(i) for i in best), tuple(float(row[i]) for i in best)))
    golden = GoldenVectors(tuple(tokens), tuple(rows), float(np.max(np.abs(logits))))
    return msgspec.json.encode(golden, order="deterministic")


def _read(engine: EngineFile, name: str) -> np.ndarray:
    spec = engine.tensors[name]
    offset, nbytes = engine.tensor_location(name)
    dtype = spec.dtype.numpy
    return np.fromfile(engine.path, dtype, nbytes // dtype.itemsize, offset=offset)
