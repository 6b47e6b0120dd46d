"""Assign element types: what feeds a dot product, and what is kept in KV, has the engine's dtype; the rest is fp32.

Residual stream, norms, rope, softmax and logits stay fp32: with the model's own 16-bit casts everywhere, a
SmolLM2 agrees with fp32 on the best token at 95 % of positions, with fp32 between products at 99.4 %.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ...runtime.format.dtypes import DType
from ...runtime.format.tensor_type import TensorType
from ...runtime.format.weight_expr import (
    AddScalar,
    CastTo,
    Interleave,
    Pack,
    Permute,
    Reshaped,
    Source,
    Stack,
    WeightExpr,
)
from ..graph import Graph, Node, Value
from ..ops.elementwise import Cast
from ..ops.fused import Embedding, GatherRows, Gemm, KVWrite, PagedAttention, QKVRopeWrite, RMSNorm
from .rewriting import Sweep, derived_weight, sweep


def apply(graph: Graph, dtype: DType) -> None:
    """Set compute, storage and output types for an engine of ``dtype`` (f32, f16 or bf16)."""
    _convert_weights(graph, dtype)
    graph.states = [
        msgspec.structs.replace(spec, dtype=dtype) if spec.kind == "paged_kv" else spec for spec in graph.states
    ]
    users = graph.users()
    outputs = set(graph.outputs)

    def feeds_gemms(value: Value) -> bool:
        """Whether every reader rounds the value to ``dtype`` anyway, if need be after picking rows."""
        readers = users.get(value, [])
        return (
            value not in outputs
            and bool(readers)
            and all(
                feeds_gemms(reader.outputs[0]) if isinstance(reader.op, GatherRows) else _rounds(reader, value)
                for reader in readers
            )
        )

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        op = node.op
        out = dtype if node.outputs and feeds_gemms(node.outputs[0]) else DType.F32
        match op:
            case Gemm():
                # a result that is rounded once by its reader may as well be stored rounded
                return s.emit_all(replace(op, compute=dtype, dtype=out), node.inputs)
            case RMSNorm():
                return s.emit_all(replace(op, dtype=out), node.inputs)
            case GatherRows():
                return s.emit_all(op, node.inputs)  # in the type that its input has now
            case QKVRopeWrite():
                return s.emit_all(replace(op, compute=dtype, kv_dtype=dtype), node.inputs)
            case KVWrite():
                return s.emit_all(replace(op, dtype=dtype), node.inputs)
            case PagedAttention():
                q, token = node.inputs
                if q.type.dtype != dtype:
                    q = s.emit(Cast(dtype), q)
                return s.emit_all(replace(op, compute=dtype, kv_dtype=dtype, dtype=out), [q, token])
        return None

    sweep(graph, visit)


def _rounds(reader: Node, value: Value) -> bool:
    """A GEMM without prologue that reads the value as x (and not as residual)."""
    return (
        isinstance(reader.op, Gemm)
        and reader.op.prologue == "none"
        and reader.inputs[0] is value
        and all(v is not value for v in reader.inputs[1:])
    )


def _convert_weights(graph: Graph, dtype: DType) -> None:
    """GEMM weights and embedding tables change type in place; vectors stay fp32.

    A table that other work reads too stays as it is, beside a copy in ``dtype`` for the GEMMs.
    """
    tables = [n for n in graph.nodes if isinstance(n.op, Gemm | Embedding) and n.inputs[1] in graph.weights]
    others = {v for n in graph.nodes for i, v in enumerate(n.inputs) if n not in tables or i != 1}
    for value in dict.fromkeys(n.inputs[1] for n in tables):
        type_ = TensorType(dtype, value.type.shape, value.type.layout)
        expr = in_dtype(graph.weights[value], dtype)
        if value not in others:
            value.type, graph.weights[value] = type_, expr
            continue
        converted = derived_weight(graph, value.name, type_, expr)
        for node in tables:
            if node.inputs[1] is value:
                node.inputs[1] = converted


def in_dtype(expr: WeightExpr, dtype: DType) -> WeightExpr:
    """The fp32 expression rounded to ``dtype``, the rounding done on the checkpoint tensors (moving elements after
    rounding gives the same values). Widening to fp32 on the way is skipped: it loses nothing."""
    match expr:
        case Source():
            return expr if expr.dtype == dtype else CastTo(expr, dtype)
        case CastTo(dtype=known) if known == dtype:
            return expr
        case CastTo(x=x, dtype=DType.F32) if not isinstance(x, Pack):
            return in_dtype(x, dtype)
        case Permute(x=x, axes=axes):
            return Permute(in_dtype(x, dtype), axes)
        case Reshaped(x=x, shape=shape):
            return Reshaped(in_dtype(x, dtype), shape)
        case Stack(parts=parts):
            return Stack(tuple(in_dtype(part, dtype) for part in parts))
        case Interleave(parts=parts, rows=rows):
            return Interleave(tuple(in_dtype(part, dtype) for part in parts), rows)
        case Pack(x=x, layout=layout):
            return Pack(in_dtype(x, dtype), layout)
        case AddScalar() | CastTo():
            return CastTo(expr, dtype)
