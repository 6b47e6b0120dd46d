"""Every aten handler against torch: small functions, exported, imported and interpreted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pelton.builder.checkpoint import Checkpoint
from pelton.builder.graph import Graph
from pelton.builder.import_aten import HANDLERS
from pelton.builder.importer import import_graph
from pelton.builder.ops.elementwise import Binary, Cast, Unary
from pelton.builder.ops.generic import Expand, Linear, Reshape
from pelton.builder.trace import TracedModel, export
from pelton.builder.trace_attention import AttentionTracer
from pelton.runtime.errors import UnsupportedModelError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_source import DictSource
from tests.builder.interpret import Interpreter
from tests.models import random_ids

Function = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """x [1,T,8] = embedding + position, p int64 [1,T] -> f(x, p) [1,T,N]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(300, 8)
        self.w = nn.Parameter(torch.randn(6, 8))
        self.wt = nn.Parameter(torch.randn(8, 6))
        self.b = nn.Parameter(torch.randn(6))
        self.g = nn.Parameter(torch.randn(8))
        self.table = nn.Buffer(torch.randn(64, 5), persistent=False)
        self.c = nn.Buffer(torch.linspace(-2, 2, 8), persistent=False)
        self.function = function

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.embed(input_ids) + position_ids[..., None] * 0.01
        return SimpleNamespace(logits=self.function(self, x, position_ids))


def imported(function: Function) -> tuple[Graph, Checkpoint, Net]:
    model = Net(function).eval()
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    checkpoint = Checkpoint(Path("test"), "test", {"model_type": "test"}, DictSource(arrays), {}, {}, DType.F32)
    attention = AttentionTracer(64)
    attention.calls = 1
    with torch.no_grad():
        program = export(checkpoint, model, attention)
    traced = TracedModel(program, {name: name for name in arrays}, (), "test")
    return import_graph(traced, checkpoint), checkpoint, model


def compare(function: Function) -> Graph:
    graph, checkpoint, model = imported(function)
    for length in (1, 6):
        ids = random_ids(length, seed=length)
        ours = Interpreter(graph, checkpoint.source).step({0: (0, ids)})[0]
        with torch.no_grad():
            theirs = model(torch.tensor([ids]), torch.arange(length)[None]).logits[0].numpy()
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 2e-6 * max(1.0, float(np.abs(theirs).max()))
    return graph


FUNCTIONS: dict[str, Function] = {
    # elementwise
    "silu relu": lambda n, x, p: F.silu(x) + F.relu(x),
    "sigmoid tanh": lambda n, x, p: torch.sigmoid(x) * torch.tanh(x) - torch.exp(-x.abs()),
    "gelu erf": lambda n, x, p: F.gelu(x),
    "gelu tanh": lambda n, x, p: F.gelu(x, approximate="tanh"),
    "log sqrt": lambda n, x, p: torch.log(x.abs() + 1) + torch.sqrt(x.abs()) + torch.reciprocal(x.abs() + 1),
    "sin cos floor erf": lambda n, x, p: torch.sin(x) + torch.cos(x) + torch.floor(x) + torch.erf(x) - x.square(),
    "powers": lambda n, x, p: x**2 + x**3 + x.abs() ** 0.5 + (x.abs() + 1) ** -0.5 + (x + 9) ** -1 + x**1 + x**4,
    "power of a number": lambda n, x, p: 1.5**x + (x.abs() + 0.1) ** n.c,
    "scaled add": lambda n, x, p: torch.add(x, x, alpha=3) + torch.sub(x, n.c, alpha=2),
    "number first": lambda n, x, p: 1.0 - x + (2 / (x.abs() + 1)) + torch.rsub(x, 3, alpha=2),
    "neutral numbers": lambda n, x, p: (x * 1.0 + 0.0) / 1.0 - 0,
    "not neutral": lambda n, x, p: 1.0 / (x.abs() + 1.0) + (0 - x),
    "clamp": lambda n, x, p: x.clamp(-0.5, 0.7) + x.clamp(min=0.1) + torch.clamp(x, max=0.2) + x.clamp_min(0.3),
    "maximum": lambda n, x, p: torch.maximum(x, n.c) + torch.minimum(x, n.g),
    "where": lambda n, x, p: torch.where((x > 0) & (x <= 1) | ~(x >= -1), x, n.c) + torch.where(x != x, 1.0, x),
    "masked fill": lambda n, x, p: x.masked_fill(x < 0, -3.0) + torch.logical_not(x > 0).float(),
    "compare integers": lambda n, x, p: x * (p[..., None] > 2) + (p[..., None] == 3).float() + (p[..., None] < 1.5),
    "integer to float": lambda n, x, p: x + p[..., None] / 2 + p[..., None] * 0.5 + p[..., None].to(torch.float32),
    "integer arithmetic": lambda n, x, p: x + (p * 2 + 1 - p)[..., None].float(),
    "softplus": lambda n, x, p: F.softplus(x * 30),
    "dropout in eval": lambda n, x, p: F.dropout(x, 0.5, training=False),
    "type_as": lambda n, x, p: x + p[..., None].type_as(x),
    "reciprocal root": lambda n, x, p: torch.rsqrt(x.abs() + 1),
    "logic by name": lambda n, x, p: x * torch.logical_or(x > 1, torch.logical_and(x < 0, x > -1)),
    "logic of bits": lambda n, x, p: x * torch.bitwise_or(x > 1, torch.bitwise_and(x < 0, ~(x > -1))),
    # shapes
    "heads and back": lambda n, x, p: x.view(1, -1, 2, 4).transpose(1, 2).transpose(1, 2).reshape(1, -1, 8),
    "unflatten": lambda n, x, p: x.unflatten(-1, (2, 4)).flatten(2),
    "permute": lambda n, x, p: x.view(1, -1, 2, 4).permute(0, 1, 3, 2).reshape(1, -1, 8),
    "view as": lambda n, x, p: x.view(1, -1, 2, 4).view_as(x) + x.view(1, -1, 2, 4).reshape_as(x),
    "squeeze": lambda n, x, p: x.unsqueeze(0).squeeze(0).unsqueeze(2).squeeze(2),
    "slices": lambda n, x, p: torch.cat([x[..., 2:6], -x[..., ::3], x[..., -2:], x[:, :, :0]], -1),
    "full slice of tokens": lambda n, x, p: x[:, 0:, :],
    "select": lambda n, x, p: x[..., 3:4] * x.select(2, -1)[..., None],
    "narrow": lambda n, x, p: x.narrow(2, 1, 4),
    "split": lambda n, x, p: torch.cat([part * i for i, part in enumerate(x.split([1, 3, 4], -1))], -1),
    "even split": lambda n, x, p: torch.cat(list(x.split(3, dim=2))[::-1], 2),
    "chunk": lambda n, x, p: x.chunk(2, -1)[0] * x.chunk(2, dim=2)[1],
    "unbind": lambda n, x, p: torch.stack(x.view(1, -1, 2, 4).unbind(2)[::-1], -1).reshape(1, -1, 8),
    "stack": lambda n, x, p: torch.stack([x, x * 2], 2).flatten(2),
    "expand": lambda n, x, p: x[..., None].expand(-1, -1, -1, 3).reshape(1, x.shape[1], 24),
    "expand a constant": lambda n, x, p: n.c.expand(1, x.shape[1], 8) * x,
    "expand_as": lambda n, x, p: n.c.expand_as(x) + x,
    "full": lambda n, x, p: x + x.new_ones(1, x.shape[1], 1) * 2 + torch.full((1, x.shape[1], 8), 0.5),
    "zeros like": lambda n, x, p: x + torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 0.25),
    "zeros": lambda n, x, p: x + torch.zeros(1, x.shape[1], 8) + x.new_zeros(x.shape) + torch.ones(1, x.shape[1], 1),
    "clone": lambda n, x, p: x.contiguous().clone().detach() + x,
    # lookups
    "index by position": lambda n, x, p: n.table[p],
    "index select": lambda n, x, p: x.index_select(2, torch.tensor([3, 1, 1])),
    "index by constant": lambda n, x, p: x[:, :, torch.tensor([7, 0])],
    "embedding of positions": lambda n, x, p: F.embedding(p, n.table),
    # reductions and products
    "mean": lambda n, x, p: x - x.mean(-1, keepdim=True) + x.mean(dim=2)[..., None],
    "sum max min": lambda n, x, p: x.sum(-1, keepdim=True) + x.amax(-1, keepdim=True) - x.amin(2, keepdim=True),
    "two axes": lambda n, x, p: x + x.view(1, -1, 2, 4).mean((2, 3))[..., None],
    "softmax": lambda n, x, p: F.softmax(x, dim=-1, dtype=torch.float32) + x.softmax(2),
    "layer norm": lambda n, x, p: F.layer_norm(x, (8,), n.g, n.c, 1e-3) + F.layer_norm(x, (8,)),
    "rms norm": lambda n, x, p: F.rms_norm(x, (8,), n.g, 1e-3),
    "linear": lambda n, x, p: F.linear(x, n.w, n.b) + F.linear(x, n.w),
    "matmul with a weight": lambda n, x, p: x @ n.wt + x @ n.w.t() + x.view(-1, 8) @ n.w.transpose(0, 1),
    "addmm": lambda n, x, p: torch.addmm(n.b, x.view(-1, 8), n.wt)[None],
    "outer product": lambda n, x, p: (n.c[None, :, None] @ p[:, None, :].float()).transpose(1, 2),
    "product per token": lambda n, x, p: (x.view(-1, 2, 4) @ x.view(-1, 4, 2)).reshape(1, -1, 4),
    "mm": lambda n, x, p: torch.mm(x.view(-1, 8), n.wt)[None],
    "bmm": lambda n, x, p: torch.bmm(x.view(-1, 2, 4), x.view(-1, 4, 2)).reshape(1, -1, 4),
    "product with a constant": lambda n, x, p: x @ n.c.view(8, 1).expand(8, 4).contiguous(),
    "weight arithmetic": lambda n, x, p: F.linear(x, n.w * 2.0) + (1 + n.b),
    "weight reshaped": lambda n, x, p: x * n.g.view(1, 1, 8) + n.w.reshape(8, 6).t().sum(0),
    # constants
    "folded": lambda n, x, p: x + torch.arange(8).float().cumsum(0).flip(0) + n.c.sort(descending=True)[0].roll(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_means_what_torch_computes(name: str) -> None:
    compare(FUNCTIONS[name])


REFUSED: dict[str, tuple[Function, str]] = {
    "sum over tokens": (lambda n, x, p: x + x.mean(1, keepdim=True), "mean.*reduces over the tokens"),
    "cumsum": (lambda n, x, p: x.cumsum(1), "cumsum.*not understood"),
    "softmax over tokens": (lambda n, x, p: x.softmax(1), "normalises over the tokens"),
    "shift": (lambda n, x, p: torch.cat([x[:, :1], x[:, :-1]], 1), "cannot be traced|cuts the tokens"),
    "roll": (lambda n, x, p: x.roll(1, 1), "roll.*not understood"),
    "last token": (lambda n, x, p: x + x[:, -1][:, None], "picks one of the step's tokens"),
    "own positions": (lambda n, x, p: x + torch.arange(x.shape[1])[None, :, None], "counts the tokens"),
    "flip": (lambda n, x, p: x.flip(1), "flip.*not understood"),
    "sort": (lambda n, x, p: x.sort(1)[0], "sort.*not understood"),
    "contraction": (lambda n, x, p: x @ (x.transpose(1, 2) @ x), "contracts over the tokens"),
    "token by token": (lambda n, x, p: (x @ x.transpose(1, 2)).sum(-1, keepdim=True), "tokens"),
    "token features": (
        lambda n, x, p: x.transpose(1, 2).reshape(1, x.shape[1], 8),
        "cannot be traced|from one token to another",
    ),
    "split tokens": (
        lambda n, x, p: torch.cat(x.tensor_split(1, 1), 1) + x.split([x.shape[1]], 1)[0],
        "token|understood",
    ),
    "double": (lambda n, x, p: x.double().float(), "float64"),
    "half": (lambda n, x, p: x.half().float(), "float16"),
    "random": (lambda n, x, p: x + torch.rand_like(x), "random"),
    "active dropout": (lambda n, x, p: F.dropout(x, 0.5, training=True), "dropout is active"),
    "in place": (lambda n, x, p: (x + 1).mul_(2), "in place"),
    "twice the tokens": (lambda n, x, p: torch.cat([x, x], 1), "axis 1 of .* is the symbolic dim T"),
    "floor division": (lambda n, x, p: torch.div(x, 0.3, rounding_mode="floor"), "rounding_mode floor"),
    "no positions": (lambda n, x, p: n.c.expand(1, x.shape[1], 8).contiguous() * 1.5, "cannot be traced|depend on"),
    "bits": (lambda n, x, p: x + torch.bitwise_not(p)[..., None], "bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_is_not_row_local_or_not_understood_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        imported(function)


def test_a_refusal_names_op_module_shapes_and_remedy() -> None:
    with pytest.raises(UnsupportedModelError) as info:
        imported(lambda n, x, p: x.cumsum(1))
    assert str(info.value).startswith("test: cumsum(float32[1,T,8]): this op is not understood")
    assert "builder/import_aten.py" in str(info.value)


def test_neutral_operations_leave_no_node() -> None:
    graph, _, _ = imported(lambda n, x, p: (x.contiguous().to(torch.float32) * 1.0 + 0.0) / 1.0)
    kinds = [type(node.op) for node in graph.nodes]
    assert kinds.count(Binary) == 2  # the net's own position * 0.01 and sum
    assert Cast in kinds
    assert Unary not in kinds
    assert Expand not in kinds


def test_a_transposed_weight_is_an_expression_and_equal_ones_are_shared() -> None:
    graph, _, _ = imported(lambda n, x, p: x @ n.wt + x @ n.wt)
    assert sorted(value.name for value in graph.weights) == ["embed.weight", "wt", "wt.t10"]
    assert sum(isinstance(node.op, Linear) for node in graph.nodes) == 2
    assert all(
        isinstance(node.op, Reshape | Linear | Binary | Cast) or node.op.name == "embedding" for node in graph.nodes
    )


def test_equal_constants_are_shared() -> None:
    graph, _, _ = imported(lambda n, x, p: (x + 0.5) * (x * 0.5) + 0.5)
    assert len(graph.constants) == 2  # 0.01 and 0.5


def test_every_handler_is_reached_by_some_function_or_family() -> None:
    """No handler without a test: the functions above, or the llama kind (attention), use each one."""
    seen: set[str] = {"attention"}
    original = dict(HANDLERS)

    def spy(name: str) -> Callable[..., Any]:
        def handle(*args: Any, **kwargs: Any) -> Any:
            seen.add(name)
            return original[name](*args, **kwargs)

        return handle

    HANDLERS.update({name: spy(name) for name in original})
    try:
        for function in FUNCTIONS.values():
            imported(function)
        for function, _ in REFUSED.values():
            with pytest.raises(UnsupportedModelError):
                imported(function)
    finally:
        HANDLERS.update(original)
    synonyms = {
        "_to_copy",
        "_softmax",
        "_unsafe_view",
        "__and__",
        "__or__",
        "alias",
        "lift_fresh_copy",
        "split_with_sizes",
    }
    assert sorted(set(HANDLERS) - seen - synonyms) == []
