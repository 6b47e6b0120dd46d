"""The passes, in order, and why they stand where they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...runtime.errors import BuildError, GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.plan import Ranges
from ...runtime.format.tensor_source import TensorSource
from ..graph import Graph
from ..text import print_graph
from ..verifier import verify
from . import (
    canonicalise,
    common_nodes,
    embedding_scale,
    fold_constants,
    fuse_qkv_rope_write,
    gated_mlp,
    gather_rows,
    gemm_epilogue,
    gemm_prologue,
    linear_to_gemm,
    merge_qkv,
    norm_residual,
    pack_weights,
    precision,
    rms_norm,
    rope,
    sink_transposes,
    split_attention,
    squeeze_batch,
    step_edges,
)
from .differential import DifferentialTest
from .rewriting import drop_unused


@dataclass(frozen=True)
class PassOptions:
    """What the passes may depend on.

    ``dump_ir``: folder for numbered text after each pass. ``verify``: run the graph before and after each pass on
    random inputs and compare; with weights from ``source``, or random ones where that is None. ``reads``: which
    layouts the targets' kernels take (see pack_weights); None leaves all weights in panel16.
    """

    precision: DType
    ranges: Ranges
    dump_ir: Path | None = None
    verify: bool = False
    source: TensorSource | None = None
    reads: pack_weights.Reads | None = None


@dataclass(frozen=True)
class Pass:
    """A named rewrite. ``changes_rounding``: its result may differ by the engine dtype's rounding."""

    name: str
    apply: Callable[[Graph, PassOptions], None]
    changes_rounding: bool = False


def _plain(apply: Callable[[Graph], None]) -> Callable[[Graph, PassOptions], None]:
    return lambda graph, options: apply(graph)


PASSES: tuple[Pass, ...] = (
    # One form for each meaning, so that every later pattern is written once.
    Pass("canonicalise", _plain(canonicalise.apply)),
    Pass("fold_constants", _plain(fold_constants.apply)),
    # Tokens become the first axis; views of views collapse, which lets transpositions meet elementwise ops.
    Pass("squeeze_batch", _plain(squeeze_batch.apply)),
    Pass("sink_transposes", _plain(sink_transposes.apply)),
    Pass("canonicalise_views", _plain(canonicalise.apply)),
    Pass("fold_views", _plain(fold_constants.apply)),
    # Patterns compare operands by identity: equal work must be one value first.
    Pass("common_nodes", _plain(common_nodes.apply)),
    # Norms before rope: query and key norms stand between projection and rotation.
    Pass("rms_norm", _plain(rms_norm.apply)),
    Pass("rope", _plain(rope.apply)),
    Pass("fold_tables", _plain(fold_constants.apply)),
    Pass("embedding_scale", _plain(embedding_scale.apply)),
    # Attention in token-major form; its transpositions cancel those that sank.
    Pass("split_attention", _plain(split_attention.apply)),
    Pass("canonicalise_attention", _plain(canonicalise.apply)),
    # Needs the final norm as one node; before GEMMs form, so that the head is fused on its own rows.
    Pass("gather_rows", _plain(gather_rows.apply)),
    # Merging needs linears; the gated pair first, since its product is the clearer pattern.
    Pass("gated_mlp", _plain(gated_mlp.apply)),
    Pass("merge_qkv", _plain(merge_qkv.apply)),
    Pass("linear_to_gemm", _plain(linear_to_gemm.apply)),
    # The prologue looks at all readers of a norm, so all GEMMs must exist.
    Pass("gemm_prologue", _plain(gemm_prologue.apply)),
    Pass("gemm_epilogue", _plain(gemm_epilogue.apply)),
    # Reads slices of the merged projection.
    Pass("fuse_qkv_rope_write", _plain(fuse_qkv_rope_write.apply)),
    # Norms that are left stand after a block; those before one, and on heads, have been taken in above.
    Pass("norm_residual", _plain(norm_residual.apply)),
    # Token ids and sampling at the edges: nothing above needs to know them.
    Pass("step_edges", lambda graph, options: step_edges.apply(graph, options.ranges)),
    # Types last: every pass above is exact in fp32 and can be checked closely.
    Pass("precision", lambda graph, options: precision.apply(graph, options.precision), changes_rounding=True),
    # Weights that became equal (tied embeddings) are one tensor.
    Pass("common_weights", _plain(common_nodes.apply)),
    # What a weight's readers are is settled.
    Pass("pack_weights", lambda graph, options: pack_weights.apply(graph, options.source, options.reads)),
)


def optimize(graph: Graph, options: PassOptions) -> Graph:
    """Run all passes on ``graph`` in place and return it. Raises GraphError naming the pass that broke it."""
    verify(graph)
    _dump(graph, options, 0, "imported")
    test = DifferentialTest(graph, options.ranges, options.source) if options.verify else None
    for number, step in enumerate(PASSES, 1):
        try:
            step.apply(graph, options)
            drop_unused(graph)
            _dump(graph, options, number, step.name)
            verify(graph)
            if test is not None:
                test.check(graph, options.precision if step.changes_rounding else DType.F32)
        except GraphError as error:
            raise GraphError(f"pass {step.name}: {error}") from error
    return graph


def _dump(graph: Graph, options: PassOptions, number: int, name: str) -> None:
    if options.dump_ir is None:
        return
    path = options.dump_ir / f"{number:02d}-{name}.txt"
    try:
        options.dump_ir.mkdir(parents=True, exist_ok=True)
        path.write_text(print_graph(graph))
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror}; give --dump-ir a folder you may write to") from error
