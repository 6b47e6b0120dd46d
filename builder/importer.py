"""import_graph: an exported aten graph -> Graph of pelton ops.

Only nodes that the logits depend on are imported. A node whose operands are all constants is
computed by torch here and now; every other one goes to its handler in ``import_aten``. The type that a handler makes
is compared with the type that torch recorded, so a wrong translation of a shape cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ..runtime.errors import GraphError, UnsupportedModelError
from ..runtime.format.dtypes import DType
from ..runtime.format.plan import KVGroup, StateSpec
from ..runtime.format.tensor_type import Dim, TensorType
from .checkpoint import Checkpoint
from .fx_nodes import live_nodes, module_path, op_name, recorded_tensors
from .graph import Graph, Value
from .import_weights import Weights
from .locality import verify_locality
from .ops.base import Op
from .ops.elementwise import Cast
from .ops.generic import Reshape
from .trace import TracedModel

#: Constants are folded up to this many elements; larger ones would bloat the engine.
_MAX_FOLDED = 1 << 24

#: Random or in-place by their schema, but not as traced: dropout in inference, detach_ of a fresh constant.
_HARMLESS = ("dropout", "detach_")

DTYPES = {torch.float32: DType.F32, torch.int64: DType.I32, torch.int32: DType.I32, torch.bool: DType.BOOL}

#: What a name in the exported graph stands for: a graph value, a constant, a number, a dim, a list of these, ...
Operand = Any


def import_graph(traced: TracedModel, checkpoint: Checkpoint) -> Graph:
    """The fp32 Graph of a traced model: token_ids i32[T], positions i32[T] -> logits f32[1,T,V].

    Weights are expressions over ``checkpoint.source`` (nothing is read). 64-bit integers of the model become
    32-bit: token ids and positions are below 2^31. Raises UnsupportedModelError naming op, module path and shapes, and
    CheckpointError for tensors that are missing or of another shape.
    """
    importer = Importer(traced, checkpoint)
    graph = importer.run()
    verify_locality(graph)
    return graph


class Importer:
    """State of one import; handlers use ``emit``, ``constant``, ``dims`` and ``refuse``."""

    def __init__(self, traced: TracedModel, checkpoint: Checkpoint) -> None:
        self.graph = Graph()
        self._traced = traced
        self.weights = Weights(self.graph, checkpoint, traced.parameters)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._tokens: Any = None  # the sympy symbol of T
        self.origin = ""

    # -- the walk ---------------------------------------------------------------------------------

    def run(self) -> Graph:
        program = self._traced.program
        inputs = self._inputs(program)
        (logits,) = self._walk(program.graph_module, inputs)
        if not isinstance(logits, Value):
            raise UnsupportedModelError(f"{self._traced.model_type}: the logits do not depend on the tokens")
        self.graph.outputs = [logits]
        self.weights.check()
        return self.graph

    def _inputs(self, program: torch.export.ExportedProgram) -> list[Callable[[], Operand]]:
        """One maker per placeholder, run only if the placeholder is used."""
        makers: list[Callable[[], Operand]] = []
        user: list[Value] = [
            self.graph.add_input("token_ids", TensorType(DType.I32, ("T",))),
            self.graph.add_input("positions", TensorType(DType.I32, ("T",))),
        ]
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
            target = str(spec.target)
            if spec.kind == InputKind.USER_INPUT:
                self._tokens = node.meta["val"].shape[1].node.expr
                makers.append(partial(self.emit, Reshape((1, "T")), user.pop(0)))
            elif spec.kind == InputKind.PARAMETER or (spec.kind == InputKind.BUFFER and spec.persistent):
                name, shape = target.removeprefix("net."), tuple(node.meta["val"].shape)
                makers.append(partial(self.weights.parameter, name, shape))
            else:
                makers.append(partial(program.constants.__getitem__, target))
        return makers

    def _walk(self, module: fx.GraphModule, inputs: Sequence[Callable[[], Operand]]) -> tuple[Operand, ...]:
        """Import a graph's live nodes in order; returns what its output node returns."""
        env: dict[fx.Node, Operand] = {}
        makers = iter(inputs)
        live = live_nodes(module.graph)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                maker = next(makers)
                if node in live:
                    env[node] = maker()
            elif node in live:
                path = module_path(node)
                self.origin = self.origin if path is None else path
                resolved = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
                if node.op == "output":
                    return tuple(resolved[0][0])
                env[node] = self._node(module, node, *resolved)
        raise UnsupportedModelError(f"{self._traced.model_type}: the exported graph returns nothing")

    def _node(
        self, module: fx.GraphModule, node: fx.Node, args: tuple[Operand, ...], kwargs: dict[str, Operand]
    ) -> Operand:
        from .import_aten import HANDLERS

        if node.op == "get_attr":
            found: Any = module
            for part in str(node.target).split("."):
                found = getattr(found, part)
            return found
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool):
            return self.dim(value)
        name = op_name(node)
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            return self._inline(node, args)
        if name == "getitem":
            return args[0][args[1]]
        self._refuse_unfit(node)
        if _all_constant((args, kwargs)):
            return self._fold(node, args, kwargs)
        handler = HANDLERS.get(name)
        if handler is None:
            raise self.refuse(node, "this op is not understood")
        try:
            result = handler(self, node, *args, **kwargs)
        except (GraphError, TypeError) as error:
            raise self.refuse(node, f"this use of the op is not understood ({error})") from error
        self._check_type(node, result)
        return result

    def _inline(self, node: fx.Node, args: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """A region under no_grad or autocast; autocast that is on would change types."""
        position = next(i for i, arg in enumerate(args) if isinstance(arg, fx.GraphModule))
        if "autocast" in op_name(node) and args[1]:
            raise self.refuse(node, "the model switches autocast on")
        return self._walk(args[position], [partial(_same, value) for value in args[position + 1 :]])

    def _fold(self, node: fx.Node, args: tuple[Operand, ...], kwargs: dict[str, Operand]) -> Operand:
        """Compute a node that has only constant operands."""
        value = node.meta.get("val")
        sizes = [math.prod(v.shape) for v in recorded_tensors(value)]
        if any(not isinstance(size, int) or size > _MAX_FOLDED for size in sizes):
            raise self.refuse(node, "a constant is too large to fold")
        target: Any = node.target
        return target(*args, **kwargs)

    def _refuse_unfit(self, node: fx.Node) -> None:
        """Ops that cannot have a meaning in a static graph, whatever their operands."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and op_name(node) not in _HARMLESS:
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise self.refuse(node, "the op is random")
            if target._schema.is_mutable:
                raise self.refuse(node, "the op changes its operand in place")

    # -- what handlers use ------------------------------------------------------------------------

    def emit(self, op: Op, *inputs: Operand) -> Value:
        """Add a node (one output); operands may be values, constant tensors or numbers."""
        return self.graph.append(op, [self.value(x) for x in inputs], self.origin)[0]

    def value(self, x: Operand, dtype: DType = DType.F32) -> Value:
        """A graph value for an operand; a plain number becomes a scalar constant of ``dtype``."""
        if isinstance(x, Value):
            return x
        if isinstance(x, torch.Tensor):
            return self._constant(x)
        if isinstance(x, bool | int | float):
            return self._constant(torch.tensor(x, dtype=_TORCH[dtype]))
        raise GraphError(f"operand {x!r} is no tensor")

    def _constant(self, tensor: torch.Tensor) -> Value:
        dtype = self.dtype(tensor.dtype)
        wide = tensor.detach().contiguous().numpy()
        data = wide.astype(dtype.numpy)
        if not np.array_equal(wide, data, equal_nan=wide.dtype.kind == "f"):
            raise GraphError("a constant integer does not fit 32 bits")
        key = (dtype.value, data.shape, data.tobytes())
        if key not in self._constants:
            self._constants[key] = self.graph.add_constant(data, TensorType(dtype, data.shape))
        return self._constants[key]

    def cast(self, x: Operand, dtype: DType) -> Value:
        """``x`` in another dtype; no node if it has it already."""
        if isinstance(x, torch.Tensor):
            return self._constant(x.to(_TORCH[dtype]))
        value = self.value(x, dtype)
        return value if value.type.dtype == dtype else self.emit(Cast(dtype), value)

    def dim(self, size: Any) -> Dim:
        """A size that torch recorded -> a constant or "T"."""
        if isinstance(size, torch.SymInt):
            expr = size.node.expr
            if expr == self._tokens:
                return "T"
            if expr.is_number:
                return int(expr)
        elif isinstance(size, int):
            return int(size)
        raise UnsupportedModelError(
            f"{self.origin}: the size {size} depends on the number of tokens in a way that is not understood "
            f"(only T itself may be a size; here T is {self._tokens})"
        )

    def dims(self, node: fx.Node) -> tuple[Dim, ...]:
        """The shape that torch recorded for a node's result."""
        return tuple(self.dim(size) for size in node.meta["val"].shape)

    def dtype(self, dtype: torch.dtype) -> DType:
        if dtype not in DTYPES:
            raise GraphError(f"dtype {str(dtype).removeprefix('torch.')} has no place in an fp32 graph")
        return DTYPES[dtype]

    def refuse(self, node: fx.Node, reason: str) -> UnsupportedModelError:
        """The error for a node that cannot be imported: op, module path, shapes, what to do."""
        shapes = ", ".join(
            f"{str(v.dtype).removeprefix('torch.')}[{','.join(self._shape_text(v))}]"
            for arg in node.all_input_nodes
            for v in recorded_tensors(arg.meta.get("val"))
        )
        return UnsupportedModelError(
            f"{self.origin or self._traced.model_type}: {op_name(node)}({shapes}): {reason}; "
            f"the {self._traced.model_type} family needs a handler in builder/import_aten.py or an adapter"
        )

    def add_state(self, layer: int, kv_heads: int, head_dim: int, window: int | None) -> None:
        """Paged KV storage for one attention call, in the group of its window."""
        groups = self.graph.kv_groups
        if window not in [group.window for group in groups]:
            groups.append(KVGroup(name="full" if window is None else f"window{window}", window=window))
        group = [g.window for g in groups].index(window)
        shape = (kv_heads, head_dim)
        self.graph.states.append(
            StateSpec(name=f"kv.{layer}", kind="paged_kv", dtype=DType.F32, shape=shape, group=group)
        )

    # -- helpers ----------------------------------------------------------------------------------

    def _shape_text(self, value: torch.Tensor) -> list[str]:
        sizes: list[Any] = list(value.shape)
        return ["T" if isinstance(d, torch.SymInt) and d.node.expr == self._tokens else str(d) for d in sizes]

    def _check_type(self, node: fx.Node, result: Operand) -> None:
        """What the handler made must have the dtype and shape that torch says."""
        expected = node.meta["val"]
        results = result if isinstance(result, list | tuple) else [result]
        for made, val in zip(results, recorded_tensors(expected), strict=True):
            shape = tuple(self.dim(size) for size in val.shape)
            dtype = self.dtype(val.dtype)
            if not isinstance(made, Value):
                if tuple(made.shape) != shape:
                    raise self.refuse(node, f"imported as a constant of shape {tuple(made.shape)}")
            elif made.type.shape != shape or made.type.dtype != dtype:
                raise self.refuse(node, f"imported as {made.type}, but torch has {dtype.value}{list(shape)}")


_TORCH = {DType.F32: torch.float32, DType.I32: torch.int64, DType.BOOL: torch.bool}


def _same(value: Operand) -> Operand:
    return value


def _all_constant(operands: Operand) -> bool:
    """No graph value and no symbolic dim anywhere inside."""
    if isinstance(operands, list | tuple):
        return all(map(_all_constant, operands))
    if isinstance(operands, dict):
        return all(map(_all_constant, operands.values()))
    return not isinstance(operands, Value) and not (isinstance(operands, str) and operands == "T")
