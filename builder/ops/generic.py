"""Shape, gather, reduction and product ops that a traced model may contain before (or without) fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...runtime.format.tensor_type import Dim
from .base import Op, register


@register
@dataclass(frozen=True)
class Reshape(Op):
    """Same elements in row-major order under another shape; at most one symbolic dim, the same before and after."""

    name: ClassVar[str] = "reshape"
    shape: tuple[Dim, ...]


@register
@dataclass(frozen=True)
class Transpose(Op):
    """Permute axes, numpy order."""

    name: ClassVar[str] = "transpose"
    axes: tuple[int, ...]


@register
@dataclass(frozen=True)
class Expand(Op):
    """Broadcast to ``shape`` (numpy broadcast_to)."""

    name: ClassVar[str] = "expand"
    shape: tuple[Dim, ...]


@register
@dataclass(frozen=True)
class Slice(Op):
    """x[..., start:stop:step, ...] on one constant axis (never a symbolic one)."""

    name: ClassVar[str] = "slice"
    axis: int
    start: int
    stop: int
    step: int = 1


@register
@dataclass(frozen=True)
class Concat(Op):
    """Concatenate along a constant axis."""

    name: ClassVar[str] = "concat"
    axis: int


@register
@dataclass(frozen=True)
class Gather(Op):
    """(data, index i32[...]) -> data indexed along ``axis`` (numpy take): shape data[:axis] + index + data[axis+1:]."""

    name: ClassVar[str] = "gather"
    axis: int


@register
@dataclass(frozen=True)
class Reduce(Op):
    """kind: sum | mean | max | min over constant axes; fp32 accumulation in index order."""

    name: ClassVar[str] = "reduce"
    kind: str
    axes: tuple[int, ...]
    keepdims: bool


@register
@dataclass(frozen=True)
class Softmax(Op):
    """Softmax over one constant axis, in fp32."""

    name: ClassVar[str] = "softmax"
    axis: int


@register
@dataclass(frozen=True)
class MatMul(Op):
    """numpy matmul of two activations with broadcasting batch dims (contracted dim constant)."""

    name: ClassVar[str] = "matmul"


@register
@dataclass(frozen=True)
class Linear(Op):
    """(x [...,K], w [N,K][, b [N]]) -> [...,N]: torch.nn.functional.linear."""

    name: ClassVar[str] = "linear"
    bias: bool = False


@register
@dataclass(frozen=True)
class Attention(Op):
    """(q f32[1,Hq,T,D], k f32[1,Hkv,T,D], v f32[1,Hkv,T,D]) -> f32[1,T,Hq,D]: as the model calls it, one whole layer.

    Stores k and v of the step's tokens in state ``state`` and attends to all stored ones of the same sequence; meaning as
    KVWrite followed by PagedAttention. ``mask``: "causal" (window None or a width). ``layer`` is the call's number in
    execution order; ``state`` is "kv.<layer>".
    """

    name: ClassVar[str] = "attention"
    is_sequence_op: ClassVar[bool] = True
    has_effect: ClassVar[bool] = True
    layer: int
    mask: str
    window: int | None
    scale: float
    softcap: float | None = None

    @property
    def state(self) -> str:
        return f"kv.{self.layer}"
