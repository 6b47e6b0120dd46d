"""What a launch must read, write and compute at least: bytes and operations from the plan and the step's shape.

A multiplication or an addition is one operation. Memory that outlives a step (weights, K/V) is counted apart from
activations, which stay in caches: the first is what streaming memory bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ...runtime.errors import EngineFormatError
from ...runtime.format.dtypes import DType
from ...runtime.format.plan import KernelSpec, Launch, Plan
from ...runtime.format.tensor_type import TensorType, parse_type


@dataclass(frozen=True)
class Cost:
    """Bytes and operations of a launch, or of many."""

    weight_bytes: int = 0  # as stored, padding of panels included
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0  # of buffers and step inputs, read and written
    flops: int = 0

    @property
    def read_bytes(self) -> int:
        """What must come from memory: weights and K/V."""
        return self.weight_bytes + self.kv_read_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def __mul__(self, count: int) -> Cost:
        return Cost(*(getattr(self, f.name) * count for f in fields(Cost)))


@dataclass(frozen=True)
class StepShape:
    """A step's sizes: sequence i has its tokens at positions ``starts[i] : starts[i] + counts[i]``; ``rows`` = R."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    rows: int

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def symbols(self, chunk_rows: int) -> dict[str, int]:
        """Values of the symbolic dims, in a turn of the tail over ``chunk_rows`` rows."""
        return {"T": self.tokens, "S": len(self.counts), "R": self.rows, "C": chunk_rows}

    def attended(self, window: int | None) -> int:
        """Pairs of a query and a key, summed over the step's tokens."""
        return sum(_pairs(s, n, window) for s, n in zip(self.starts, self.counts, strict=True))

    def keys(self, window: int | None) -> int:
        """Stored keys that the step's tokens look at, each sequence's once."""
        reach = math.inf if window is None else window
        return sum(int(min(s + n, n + reach - 1)) for s, n in zip(self.starts, self.counts, strict=True))


def _pairs(start: int, count: int, window: int | None) -> int:
    """Sum of min(p + 1, window) over positions p in start : start + count."""
    end = start + count
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    if start + 1 >= window:
        return count * window
    return _pairs(start, window - start, None) + (end - window) * window


@dataclass(frozen=True)
class _Call:
    """A kernel with its operand types, at a step's shape."""

    attributes: dict[str, Any]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    shape: StepShape
    symbols: dict[str, int]

    def size(self, of: TensorType) -> int:
        return math.prod(of.max_shape(self.symbols))


def _gemm(call: _Call) -> int:
    rows = call.size(call.inputs[0]) // int(call.inputs[0].shape[-1])
    n, k = call.inputs[1].max_shape(call.symbols)
    return 2 * rows * n * k


def _matmul(call: _Call) -> int:
    return 2 * call.size(call.outputs[0]) * int(call.inputs[0].max_shape(call.symbols)[-1])


def _attention(call: _Call) -> int:
    a = call.attributes
    return 4 * int(a["heads"]) * int(a["head_dim"]) * call.shape.attended(a["window"])


def _qkv_rope(call: _Call) -> int:
    a = call.attributes
    heads = (int(a["heads"]) + int(a["kv_heads"])) * call.shape.tokens
    return heads * (3 * int(a["rotary_dim"]) + (4 * int(a["head_dim"]) if a["qk_norm"] else 0))


def _each_output(count: int) -> Callable[[_Call], int]:
    return lambda call: count * sum(call.size(t) for t in call.outputs)


def _each_input(count: int) -> Callable[[_Call], int]:
    return lambda call: count * call.size(call.inputs[0])


def _nothing(call: _Call) -> int:
    return 0


#: Operations of each op. Products and attention are exact; the rest is what a plain loop would do.
FLOPS: dict[str, Callable[[_Call], int]] = {
    "gemm": _gemm,
    "linear": _matmul,
    "matmul": _matmul,
    "paged_attention": _attention,
    "qkv_rope_write": _qkv_rope,
    "rms_norm": _each_output(4),
    "rope": _each_output(3),
    "rope_table": _each_output(1),
    "softmax": _each_output(4),
    "sample": _each_input(3),
    "reduce": _each_input(1),
    "unary": _each_output(1),
    "binary": _each_output(1),
    "where": _each_output(1),
    "cast": _each_output(1),
} | dict.fromkeys(
    (
        "concat",
        "embedding",
        "expand",
        "gather",
        "gather_rows",
        "kv_write",
        "reshape",
        "resolve_tokens",
        "slice",
        "transpose",
    ),
    _nothing,
)  # fmt: skip

#: Ops that read only as much of their first buffer as they write.
_PICKERS = ("gather_rows", "gather", "slice")


class CostModel:
    """Costs of a plan's launches and of whole steps."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._inputs = [tuple(parse_type(t) for t in k.input_types) for k in plan.kernels]
        self._outputs = [tuple(parse_type(t) for t in k.output_types) for k in plan.kernels]
        self._cache: dict[tuple[int, StepShape, int], Cost] = {}

    def launch(self, index: int, shape: StepShape, row_start: int = 0) -> Cost:
        """Cost of one launch; in the tail, of the turn that begins at ``row_start``."""
        plan = self._plan
        chunk = min(plan.ranges.logits_chunk, shape.rows - row_start) if index >= plan.tail_start else 0
        # Launches of one kernel differ in where their operands are, not in how large they are.
        key = (plan.launches[index].kernel, shape, chunk)
        if key not in self._cache:
            if len(self._cache) > 4096:
                self._cache.clear()
            self._cache[key] = self._compute(plan.launches[index], shape, chunk)
        return self._cache[key]

    def step(self, shape: StepShape) -> Cost:
        """Cost of a step in which every weight is read once, however often the tail's turns come back to it."""
        plan, chunk = self._plan, self._plan.ranges.logits_chunk
        total = Cost()
        seen: set[int] = set()
        for index, launch in enumerate(plan.launches):
            turns = range(0, shape.rows, chunk) if index >= plan.tail_start else (0,)
            cost = sum((self.launch(index, shape, row) for row in turns), Cost())
            whole = tuple(o.index for o in launch.inputs if o.space == "weight" and not self._picks_rows(launch))
            if whole:
                fresh = sum(self._weight_bytes(i) for i in whole if i not in seen) if turns else 0
                seen.update(whole)
                cost = Cost(fresh, cost.kv_read_bytes, cost.kv_write_bytes, cost.activation_bytes, cost.flops)
            total += cost
        return total

    def _picks_rows(self, launch: Launch) -> bool:
        return self._plan.kernels[launch.kernel].op == "embedding"

    def _weight_bytes(self, index: int) -> int:
        ref = self._plan.weights[index]
        return TensorType(ref.dtype, ref.shape, ref.layout).nbytes()

    def _compute(self, launch: Launch, shape: StepShape, chunk: int) -> Cost:
        spec: KernelSpec = self._plan.kernels[launch.kernel]
        call = _Call(
            spec.attributes,
            self._inputs[launch.kernel],
            self._outputs[launch.kernel],
            shape,
            shape.symbols(chunk),
        )
        if spec.op not in FLOPS:
            raise EngineFormatError(f"plan: there is no cost of op {spec.op!r}; this pelton is older than the engine")
        weights, activations = self._operand_bytes(launch, spec.op, call)
        kv_read, kv_write = self._kv_bytes(spec, shape)
        return Cost(weights, kv_read, kv_write, activations, FLOPS[spec.op](call))

    def _operand_bytes(self, launch: Launch, op: str, call: _Call) -> tuple[int, int]:
        """Bytes of weights, and of buffers and step inputs."""
        written = sum(t.nbytes(call.symbols) for t in call.outputs if t.dtype is not DType.TOKEN)
        weights, activations = 0, written
        for operand, kind in zip(launch.inputs, call.inputs, strict=True):
            if operand.space == "weight" and op == "embedding":
                weights += min(call.size(call.inputs[0]), int(kind.shape[0])) * int(kind.shape[1]) * kind.dtype.itemsize
            elif operand.space == "weight":
                weights += kind.nbytes(call.symbols)
            elif operand.space in ("buffer", "input"):
                picked = op in _PICKERS and operand is launch.inputs[0]
                activations += written if picked else kind.nbytes(call.symbols)
        return weights, activations

    @staticmethod
    def _kv_bytes(spec: KernelSpec, shape: StepShape) -> tuple[int, int]:
        """K/V bytes read and written."""
        a = spec.attributes
        if spec.op not in ("paged_attention", "qkv_rope_write", "kv_write"):
            return 0, 0
        dtype = DType(a["dtype"] if spec.op == "kv_write" else a["kv_dtype"])
        token = 2 * int(a["kv_heads"]) * int(a["head_dim"]) * dtype.itemsize
        if spec.op == "paged_attention":
            return token * shape.keys(a["window"]), 0
        return 0, token * shape.tokens


def main_compute(plan: Plan) -> DType:
    """The type to which most products' operands are rounded; F32 where there are none."""
    sizes: dict[DType, int] = {DType.F32: 0}
    for launch in plan.launches:
        spec = plan.kernels[launch.kernel]
        if spec.op == "gemm":
            compute = DType(spec.attributes["compute"])
            sizes[compute] = sizes.get(compute, 0) + math.prod(
                d for d in parse_type(spec.input_types[1]).shape if isinstance(d, int)
            )
    return max(sizes, key=lambda dtype: sizes[dtype])
