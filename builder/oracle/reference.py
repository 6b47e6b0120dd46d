"""The reference driver: runs a launch plan by op meanings, over a real arena. The oracle of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...runtime.drivers.base import check_allocation, empty_outputs
from ...runtime.errors import DriverError
from ...runtime.format.plan import KernelSpec, Launch, Operand, Plan, StateSpec
from ...runtime.format.tensor_type import TOKEN_TYPE, TensorType, parse_type
from ...runtime.format.weight_eval import unpack
from ...runtime.step import FinishedStep, StepInputs
from ..ops import Op, StepContext, op_from_attributes
from ..ops.arrays import TOKEN_ARRAY
from ..ops.fused import KVWrite, PagedAttention, QKVRopeWrite
from .step_check import check_blocks, check_step

DEAD = 0xFF  # every byte of dead memory: NaN in each float type, -1 in each integer type


class ReferenceDriver:
    """Implements ``runtime.drivers.base.Driver`` in numpy.

    ``weight(name)`` gives a stored tensor (storage layout). Values live at their planned offsets in one arena of
    bytes, and memory that no later launch may read is overwritten, so a wrong memory plan gives NaN, not luck.
    ``keep_weights`` False unpacks a weight anew at each use: slower, in the memory of one tensor.
    """

    def __init__(self, plan: Plan, weight: Callable[[str], np.ndarray], *, keep_weights: bool = True) -> None:
        self.plan = plan
        self._keep_weights = keep_weights
        self._load = weight
        self._weights: dict[int, np.ndarray] = {}
        self._kernels = [_Kernel(spec) for spec in plan.kernels]
        self._arena: NDArray[np.uint8] = np.empty(plan.arena_bytes, np.uint8)
        self._states: dict[str, np.ndarray] = {}
        self._num_blocks: tuple[int, ...] = ()
        self._num_slots = 0
        self._dying = _dying_buffers(plan)
        self._closed = False

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        """State storage, filled with NaN: nothing may be read that no step has written. Once only."""
        self._open()
        if self._states:
            raise DriverError("allocate was called twice; make a new driver instead")
        check_allocation(self.plan, num_blocks, num_slots)
        self._num_blocks, self._num_slots = tuple(num_blocks), num_slots
        for spec in self.plan.states:
            self._states[spec.name] = self._storage(spec)

    def _storage(self, spec: StateSpec) -> np.ndarray:
        shape: tuple[int, ...] = (self._num_slots, *spec.shape)
        if spec.kind == "paged_kv":
            shape = (self._num_blocks[spec.group], self.plan.ranges.tokens_per_block, 2, *spec.shape)
        storage = np.empty(shape, spec.dtype.numpy)
        storage.reshape(-1).view(np.uint8)[:] = DEAD
        return storage

    def block_bytes(self, group: int) -> int:
        """Bytes that one block of this KV group takes over all its layers."""
        if not 0 <= group < len(self.plan.kv_groups):
            raise DriverError(f"there is no KV group {group}; the engine has {len(self.plan.kv_groups)}")
        total = 0
        for spec in self.plan.states:
            if spec.kind == "paged_kv" and spec.group == group:
                total += TensorType(spec.dtype, (self.plan.ranges.tokens_per_block, 2, *spec.shape)).nbytes()
        return total

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        """Copy whole blocks in every layer of a group, in list order."""
        self._ready()
        check_blocks(self.plan, self._num_blocks, group, source, target)
        for spec in self.plan.states:
            if spec.kind == "paged_kv" and spec.group == group:
                storage = self._states[spec.name]
                for a, b in zip(source, target, strict=True):
                    storage[b] = storage[a]

    def hold_near(self, objects: Iterable[object]) -> None:
        """Nothing to do: numpy's steps are not worth it."""
        self._ready()

    def close(self) -> None:
        """Let go of all memory; a second close does nothing, any other call is an error."""
        self._closed = True
        self._weights, self._states = {}, {}
        self._arena = np.empty(0, np.uint8)

    def execute(self, inputs: StepInputs) -> FinishedStep:
        """Run a step. Raises DriverError, with nothing run, if the inputs do not fit the plan or the state."""
        self._ready()
        check_step(self.plan, inputs, self._num_blocks, self._num_slots)
        ranges = self.plan.ranges
        outputs = empty_outputs(self.plan, inputs.num_rows, inputs.want_logits)
        context = StepContext(
            step=inputs,
            states=self._states,
            state_groups={spec.name: spec.group for spec in self.plan.states},
            tokens_per_block=ranges.tokens_per_block,
            outputs=outputs,
        )
        self._arena[:] = DEAD
        head, tail = range(self.plan.tail_start), range(self.plan.tail_start, len(self.plan.launches))
        for index in head:
            self._launch(index, context)
        for start in range(0, inputs.num_rows, ranges.logits_chunk):
            context.row_start = start
            context.row_count = min(ranges.logits_chunk, inputs.num_rows - start)
            for index in tail:
                self._launch(index, context)
        return FinishedStep(outputs, outputs.tokens.tolist())

    def _launch(self, index: int, context: StepContext) -> None:
        """Read operands from the arena, compute, store results, and destroy what nobody reads any more."""
        launch = self.plan.launches[index]
        kernel = self._kernels[launch.kernel]
        op = self._named_state(kernel.op, launch)
        operands = [
            self._read(operand, type_, context) for operand, type_ in zip(launch.inputs, kernel.inputs, strict=True)
        ]
        results = op.reference(context, *operands)
        self._kill([launch.scratch] if launch.scratch >= 0 else [])
        for operand, type_, result in zip(launch.outputs, kernel.outputs, results, strict=True):
            if type_ != TOKEN_TYPE:
                place = self._view(operand, type_, context)
                if result.shape != place.shape or result.dtype != place.dtype:
                    raise DriverError(
                        f"launch {index} ({launch.origin}): {op.name} gave {result.dtype}{list(result.shape)}, the plan"
                        f" has {place.dtype}{list(place.shape)}"
                    )
                place[...] = result
        self._kill(self._dying[index])

    def _named_state(self, op: Op, launch: Launch) -> Op:
        """Kernels are shared by layers; the launch says which state this one uses."""
        if not isinstance(op, KVWrite | PagedAttention | QKVRopeWrite):
            return op
        return replace(op, state=self.plan.states[launch.states[0].index].name)

    def _read(self, operand: Operand, type_: TensorType, context: StepContext) -> np.ndarray:
        if operand.space == "none":
            return TOKEN_ARRAY
        if operand.space == "weight":
            return self._weight(operand.index, type_)
        if operand.space == "input":
            data = (context.step.token_ids, context.step.positions)[operand.index]
            return data.reshape(type_.max_shape(context.symbols))
        # a copy: a result may be planned over an operand only if the plan is wrong, and then it must not work by luck
        return self._view(operand, type_, context).copy()

    def _view(self, operand: Operand, type_: TensorType, context: StepContext) -> np.ndarray:
        """The operand's bytes in the arena, at this step's size."""
        buffer = self.plan.buffers[operand.index]
        nbytes = type_.nbytes(context.symbols)
        if operand.space != "buffer" or nbytes > buffer.nbytes:
            raise DriverError(f"{operand} does not hold {type_}")
        raw = self._arena[buffer.offset : buffer.offset + nbytes]
        return raw.view(type_.dtype.numpy).reshape(type_.max_shape(context.symbols))

    def _weight(self, index: int, type_: TensorType) -> np.ndarray:
        weight = self._weights.get(index)
        if weight is None:
            ref = self.plan.weights[index]
            stored = TensorType(ref.dtype, ref.shape, ref.layout)
            data = np.asarray(self._load(ref.name))
            if data.nbytes != stored.nbytes() or data.dtype != ref.dtype.numpy:
                raise DriverError(f"tensor {ref.name} is {data.dtype}{list(data.shape)}, the plan wants {stored}")
            weight = unpack(data.reshape(stored.storage_shape()), stored)
            if self._keep_weights:
                self._weights[index] = weight
        return weight.reshape(type_.max_shape({}))

    def _kill(self, buffers: list[int]) -> None:
        for index in buffers:
            buffer = self.plan.buffers[index]
            self._arena[buffer.offset : buffer.offset + buffer.nbytes] = DEAD

    def _open(self) -> None:
        if self._closed:
            raise DriverError("the driver is closed; make a new one")

    def _ready(self) -> None:
        self._open()
        if not self._states and self.plan.states:
            raise DriverError("the driver has no state yet; call allocate before the first step")


class _Kernel:
    """A kernel of the plan with its op rebuilt and its types parsed."""

    def __init__(self, spec: KernelSpec) -> None:
        self.op = op_from_attributes(spec.op, spec.attributes)
        self.inputs = [parse_type(t) for t in spec.input_types]
        self.outputs = [parse_type(t) for t in spec.output_types]


def _dying_buffers(plan: Plan) -> list[list[int]]:
    """For each launch the buffers that it is the last to touch (those from before the tail never die inside it)."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, launch in enumerate(plan.launches):
        for operand in (*launch.inputs, *launch.outputs):
            if operand.space == "buffer":
                first.setdefault(operand.index, index)
                last[operand.index] = index
    dying: list[list[int]] = [[] for _ in plan.launches]
    for buffer, index in last.items():
        if index < plan.tail_start or first[buffer] >= plan.tail_start:
            dying[index].append(buffer)
    return dying
