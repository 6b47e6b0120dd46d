"""Handlers of aten reductions, products and attention (see import_aten.py for what a handler is)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..runtime.errors import GraphError
from .graph import Value
from .import_elementwise import Handler, as_result
from .importer import Importer, Operand
from .ops.elementwise import Binary, Unary
from .ops.generic import Attention, Linear, MatMul, Reduce, Softmax


def reduce(kind: str) -> Handler:
    def handle(
        ctx: Importer, node: fx.Node, x: Value, axes: Any = None, keepdims: bool = False, **names: Operand
    ) -> Value:
        axes = names.get("dim", axes)
        rank = x.type.rank
        listed = [axes] if isinstance(axes, int) else list(range(rank)) if not axes else list(axes)
        normal = tuple(sorted(axis % rank for axis in listed))
        if any(isinstance(x.type.shape[axis], str) for axis in normal):
            raise GraphError("it reduces over the tokens of a step, which are rows of many sequences")
        return ctx.emit(Reduce(kind, normal, bool(names.get("keepdim", keepdims))), as_result(ctx, node, x))

    return handle


def softmax(ctx: Importer, node: fx.Node, x: Value, axis: int, *_: Operand, **__: Operand) -> Value:
    axis %= x.type.rank
    if isinstance(x.type.shape[axis], str):
        raise GraphError("it normalises over the tokens of a step, which are rows of many sequences")
    return ctx.emit(Softmax(axis), as_result(ctx, node, x))


def layer_norm(
    ctx: Importer,
    node: fx.Node,
    x: Value,
    shape: list[int],
    weight: Operand = None,
    bias: Operand = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    axes = tuple(range(x.type.rank - len(shape), x.type.rank))
    centred = ctx.emit(Binary("sub"), x, ctx.emit(Reduce("mean", axes, True), x))
    return scaled_by_rms(ctx, centred, axes, eps, weight, bias)


def rms_norm(
    ctx: Importer, node: fx.Node, x: Value, shape: list[int], weight: Operand = None, eps: float | None = None
) -> Value:
    axes = tuple(range(x.type.rank - len(shape), x.type.rank))
    return scaled_by_rms(ctx, x, axes, torch.finfo(torch.float32).eps if eps is None else eps, weight, None)


def scaled_by_rms(ctx: Importer, x: Value, axes: tuple[int, ...], eps: float, weight: Operand, bias: Operand) -> Value:
    """x / sqrt(mean(x^2) + eps) [* weight] [+ bias]."""
    mean = ctx.emit(Reduce("mean", axes, True), ctx.emit(Unary("square"), x))
    y = ctx.emit(Binary("mul"), x, ctx.emit(Unary("rsqrt"), ctx.emit(Binary("add"), mean, eps)))
    y = y if weight is None else ctx.emit(Binary("mul"), y, weight)
    return y if bias is None else ctx.emit(Binary("add"), y, bias)


def linear(ctx: Importer, node: fx.Node, x: Value, weight: Operand, bias: Operand = None) -> Value:
    operands = [x, weight] if bias is None else [x, weight, bias]
    return ctx.emit(Linear(bias=bias is not None), *operands)


def matmul(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> Value:
    """A weight on the right is a linear; an outer product (contraction over 1) is a broadcast product."""
    a, b = ctx.value(a), ctx.value(b)
    if b.type.rank == 2 and b.kind == "weight":
        return ctx.emit(Linear(), a, ctx.weights.permuted(b, (1, 0)))
    if a.type.rank >= 2 and b.type.rank >= 2 and a.type.shape[-1] == 1 and b.type.shape[-2] == 1:
        return ctx.emit(Binary("mul"), a, b)
    if a.type.rank < 2 or b.type.rank < 2:
        raise GraphError("a product with a vector")
    if isinstance(a.type.shape[-1], str):
        raise GraphError("it contracts over the tokens of a step, which are rows of many sequences")
    return ctx.emit(MatMul(), a, b)


def addmm(ctx: Importer, node: fx.Node, bias: Operand, a: Value, b: Operand, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise GraphError(f"alpha {alpha}, beta {beta}")
    b = ctx.value(b)
    if b.kind == "weight" and isinstance(bias, Value) and bias.kind == "weight" and bias.type.rank == 1:
        return ctx.emit(Linear(bias=True), a, ctx.weights.permuted(b, (1, 0)), bias)
    return ctx.emit(Binary("add"), matmul(ctx, node, a, b), bias)


def attention(
    ctx: Importer, node: fx.Node, q: Value, k: Value, v: Value, scale: float, window: int, softcap: float
) -> Value:
    layer = len(ctx.graph.states)
    width = None if window < 0 else window
    ctx.add_state(layer, int(k.type.shape[1]), int(k.type.shape[3]), width)
    cap = None if softcap == 0 else softcap
    return ctx.emit(Attention(layer=layer, mask="causal", window=width, scale=scale, softcap=cap), q, k, v)
