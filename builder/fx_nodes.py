"""Facts about nodes of an exported graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def recorded_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's recorded value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, list | tuple) else []


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the output depends on."""
    live: set[fx.Node] = set()
    stack = [node for node in graph.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def module_path(node: fx.Node) -> str | None:
    """The innermost module path that a node was traced in ("" is the model itself), None if it is not recorded."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return str(list(stack.values())[-1][0]).removeprefix("net").removeprefix(".")


def op_name(node: fx.Node) -> str:
    """The op's name without overload: "add", "attention", "getitem", ..."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).split("::")[1]
    return str(getattr(target, "__name__", None) or target)
