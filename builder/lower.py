"""Graph -> launch plan: choose a kernel for each node, share kernels between equal layers, place buffers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..runtime.errors import BuildError, NoKernelError
from ..runtime.format.dtypes import DType
from ..runtime.format.plan import Buffer, KernelSpec, Launch, Operand, Plan, Ranges, StateSpec, WeightRef
from ..runtime.format.tensor_spec import TensorSpec
from ..runtime.format.tensor_type import TOKEN_TYPE, TensorType
from ..runtime.format.weight_expr import WeightExpr
from .graph import Graph, Node, Value
from .kernels import Kernel, KernelCall, KernelRegistry
from .memory_checker import require_sound_memory
from .memory_planner import Lifetime, plan_memory
from .ops.base import Op
from .ops.fused import KVWrite, PagedAttention, QKVRopeWrite, Sample
from .ops.generic import Reshape
from .target import Target
from .verifier import state_of, where

NONE = Operand("none", 0)


@dataclass(frozen=True)
class Lowered:
    """A plan for one target, the kernels to compile for it, and where each stored tensor comes from."""

    plan: Plan
    emitted: tuple[tuple[str, Kernel, KernelCall], ...]
    tensors: tuple[tuple[TensorSpec, WeightExpr | np.ndarray], ...]


def lower(graph: Graph, target: Target, registry: KernelRegistry, ranges: Ranges) -> Lowered:
    """Lower an optimised graph. Raises NoKernelError naming the node, the shapes and why each kernel refused."""
    return _Lowering(graph, target, registry, ranges).run()


def without_state(op: Op) -> Op:
    """The op with its state's name blanked: layers that differ in nothing else share a kernel."""
    if isinstance(op, KVWrite | PagedAttention | QKVRopeWrite):
        return dataclasses.replace(op, state="")
    return op


@dataclass
class _Lowering:
    graph: Graph
    target: Target
    registry: KernelRegistry
    ranges: Ranges
    states: list[StateSpec] = field(default_factory=list)
    kernels: dict[KernelCall, int] = field(default_factory=dict)
    specs: list[KernelSpec] = field(default_factory=list)
    emitted: list[tuple[str, Kernel, KernelCall]] = field(default_factory=list)

    def run(self) -> Lowered:
        graph = self.graph
        self.states = [_with_layout(spec, self.target) for spec in graph.states]
        nodes = [node for node in graph.nodes if not isinstance(node.op, Reshape)]
        tail_start = next((i for i, node in enumerate(nodes) if node.op.name == "gather_rows"), len(nodes))
        calls = [self._kernel(node) for node in nodes]
        phases = _phases(nodes, tail_start)
        weights = self._weights(nodes)
        operands, buffers, scratch, arena_bytes = self._buffers(nodes, calls, phases, tail_start)
        operands |= {value: Operand("weight", index) for index, value in enumerate(weights)}
        operands |= {value: Operand("input", index) for index, value in enumerate(graph.inputs)}
        state_index = {spec.name: index for index, spec in enumerate(self.states)}
        launches = []
        for index, node in enumerate(nodes):
            state = state_of(node)
            launches.append(
                Launch(
                    kernel=calls[index],
                    inputs=tuple(_operand(operands, v) for v in node.inputs),
                    outputs=tuple(_operand(operands, v) for v in node.outputs),
                    states=() if state is None else (Operand("state", state_index[state]),),
                    scratch=scratch.get(index, -1),
                    barrier=index + 1 == len(nodes) or phases[index + 1] != phases[index],
                    origin=node.origin,
                )
            )
        plan = Plan(
            ranges=self.ranges,
            kv_groups=tuple(graph.kv_groups),
            states=tuple(self.states),
            weights=tuple(WeightRef(name=n, dtype=v.type.dtype, shape=_constant_shape(v), layout=v.type.layout)
                          for v, n in weights.items()),
            buffers=tuple(buffers),
            arena_bytes=arena_bytes,
            kernels=tuple(self.specs),
            launches=tuple(launches),
            tail_start=tail_start,
            vocab_size=next((n.op.vocab_size for n in nodes if isinstance(n.op, Sample)), 0),
        )  # fmt: skip
        require_sound_memory(plan)
        return Lowered(plan, tuple(self.emitted), self._tensors(weights))

    # kernels

    def _kernel(self, node: Node) -> int:
        """Index of the kernel for a node: one that an equal node has already, or a newly selected one."""
        state = state_of(node)
        spec = next((s for s in self.states if s.name == state), None)
        call = KernelCall(
            op=without_state(node.op),
            inputs=tuple(v.type for v in node.inputs),
            outputs=tuple(v.type for v in node.outputs),
            states=() if spec is None else ("kv" if spec.kind == "paged_kv" else spec.name,),
            ranges=self.ranges,
            kv_group=spec.group if spec is not None else 0,
        )
        if call in self.kernels:
            return self.kernels[call]
        try:
            kernel = self.registry.select(call, self.target)
        except NoKernelError as error:
            raise NoKernelError(f"{where(node)}: {error}") from None
        index = self.kernels[call] = len(self.specs)
        symbol = _symbol(call, kernel)
        self.specs.append(
            KernelSpec(
                symbol=symbol,
                kernel=kernel.name,
                op=call.op.name,
                attributes=call.op.attributes(),
                input_types=tuple(map(str, call.inputs)),
                output_types=tuple(map(str, call.outputs)),
            )
        )
        self.emitted.append((symbol, kernel, call))
        return index

    # memory

    def _buffers(
        self, nodes: list[Node], calls: list[int], phases: list[int], tail_start: int
    ) -> tuple[dict[Value, Operand], list[Buffer], dict[int, int], int]:
        """Operands of the values that nodes make, all buffers, launch -> its scratch buffer, the arena's size."""
        last = _last_phases(self.graph, nodes, phases, tail_start)
        symbols = self.ranges.symbols()
        kept: list[tuple[Lifetime, TensorType]] = []
        operands: dict[Value, Operand] = {}
        scratch: dict[int, int] = {}
        for index, node in enumerate(nodes):
            for value in node.outputs:
                if value.type != TOKEN_TYPE:
                    operands[value] = Operand("buffer", len(kept))
                    life = Lifetime(value.name, value.type.nbytes(symbols), phases[index], last[value])
                    kept.append((life, value.type))
            _, kernel, call = self.emitted[calls[index]]
            nbytes = kernel.scratch_bytes(call, self.target)
            if nbytes > 0:
                scratch[index] = len(kept)
                life = Lifetime(f"scratch{index}", nbytes, phases[index], phases[index])
                kept.append((life, TensorType(DType.U8, (nbytes,))))
        offsets, size = plan_memory([life for life, _ in kept])
        buffers = [
            Buffer(name=life.name, dtype=type_.dtype, shape=type_.shape, offset=offset, nbytes=life.nbytes)
            for (life, type_), offset in zip(kept, offsets, strict=True)
        ]
        return operands, buffers, scratch, size

    # weights

    def _weights(self, nodes: list[Node]) -> dict[Value, str]:
        """Stored tensors in order of first use, with their names."""
        names: dict[Value, str] = {}
        taken: set[str] = set()
        for node in nodes:
            for value in map(storage, node.inputs):
                if value.kind not in ("weight", "constant") or value in names:
                    continue
                name = value.name if value.kind == "weight" else f"constants.{value.name}"
                name = name.removesuffix(".weight")
                while name in taken:
                    name += "_"
                taken.add(name)
                names[value] = name
        return names

    def _tensors(self, weights: dict[Value, str]) -> tuple[tuple[TensorSpec, WeightExpr | np.ndarray], ...]:
        found: list[tuple[TensorSpec, WeightExpr | np.ndarray]] = []
        for value, name in weights.items():
            spec = TensorSpec(name, value.type.dtype, _constant_shape(value), value.type.layout)
            origin = self.graph.weights.get(value)
            found.append((spec, self.graph.constants[value] if origin is None else origin))
        return tuple(found)


def storage(value: Value) -> Value:
    """The value whose bytes ``value`` shows: reshapes are views and launch nothing."""
    while value.node is not None and isinstance(value.node.op, Reshape):
        value = value.node.inputs[0]
    return value


def _operand(operands: dict[Value, Operand], value: Value) -> Operand:
    return NONE if value.type == TOKEN_TYPE else operands[storage(value)]


def _phases(nodes: list[Node], tail_start: int) -> list[int]:
    """The phase of each launch: it shares the one before it if it depends on nothing in there."""
    phases: list[int] = []
    made: set[Value] = set()
    states: set[str | None] = set()
    for index, node in enumerate(nodes):
        state = state_of(node)
        depends = any(storage(v) in made for v in node.inputs) or (state is not None and state in states)
        if index in (0, tail_start) or depends:
            made, states = set(), set()
            phases.append(phases[-1] + 1 if phases else 0)
        else:
            phases.append(phases[-1])
        made.update(node.outputs)
        states.add(state)
    return phases


def _last_phases(graph: Graph, nodes: list[Node], phases: list[int], tail_start: int) -> dict[Value, int]:
    """The last phase that needs each value. What the tail reads from before it is needed until the tail's last turn."""
    end = phases[-1] if phases else 0
    made_at = {v: index for index, node in enumerate(nodes) for v in node.outputs}
    last = {value: phases[index] for value, index in made_at.items()}
    for index, node in enumerate(nodes):
        for value in map(storage, node.inputs):
            if value in made_at:
                crosses = index >= tail_start > made_at[value]
                last[value] = max(last[value], end if crosses else phases[index])
    for value in map(storage, graph.outputs):
        if value in last:
            last[value] = end
    return last


def _with_layout(spec: StateSpec, target: Target) -> StateSpec:
    """KV blocks lie as the target's kernels want them."""
    layout = "kv16" if spec.kind == "paged_kv" and target.kind == "cpu" else "rows"
    return msgspec.structs.replace(spec, layout=layout)


def _symbol(call: KernelCall, kernel: Kernel) -> str:
    """A C name that depends on what the kernel is, not on where the graph uses it: objects are cached by content."""
    described = [call.op.attributes(), list(map(str, (*call.inputs, *call.outputs))), call.kv_group, kernel.name]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]
    return f"pelton_{call.op.name}_{digest}"


def _constant_shape(value: Value) -> tuple[int, ...]:
    shape = tuple(d for d in value.type.shape if isinstance(d, int))
    if len(shape) != value.type.rank:
        raise BuildError(f"weight %{value.name}: {value.type} has a symbolic dim")
    return shape
