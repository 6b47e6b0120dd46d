"""Refit: put the weights of another checkpoint into an engine, without building it again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import BuildError, EngineFormatError, LayoutOverflow
from .engine_reader import HASH_TREE, TENSOR_LAYOUTS, EngineFile
from .engine_writer import EngineWriter
from .tensor_source import TensorSource
from .weight_eval import check_sources, evaluate_chunks, expr_type
from .weight_expr import WeightExpr

#: Section with the expression of every weight: JSON {tensor name: expression}. Tensors it does not name are constants.
WEIGHTS = "weights"
#: Sections whose contents speak of the old weights.
STALE = ("golden",)
NOTE = "weights refitted: accuracy figures are of the weights it was built with, and golden vectors were dropped"


def encode_expressions(expressions: Mapping[str, WeightExpr]) -> bytes:
    """The contents of section "weights"."""
    return msgspec.json.encode(expressions, order="deterministic")


def read_expressions(engine: EngineFile) -> dict[str, WeightExpr]:
    """The expression of each weight of an engine. Raises EngineFormatError if they do not give the stored types."""
    if not engine.has_section(WEIGHTS):
        raise EngineFormatError(f"{engine.path}: the engine does not say how its weights were made; build it again")
    expressions = engine.json_section(WEIGHTS, dict[str, WeightExpr])
    try:
        types = {name: expr_type(expr) for name, expr in expressions.items()}
    except (BuildError, RecursionError) as error:
        raise EngineFormatError(f"{engine.path}: section {WEIGHTS!r} is damaged: {error}") from error
    for name, type_ in types.items():
        spec = engine.tensors.get(name)
        if spec is None or spec.type != type_:
            stored = "missing" if spec is None else f"stored as {spec.type}"
            raise EngineFormatError(f"{engine.path}: weight {name!r} should be {type_} and is {stored}")
    return expressions


def refit(
    engine: str | os.PathLike[str],
    source: TensorSource,
    out: str | os.PathLike[str],
    *,
    provenance: Mapping[str, str] | None = None,
) -> Path:
    """Write ``out``: the engine with weights evaluated from ``source`` (same names, shapes and types as before).

    Plans, code, tokenizer and constants stay. ``provenance`` entries replace those of the manifest. ``out`` may be
    the engine itself. Raises CheckpointError if the source does not fit, BuildError if ``out`` cannot be written
    (LayoutOverflow if the layout of a weight does not take its new values), EngineFormatError if the engine is
    damaged; then nothing is written.
    """
    with EngineFile.open(engine, verify_weights="before") as old:
        expressions = read_expressions(old)
        for expr in expressions.values():
            check_sources(expr, source)
        manifest = msgspec.structs.replace(
            old.manifest,
            provenance=old.manifest.provenance | dict(provenance or {}),
            notes=tuple(dict.fromkeys((*old.manifest.notes, NOTE))),
        )
        kept = [name for name in old.sections if name not in (HASH_TREE, TENSOR_LAYOUTS, *STALE)]
        specs = list(old.tensors.values())
        with EngineWriter(out, manifest, specs, {name: old.section(name) for name in kept}) as writer:
            for spec in specs:
                if spec.name not in expressions:
                    writer.write_tensor(spec.name, [old.tensor(spec.name)])
                    continue
                try:
                    writer.write_tensor(spec.name, evaluate_chunks(expressions[spec.name], source))
                except LayoutOverflow as error:
                    raise LayoutOverflow(
                        f"{old.path}: weight {spec.name!r} is stored as {spec.type}, which does not take the new values"
                        f" ({error}); build the engine again from the new checkpoint"
                    ) from error
    return Path(out)
