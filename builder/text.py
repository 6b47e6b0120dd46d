"""The textual form of a Graph: ``print_graph``, and ``parse_graph`` in text_parser.py, are inverses, exactly.

One statement a line; a line that starts with ``#`` is a comment.

    kv_group full window null
    state kv.0 paged_kv bf16 [2,64] group 0 layout rows
    input %token_ids: i32[T]
    weight %model.norm: f32[64] = cast(source("model.norm.weight", bf16[64]), f32)
    constant %c1: f32[2] = [1.0, 0.5]
    %v1: f32[T,64] = rms_norm(%v0, %model.norm) {"eps": 1e-06, "dtype": "f32"} from "model.norm"
    %v2: bf16[T,4,16], %v3: token[] = qkv_rope_write(...) {...} from "model.layers.0.self_attn"
    output %v1
    names 3

A constant is a list of numbers when it is short, else base64 of its bytes. ``names`` is the counter of fresh names.
"""

from __future__ import annotations

import base64
import json
import math
import re

import numpy as np

from ..runtime.format.tensor_type import TensorType
from ..runtime.format.weight_expr import (
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
from .graph import Graph, Node, Value

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
SHORT = 16  # constants of up to this many elements are printed as numbers


def print_graph(graph: Graph) -> str:
    """The whole graph as text."""
    lines = [f"kv_group {_word(g.name)} window {json.dumps(g.window)}" for g in graph.kv_groups]
    lines += [
        f"state {_word(s.name)} {s.kind} {s.dtype.value} {_ints(s.shape)} group {s.group} layout {s.layout}"
        for s in graph.states
    ]
    lines += [f"input {_declared(v)}" for v in graph.inputs]
    lines += [f"weight {_declared(v)} = {print_expr(e)}" for v, e in graph.weights.items()]
    lines += [f"constant {_declared(v)} = {_constant(c, v.type)}" for v, c in graph.constants.items()]
    lines += [print_node(node) for node in graph.nodes]
    lines += [f"output {_name(v)}" for v in graph.outputs]
    lines.append(f"names {graph._next}")
    return "\n".join(lines) + "\n"


def print_node(node: Node) -> str:
    """One node on one line."""
    outputs = ", ".join(map(_declared, node.outputs))
    inputs = ", ".join(map(_name, node.inputs))
    attributes = node.op.attributes()
    fields = f" {json.dumps(attributes)}" if attributes else ""
    origin = f" from {json.dumps(node.origin)}" if node.origin else ""
    return f"{outputs} = {node.op.name}({inputs}){fields}{origin}"


def print_expr(expr: WeightExpr) -> str:
    """A weight expression as nested calls."""
    match expr:
        case Source(name=name, shape=shape, dtype=dtype):
            return f"source({json.dumps(name)}, {TensorType(dtype, shape)})"
        case CastTo(x=x, dtype=dtype):
            return f"cast({print_expr(x)}, {dtype.value})"
        case Permute(x=x, axes=axes):
            return f"permute({print_expr(x)}, {_ints(axes)})"
        case Reshaped(x=x, shape=shape):
            return f"reshape({print_expr(x)}, {_ints(shape)})"
        case Stack(parts=parts):
            return f"concat({', '.join(map(print_expr, parts))})"
        case Interleave(parts=parts, rows=rows):
            return f"interleave({rows}, {', '.join(map(print_expr, parts))})"
        case AddScalar(x=x, value=value):
            return f"add_scalar({print_expr(x)}, {json.dumps(value)})"
        case Pack(x=x, layout=layout):
            return f"pack({print_expr(x)}, {layout})"


def _word(text: str) -> str:
    return text if PLAIN_NAME.fullmatch(text) else json.dumps(text)


def _name(value: Value) -> str:
    return "%" + _word(value.name)


def _declared(value: Value) -> str:
    return f"{_name(value)}: {value.type}"


def _ints(numbers: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"


def _constant(data: np.ndarray, type_: TensorType) -> str:
    flat = np.ascontiguousarray(data).reshape(-1)
    numbers = [x.item() if hasattr(x, "item") else x for x in flat.astype(np.float64)] if type_.dtype.is_float else None
    if flat.size <= SHORT:
        if numbers is None:
            return json.dumps([x.item() for x in flat])
        if all(map(math.isfinite, numbers)):
            return json.dumps(numbers)
    return f'base64 "{base64.b64encode(flat.tobytes()).decode()}"'
