"""Split q, k, v; normalise heads; rotate; store k and v: one kernel that reads the merged projection once."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.format.dtypes import DType
from ..graph import Graph, Node, Value
from ..ops.fused import KVWrite, PagedAttention, QKVRopeWrite, RMSNorm, Rope
from .match import below_views, producer, slice_of, through_views
from .rewriting import Sweep, sweep


@dataclass(frozen=True)
class _Head:
    """How q or k comes from the merged projection."""

    source: tuple[Value, int, int]  # (qkv, start, stop)
    rope: Node | None
    norm: Node | None


def apply(graph: Graph) -> None:
    """Where a KV write and the attention that follows it read slices of one value in the usual order."""
    fused: dict[Node, list[Value]] = {}
    attention_of = {
        node.inputs[1].node: node for node in graph.nodes if isinstance(node.op, PagedAttention) and node.inputs[1].node
    }

    def visit(s: Sweep, node: Node) -> list[Value] | None:
        if isinstance(node.op, KVWrite):
            attention = attention_of.get(node)
            outputs = None if attention is None else _fuse(s, node, attention)
            if attention is None or outputs is None:
                return None
            fused[attention] = outputs
            return [outputs[1]]
        if node in fused:
            return [s.emit(node.op, *fused[node])]
        return None

    sweep(graph, visit)


def _fuse(s: Sweep, write: Node, attention: Node) -> list[Value] | None:
    """(q, token) of the fused op, if everything has the form it knows."""
    op = attention.op
    assert isinstance(op, PagedAttention)
    if not s.used_once(attention.inputs[0]):
        return None
    q, k, v = _head(attention.inputs[0]), _head(write.inputs[0]), _head(write.inputs[1])
    if q is None or k is None or v is None or v.rope is not None or v.norm is not None:
        return None
    if q.rope is None or k.rope is None or q.rope.op != k.rope.op or q.rope.inputs[1:] != k.rope.inputs[1:]:
        return None
    norms = [h.norm for h in (q, k) if h.norm is not None]
    if len(norms) == 1 or (len(norms) == 2 and norms[0].op != norms[1].op):
        return None
    qkv, width = q.source[0], op.head_dim
    edges = [0, op.heads * width, (op.heads + op.kv_heads) * width, (op.heads + 2 * op.kv_heads) * width]
    expected = [(qkv, start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
    if [q.source, k.source, v.source] != expected or qkv.type.shape != ("T", edges[-1]):
        return None
    rope, norm = q.rope.op, norms[0].op if norms else None
    assert isinstance(rope, Rope)
    fused = QKVRopeWrite(
        state=op.state,
        heads=op.heads,
        kv_heads=op.kv_heads,
        head_dim=width,
        rotary_dim=rope.rotary_dim,
        interleaved=rope.interleaved,
        qk_norm=norm is not None,
        qk_eps=norm.eps if isinstance(norm, RMSNorm) else 0.0,
        compute=DType.F32,
        kv_dtype=DType.F32,
    )
    return s.emit_all(fused, [qkv, *q.rope.inputs[1:], *(n.inputs[1] for n in norms)])


def _head(value: Value) -> _Head | None:
    """slice -> view as heads -> [rms_norm] -> [rope]. A single head may lack its axis in between."""
    rope = producer(value, Rope)
    if rope is not None:
        value = rope.inputs[0]
    norm = producer(below_views(value), RMSNorm)
    if norm is not None:
        value = norm.inputs[0]
    source = slice_of(through_views(value))
    return None if source is None else _Head(source, rope, norm)
