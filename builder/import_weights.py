"""Weights of an imported graph: expressions over checkpoint tensors, checked against the model's shapes."""

from __future__ import annotations

from ..runtime.errors import CheckpointError
from ..runtime.format.dtypes import DType
from ..runtime.format.tensor_type import TensorType
from ..runtime.format.weight_expr import CastTo, Permute, Reshaped, Source, WeightExpr
from .checkpoint import Checkpoint
from .graph import Graph, Value


class Weights:
    """Makes one fp32 weight value per checkpoint tensor (tied parameters share it). Reads no data.

    What is missing or does not fit is remembered and raised by ``check``, so that a model that cannot be imported
    anyway is refused for that reason first.
    """

    def __init__(self, graph: Graph, checkpoint: Checkpoint, names: dict[str, str | None]) -> None:
        self._graph = graph
        self._checkpoint = checkpoint
        self._names = names
        self._made: dict[WeightExpr, Value] = {}
        self._problems: list[str] = []

    def parameter(self, parameter: str, shape: tuple[int, ...]) -> Value:
        """The value of a model parameter."""
        name = self._names[parameter]
        if name is None:
            self._problems.append(f"tensor {parameter!r} {list(shape)} is missing")
            return self._add(parameter, shape, Source(parameter, shape, DType.F32))
        info = self._checkpoint.source.info(name)
        if info.shape != shape:
            self._problems.append(f"tensor {name!r} has shape {list(info.shape)}, the config makes it {list(shape)}")
        elif not info.dtype.is_float:
            self._problems.append(f"tensor {name!r} is {info.dtype.value}, a float type is needed")
        source: WeightExpr = Source(name, shape, info.dtype)
        return self._add(name, shape, source if info.dtype == DType.F32 else CastTo(source, DType.F32))

    def permuted(self, x: Value, axes: tuple[int, ...]) -> Value:
        """A weight with its axes permuted, numpy order."""
        shape = tuple(int(x.type.shape[axis]) for axis in axes)
        return self._add(f"{x.name}.t{''.join(map(str, axes))}", shape, Permute(self._graph.weights[x], axes))

    def reshaped(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A weight under another shape."""
        return self._add(f"{x.name}.v{'x'.join(map(str, shape))}", shape, Reshaped(self._graph.weights[x], shape))

    def check(self) -> None:
        """Raise CheckpointError if weights are missing or do not fit the config."""
        if self._problems:
            more = f" (and {len(self._problems) - 3} more)" if len(self._problems) > 3 else ""
            raise CheckpointError(
                f"{self._checkpoint.path}: {'; '.join(self._problems[:3])}{more}: config and weights do not belong "
                "together or the download is incomplete; download it again"
            )

    def _add(self, name: str, shape: tuple[int, ...], expr: WeightExpr) -> Value:
        if expr not in self._made:
            self._made[expr] = self._graph.add_weight(name, TensorType(DType.F32, shape), expr)
        return self._made[expr]
