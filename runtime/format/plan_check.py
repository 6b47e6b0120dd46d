"""What must hold of a launch plan before a driver follows its indices and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ..errors import EngineFormatError
from .plan import STEP_INPUTS, Launch, Operand, Plan
from .tensor_spec import TensorSpec
from .tensor_type import SYMBOLS, parse_type


def check_plan(plan: Plan, tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Problems of a plan read from a file with these tensors; empty when every reference is in bounds."""
    return [*_tables(plan), *_weights(plan, tensors), *_buffers(plan), *_kernels(plan), *_launches(plan)]


def _tables(plan: Plan) -> Iterator[str]:
    if not 0 <= plan.tail_start <= len(plan.launches):
        yield f"tail_start {plan.tail_start} is outside the {len(plan.launches)} launches"
    if plan.vocab_size < 1 or any(value < 1 for value in plan.ranges.symbols().values()):
        yield "vocab_size and ranges must be positive"
    for state in plan.states:
        if state.kind == "paged_kv" and not 0 <= state.group < len(plan.kv_groups):
            yield f"state {state.name!r} is of KV group {state.group}, and there are {len(plan.kv_groups)}"
        if any(dim < 0 for dim in state.shape):
            yield f"state {state.name!r} has a negative dim"


def _weights(plan: Plan, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    for ref in plan.weights:
        spec = tensors.get(ref.name)
        if spec is None:
            yield f"weight {ref.name!r} is not in the file"
        elif (ref.dtype, ref.shape, ref.layout) != (spec.dtype, spec.shape, spec.layout):
            wanted = f"{ref.dtype.value}{list(ref.shape)}@{ref.layout}"
            yield f"weight {ref.name!r} is {spec.type} in the file, and the plan wants {wanted}"


def _buffers(plan: Plan) -> Iterator[str]:
    symbols = plan.ranges.symbols()
    for buffer in plan.buffers:
        unknown = [d for d in buffer.shape if isinstance(d, str) and d not in SYMBOLS]
        if unknown:
            yield f"buffer {buffer.name!r} has unknown dims {unknown}"
            continue
        dims = [symbols[d] if isinstance(d, str) else d for d in buffer.shape]
        if any(d < 0 for d in dims) or buffer.nbytes < prod(dims) * buffer.dtype.itemsize:
            yield f"buffer {buffer.name!r} of {buffer.nbytes} bytes is too small for {buffer.dtype.value}{dims}"
        if buffer.offset < 0 or buffer.offset % 64 or buffer.offset + buffer.nbytes > plan.arena_bytes:
            end = buffer.offset + buffer.nbytes
            yield f"buffer {buffer.name!r} at {buffer.offset}:{end} does not fit the arena of {plan.arena_bytes} bytes"


def _kernels(plan: Plan) -> Iterator[str]:
    """Kernels' types are text in the file: whoever reads them later (the oracle, cost models) need not check them."""
    for spec in plan.kernels:
        for text in spec.input_types + spec.output_types:
            try:
                parse_type(text)
            except EngineFormatError as error:
                yield f"kernel {spec.symbol!r}: {error}"


def _launches(plan: Plan) -> Iterator[str]:
    sizes = {
        "buffer": len(plan.buffers),
        "weight": len(plan.weights),
        "state": len(plan.states),
        "input": len(STEP_INPUTS),
        "none": 1,
    }
    for index, launch in enumerate(plan.launches):
        if not 0 <= launch.kernel < len(plan.kernels):
            yield f"launch {index} names kernel {launch.kernel} of {len(plan.kernels)}"
        if not -1 <= launch.scratch < len(plan.buffers):
            yield f"launch {index} names scratch buffer {launch.scratch} of {len(plan.buffers)}"
        for operand in _operands(launch):
            if not 0 <= operand.index < sizes[operand.space]:
                yield f"launch {index} names {operand.space} {operand.index} of {sizes[operand.space]}"


def _operands(launch: Launch) -> tuple[Operand, ...]:
    return launch.inputs + launch.outputs + launch.states
