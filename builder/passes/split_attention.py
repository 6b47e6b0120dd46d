"""Split a model's attention call into writing k and v and reading them, token-major, and group the KV states.

Layers with the same window share block tables: blocks of a windowed layer can be freed when the window has
passed them, those of a full layer cannot.
"""

from __future__ import annotations

import msgspec

from ...runtime.errors import GraphError
from ...runtime.format.dtypes import DType
from ...runtime.format.plan import KVGroup
from ..graph import Graph, Node, Value
from ..ops.fused import KVWrite, PagedAttention
from ..ops.generic import Attention
from .rewriting import Sweep, sweep

MAX_GROUPS = 4  # block tables that a step can carry (PELTON_MAX_KV_GROUPS)


def apply(graph: Graph) -> None:
    """Attention [1,heads,T,D] -> KVWrite and PagedAttention on [T,heads,D]; sets kv_groups and StateSpec.group."""
    windows = {n.op.state: n.op.window for n in graph.nodes if isinstance(n.op, Attention)}
    if windows:
        _group_states(graph, windows)
    sweep(graph, _visit)


def _visit(s: Sweep, node: Node) -> list[Value] | None:
    op = node.op
    if not isinstance(op, Attention):
        return None
    q, k, v = (s.transpose(s.view(x, x.type.shape[1:]), (1, 0, 2)) for x in node.inputs)
    _, heads, dim = q.type.shape
    kv_heads = k.type.shape[1]
    if not (isinstance(heads, int) and isinstance(dim, int) and isinstance(kv_heads, int)):
        raise GraphError(f"attention at {node.origin!r}: heads and head_dim must be constant: {q.type}, {k.type}")
    token = s.emit(KVWrite(op.state, kv_heads, dim, DType.F32), k, v)
    attention = PagedAttention(
        state=op.state,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=op.scale,
        window=op.window,
        softcap=op.softcap,
        compute=DType.F32,
        kv_dtype=DType.F32,
        dtype=DType.F32,
    )
    return [s.view(s.emit(attention, q, token), node.outputs[0].type.shape)]


def _group_states(graph: Graph, windows: dict[str, int | None]) -> None:
    """One group per distinct window, full attention first, then by width."""
    distinct = sorted(set(windows.values()), key=lambda w: -1 if w is None else w)
    if len(distinct) > MAX_GROUPS:
        raise GraphError(
            f"the model's attention layers have {len(distinct)} different windows ({distinct}); an engine can hold"
            f" {MAX_GROUPS} groups of KV blocks"
        )
    graph.kv_groups = [KVGroup(name="full" if w is None else f"window{w}", window=w) for w in distinct]
    graph.states = [
        msgspec.structs.replace(spec, group=distinct.index(windows[spec.name])) if spec.name in windows else spec
        for spec in graph.states
    ]
