"""Handlers of elementwise aten ops (see import_aten.py for what a handler is)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..runtime.errors import GraphError
from ..runtime.format.dtypes import DType
from .graph import Value
from .importer import Importer, Operand
from .ops.elementwise import Binary, Unary, Where

Handler = Callable[..., Any]


def unary(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, x: Operand) -> Value:
        return ctx.emit(Unary(kind), as_result(ctx, node, x))

    return handle


def as_result(ctx: Importer, node: fx.Node, x: Operand) -> Value:
    """An operand in the dtype that torch promotes the result to."""
    return ctx.cast(x, ctx.dtype(node.meta["val"].dtype))


def binary(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, a: Operand, b: Operand, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            b = ctx.emit(Binary("mul"), as_result(ctx, node, b), ctx.value(alpha, ctx.dtype(node.meta["val"].dtype)))
        for keep, other in ((a, b), (b, a)):
            if isinstance(keep, Value) and is_neutral(kind, other, right=keep is a) and same_type(ctx, node, keep):
                return keep
        return ctx.emit(Binary(kind), as_result(ctx, node, a), as_result(ctx, node, b))

    return handle


def is_neutral(kind: str, x: Operand, *, right: bool) -> bool:
    """Whether combining with the number ``x`` changes nothing (times 1, plus 0)."""
    if isinstance(x, torch.Tensor) and x.ndim == 0:
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    if kind in ("mul", "div"):
        return x == 1 and (kind == "mul" or right)
    return kind in ("add", "sub") and x == 0 and (kind == "add" or right)


def same_type(ctx: Importer, node: fx.Node, x: Value) -> bool:
    return x.type.shape == ctx.dims(node) and x.type.dtype == ctx.dtype(node.meta["val"].dtype)


def rsub(ctx: Importer, node: fx.Node, a: Operand, b: Operand, alpha: Any = 1) -> Value:
    result: Value = binary("sub")(ctx, node, b, a, alpha=alpha)
    return result


def div(ctx: Importer, node: fx.Node, a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        raise GraphError(f"rounding_mode {rounding_mode}")
    result: Value = binary("div")(ctx, node, a, b)
    return result


def compare(kind: str) -> Handler:
    def handle(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> Value:
        metas: list[Any] = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:2]]
        common = ctx.dtype(torch.result_type(*metas))
        return ctx.emit(Binary(kind), ctx.cast(a, common), ctx.cast(b, common))

    return handle


def power(ctx: Importer, node: fx.Node, x: Operand, exponent: Operand) -> Value:
    """Small constant exponents become products and roots, whose rounding every target shares."""
    if isinstance(exponent, torch.Tensor) and exponent.ndim == 0:
        exponent = exponent.item()
    if not isinstance(exponent, int | float):
        return ctx.emit(Binary("pow"), as_result(ctx, node, x), as_result(ctx, node, exponent))
    base = as_result(ctx, node, x)
    roots = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in roots:
        return ctx.emit(Unary(roots[exponent]), base)
    if exponent == 3:
        return ctx.emit(Binary("mul"), ctx.emit(Unary("square"), base), base)
    if exponent == 1:
        return base
    return ctx.emit(Binary("pow"), base, ctx.value(exponent, base.type.dtype))


def gelu(ctx: Importer, node: fx.Node, x: Value, *, approximate: str = "none") -> Value:
    return ctx.emit(Unary("gelu_tanh" if approximate == "tanh" else "gelu_erf"), x)


def clamp(
    ctx: Importer, node: fx.Node, x: Operand, low: Operand = None, high: Operand = None, **names: Operand
) -> Value:
    low, high = names.get("min", low), names.get("max", high)
    y = as_result(ctx, node, x)
    for kind, bound in (("max", low), ("min", high)):
        if bound is not None:
            y = ctx.emit(Binary(kind), y, as_result(ctx, node, bound))
    return y


def where(ctx: Importer, node: fx.Node, condition: Value, a: Operand, b: Operand) -> Value:
    return ctx.emit(Where(), condition, as_result(ctx, node, a), as_result(ctx, node, b))


def masked_fill(ctx: Importer, node: fx.Node, x: Operand, mask: Value, fill: Operand) -> Value:
    return ctx.emit(Where(), mask, as_result(ctx, node, fill), as_result(ctx, node, x))


def to(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    """Any conversion: torch recorded the dtype it ends in."""
    return as_result(ctx, node, x)


def identity(ctx: Importer, node: fx.Node, x: Value, *_: Operand, **__: Operand) -> Value:
    return x


def dropout(ctx: Importer, node: fx.Node, x: Value, p: float = 0.5, train: bool = False) -> Value:
    if train and p > 0:
        raise GraphError("dropout is active")
    return x


def softplus(ctx: Importer, node: fx.Node, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    """log(1 + exp(x)), x itself where x is large."""
    if beta != 1:
        raise GraphError(f"softplus with beta {beta}")
    soft = ctx.emit(Unary("log"), ctx.emit(Binary("add"), ctx.emit(Unary("exp"), x), 1.0))
    return ctx.emit(Where(), ctx.emit(Binary("gt"), x, float(threshold)), x, soft)


def bitwise_not(ctx: Importer, node: fx.Node, x: Value) -> Value:
    if x.type.dtype != DType.BOOL:
        raise GraphError("bits of integers")
    return ctx.emit(Unary("not"), x)
