"""What each aten op means in pelton ops: the table from op name to handler.

A handler gets the importer, the exported node, and the node's arguments with names resolved:
graph values, constant tensors, numbers, "T" for the token count, lists of these. It returns graph values.
"""

from __future__ import annotations

from . import import_elementwise as elementwise
from . import import_products as products
from . import import_shapes as shapes
from .import_elementwise import Handler

_UNARY = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos", "tanh", "erf", "sigmoid")
_SHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
_SAME = ("contiguous", "clone", "alias", "detach", "lift_fresh_copy")

HANDLERS: dict[str, Handler] = {
    **{name: elementwise.unary(name) for name in (*_UNARY, "silu", "relu", "floor")},
    **{name: shapes.reshape for name in _SHAPES},
    **{name: elementwise.identity for name in _SAME},
    **{name: elementwise.compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_not": elementwise.unary("not"),
    "bitwise_not": elementwise.bitwise_not,
    "add": elementwise.binary("add"),
    "sub": elementwise.binary("sub"),
    "rsub": elementwise.rsub,
    "mul": elementwise.binary("mul"),
    "div": elementwise.div,
    "maximum": elementwise.binary("max"),
    "minimum": elementwise.binary("min"),
    "logical_and": elementwise.binary("and"),
    "logical_or": elementwise.binary("or"),
    "bitwise_and": elementwise.binary("and"),
    "bitwise_or": elementwise.binary("or"),
    "__and__": elementwise.binary("and"),
    "__or__": elementwise.binary("or"),
    "pow": elementwise.power,
    "gelu": elementwise.gelu,
    "clamp": elementwise.clamp,
    "clamp_min": elementwise.clamp,
    "softplus": elementwise.softplus,
    "where": elementwise.where,
    "masked_fill": elementwise.masked_fill,
    "to": elementwise.to,
    "_to_copy": elementwise.to,
    "type_as": elementwise.to,
    "dropout": elementwise.dropout,
    "full": lambda ctx, node, size, fill, **k: shapes.full(ctx, node, fill=fill),
    "zeros": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=0),
    "ones": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=1),
    "zeros_like": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=0),
    "ones_like": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=1),
    "new_zeros": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=0),
    "new_ones": lambda ctx, node, *a, **k: shapes.full(ctx, node, fill=1),
    "full_like": shapes.full_like,
    "arange": shapes.arange,
    "expand": shapes.expand,
    "expand_as": shapes.expand,
    "transpose": shapes.transpose,
    "t": shapes.t,
    "permute": shapes.permute,
    "slice": shapes.cut,
    "narrow": lambda ctx, node, x, axis, start, length: shapes.cut(ctx, node, x, axis, start, start + length),
    "select": shapes.select,
    "split": shapes.split,
    "split_with_sizes": shapes.split,
    "chunk": shapes.split,
    "unbind": shapes.unbind,
    "cat": shapes.cat,
    "stack": shapes.stack,
    "index": shapes.index,
    "index_select": shapes.index_select,
    "embedding": shapes.embedding,
    "mean": products.reduce("mean"),
    "sum": products.reduce("sum"),
    "amax": products.reduce("max"),
    "amin": products.reduce("min"),
    "softmax": products.softmax,
    "_softmax": products.softmax,
    "layer_norm": products.layer_norm,
    "rms_norm": products.rms_norm,
    "linear": products.linear,
    "mm": products.matmul,
    "bmm": products.matmul,
    "matmul": products.matmul,
    "addmm": products.addmm,
    "attention": products.attention,
}
