"""A plan with one kernel in several variants, on operands of its own: what the tactic timer runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import BuildError
from ..runtime.format.dtypes import DType
from ..runtime.format.hash_tree import WeightsCheck
from ..runtime.format.panels import pack
from ..runtime.format.plan import Buffer, KernelSpec, KVGroup, Launch, Operand, Plan, Ranges, WeightRef
from ..runtime.format.tensor_type import TOKEN_TYPE, TensorType
from ..runtime.step import StepInputs, greedy_sampling
from .kernels import Kernel, KernelCall
from .ops.fused import PagedAttention
from .tactics import Workload
from .target import Target

_MOST_COPIES = 64
_SEED = 0
_PERIOD = 65521  # random values that are repeated, since drawing a whole head takes long; a prime, so no two rows agree
_PAGE = 4096


class Trial:
    """An engine (as the CPU driver reads one) whose step runs every variant ``rounds`` times, in turns.

    Operands are random. The one that a step reads from memory (the weight; attention's keys and values) exists so often
    that between two uses of a copy about ``cold_bytes`` of others pass by. Every variant has an output of its own.
    """

    def __init__(
        self,
        call: KernelCall,
        target: Target,
        variants: Sequence[Kernel],
        workloads: Sequence[Workload],
        cold_bytes: int,
    ) -> None:
        self.call = _on_tokens(call, workloads)
        self.blocks = max(self._blocks_of(w) for w in workloads)
        self.slots = max(len(w.lengths) for w in workloads)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._refs: list[WeightRef] = []
        self._rng = np.random.default_rng(_SEED)
        self._code = b""
        self._plan = self._make_plan(target, variants, cold_bytes)

    @property
    def symbols(self) -> list[str]:
        """Names of the variants' functions, in order."""
        return [spec.symbol for spec in self._plan.kernels]

    def link(self, code: bytes) -> None:
        """Give the object with these functions."""
        self._code = code

    def variant_of(self, launch: int) -> int:
        """Which variant a launch of the step runs."""
        return self._plan.launches[launch].kernel

    def step(self, workload: Workload) -> StepInputs:
        """The inputs of a step: token ids are zeros, blocks are taken in a random order."""
        lengths = np.asarray(workload.lengths, np.int32)
        table = np.full((len(lengths), self.call.ranges.max_blocks_per_seq), -1, np.int32)
        order = iter(np.random.default_rng(_SEED).permutation(self.blocks))
        for row, length in enumerate(lengths):
            for block in range(-(-(workload.context + int(length)) // self.call.ranges.tokens_per_block)):
                table[row, block] = next(order)
        none = np.zeros(0, np.int32)
        return StepInputs(
            token_ids=np.zeros(workload.tokens, np.int32),
            positions=np.concatenate([np.arange(n, dtype=np.int32) + workload.context for n in lengths]),
            query_start=np.cumsum([0, *lengths], dtype=np.int32),
            seq_slots=np.arange(len(lengths), dtype=np.int32),
            block_tables=(table,),
            logits_rows=none,
            row_seq=none,
            sampling=greedy_sampling(0),
        )

    def output_bytes(self, workload: Workload) -> int:
        """How many bytes of an output buffer a step writes."""
        return self.call.outputs[0].nbytes({"T": workload.tokens})

    # What the driver reads of an engine.

    def plan(self, key: str) -> Plan:
        return self._plan

    def code(self, key: str) -> memoryview:
        return memoryview(self._code)

    def tensor(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def tensor_location(self, name: str) -> tuple[int, int]:
        return 0, self._arrays[name].nbytes

    def weights_file(self) -> None:
        return None

    def delegate_check(self, check: WeightsCheck) -> None:
        raise BuildError("a trial has no weights in a file")

    def raise_problems(self) -> None:
        pass

    # How it is made.

    def _make_plan(self, target: Target, variants: Sequence[Kernel], cold_bytes: int) -> Plan:
        inputs = [type_.max_shape(self.call.ranges.symbols()) for type_ in self.call.inputs]
        types = [TensorType(t.dtype, s, t.layout) for t, s in zip(self.call.inputs, inputs, strict=True)]
        cold = self._state_type() or max(
            (t for t, own in zip(types, self.call.inputs, strict=True) if own.shape == t.shape and t != TOKEN_TYPE),
            key=TensorType.nbytes,
        )
        copies = max(1, min(_MOST_COPIES, cold_bytes // max(1, cold.nbytes())))
        at = [Operand("none", 0) if t == TOKEN_TYPE else self._operand(t) for t in types if t is not cold]
        several = self._operand(cold, copies)
        buffers, arena_bytes = self._buffers(target, variants)
        launches = []
        for index in range(-(-copies // len(variants)) * len(variants)):
            turn, place = divmod(index, len(variants))
            variant = (place + turn) % len(variants)
            copy = Operand("weight", several.index + index % copies)
            rest = iter(at)
            launches.append(
                Launch(
                    kernel=variant,
                    inputs=tuple(copy if t is cold else next(rest) for t in types),
                    outputs=(Operand("buffer", variant),),
                    states=(copy,) if self.call.states else (),
                    scratch=len(variants),
                )
            )
        return Plan(
            ranges=self.call.ranges,
            kv_groups=(KVGroup(name="kv", window=None),),
            states=(),
            weights=tuple(self._refs),
            buffers=buffers,
            arena_bytes=arena_bytes,
            kernels=tuple(self._spec(i, kernel) for i, kernel in enumerate(variants)),
            launches=tuple(launches),
            tail_start=len(launches),
            vocab_size=1,
        )

    def _state_type(self) -> TensorType | None:
        """Keys and values of all blocks, for an op that reads some."""
        op = self.call.op
        if not self.call.states:
            return None
        if not isinstance(op, PagedAttention):
            raise BuildError(f"{op.name} has a tactic and a state that the timer knows nothing about")
        tokens = self.call.ranges.tokens_per_block
        return TensorType(op.kv_dtype, (self.blocks, 2 * op.kv_heads * tokens * op.head_dim))

    def _operand(self, type_: TensorType, copies: int = 1) -> Operand:
        """Random values of this type, so many times (the driver copies each to a place of its own)."""
        array = self._values(type_)
        first = len(self._refs)
        for copy in range(copies):
            name = f"{first}.{copy}"
            self._arrays[name] = array
            shape_of = tuple(d for d in type_.shape if isinstance(d, int))
            self._refs.append(WeightRef(name=name, dtype=type_.dtype, shape=shape_of, layout=type_.layout))
        return Operand("weight", first)

    def _values(self, type_: TensorType) -> np.ndarray:
        """The storage of random values, which repeat: weights of a size that keeps sums near one."""
        shape = type_.max_shape({})
        k = 1 if type_.layout == "rows" else shape[1]
        values = self._rng.standard_normal(min(math.prod(shape), _PERIOD), np.float32) * np.float32(k**-0.5)
        return pack(np.resize(values.astype(type_.dtype.numpy), shape), type_.layout)

    def _buffers(self, target: Target, variants: Sequence[Kernel]) -> tuple[tuple[Buffer, ...], int]:
        """An output for each variant, and scratch for the one that is running."""
        (type_,) = self.call.outputs
        sizes = [type_.nbytes(self.call.ranges.symbols())] * len(variants)
        sizes.append(max(64, *(kernel.scratch_bytes(self.call, target) for kernel in variants)))
        buffers, offset = [], 0
        for index, size in enumerate(sizes):
            last = index == len(variants)
            shape = (size,) if last else type_.shape
            dtype = DType.U8 if last else type_.dtype
            buffers.append(Buffer(name=f"{index}", dtype=dtype, shape=shape, offset=offset, nbytes=size))
            offset += -(-size // _PAGE) * _PAGE
        return tuple(buffers), offset

    def _spec(self, index: int, kernel: Kernel) -> KernelSpec:
        call = self.call
        return KernelSpec(
            symbol=f"variant{index}",
            kernel=kernel.name,
            op=call.op.name,
            attributes=call.op.attributes(),
            input_types=tuple(map(str, call.inputs)),
            output_types=tuple(map(str, call.outputs)),
        )

    def _blocks_of(self, workload: Workload) -> int:
        size = self.call.ranges.tokens_per_block
        return sum(-(-(workload.context + length) // size) for length in workload.lengths)


def _on_tokens(call: KernelCall, workloads: Sequence[Workload]) -> KernelCall:
    """The call with every row a token of the step, in ranges that the workloads just fit."""

    def of_tokens(type_: TensorType) -> TensorType:
        shape = tuple("T" if isinstance(d, str) else d for d in type_.shape)
        return TensorType(type_.dtype, shape, type_.layout)

    tokens = max(w.tokens for w in workloads)
    ranges = Ranges(
        max_batch_size=max(len(w.lengths) for w in workloads),
        max_num_tokens=tokens,
        max_seq_len=call.ranges.max_seq_len,
        opt_num_tokens=tokens,
        max_logits_rows=1,
        logits_chunk=1,
        tokens_per_block=call.ranges.tokens_per_block,
        max_logprobs=0,
    )
    inputs, outputs = tuple(map(of_tokens, call.inputs)), tuple(map(of_tokens, call.outputs))
    return dataclasses.replace(call, inputs=inputs, outputs=outputs, ranges=ranges, kv_group=0)
