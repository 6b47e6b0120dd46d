"""The traced model's attention: one custom op, and the functions the model library calls in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ..runtime.errors import UnsupportedModelError
from .trace_masks import MaskDescriptor, MaskFunction, classify_mask

#: Arguments that models pass along and that do not change what attention computes here.
_HARMLESS = {
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}


@torch.library.custom_op("pelton::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """q [1,Hq,T,D], k and v [1,Hkv,T,D] -> [1,T,Hq,D]; window -1 and softcap 0 mean none. For tracing only."""
    raise UnsupportedModelError(
        "the model computes attention while it is traced, of values that are known then; the family needs an adapter"
    )


@_attention.register_fake
def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))


ATTENTION_OP = torch.ops.pelton.attention.default


class AttentionTracer:
    """Stands in for the library's attention and mask functions during one trace."""

    def __init__(self, max_seq_len: int) -> None:
        self.calls = 0
        self._max_seq_len = max_seq_len
        self._names: dict[int, str] = {}

    def name_modules(self, model: nn.Module) -> None:
        """Remember module paths, for error messages."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def mask(self, *, mask_function: MaskFunction, attention_mask: Any = None, **_: Any) -> MaskDescriptor:
        """The library's mask interface: index function -> descriptor."""
        if attention_mask is not None:
            return MaskDescriptor("unknown", detail="the model makes a padding mask of its own")
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return classify_mask(mask_function, self._max_seq_len)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The library's attention interface: one ``pelton::attention`` per call, or a refusal."""
        where = self._names.get(id(module), type(module).__name__)
        if extra := sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS):
            raise UnsupportedModelError(f"{where}: attention takes {', '.join(extra)}, which is not understood")
        window = self._window(where, attention_mask, kwargs.get("sliding_window"))
        scale = _number(where, "scaling", kwargs.get("scaling"))
        softcap = _number(where, "softcap", kwargs.get("softcap"))
        _check_shapes(where, query, key, value)
        self.calls += 1
        default = float(query.shape[-1]) ** -0.5
        result = ATTENTION_OP(
            query, key, value, default if scale is None else scale, window or -1, 0.0 if softcap is None else softcap
        )
        return result, None

    def _window(self, where: str, mask: Any, told: int | None) -> int | None:
        """The window of a causal mask; the mask is what counts, an argument that contradicts it is refused."""
        if not isinstance(mask, MaskDescriptor):
            what = "no mask" if mask is None else f"a mask of its own ({type(mask).__name__})"
            raise UnsupportedModelError(f"{where}: attention is called with {what}, so its kind is not understood")
        if mask.kind != "causal":
            raise UnsupportedModelError(f"{where}: attention mask is {mask.kind}, not causal: {mask.detail}")
        effective = None if told is None or told >= self._max_seq_len else told
        if told is not None and effective != mask.window:
            raise UnsupportedModelError(
                f"{where}: the mask has window {mask.window}, but attention is told sliding_window {told}; "
                "one of them must be wrong"
            )
        return mask.window


def _number(where: str, what: str, value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise UnsupportedModelError(f"{where}: attention's {what} is a {type(value).__name__}, not a plain number")


def _check_shapes(where: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """q [1,Hq,T,D], k and v [1,Hkv,T,D] with Hq a multiple of Hkv."""
    shapes = f"q {list(query.shape)}, k {list(key.shape)}, v {list(value.shape)}"
    if query.ndim != 4 or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(f"{where}: attention shapes are not understood: {shapes}; one head size is needed")
    if query.shape[2] is not key.shape[2] and query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(f"{where}: attention over other tokens than its own: {shapes}")
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModelError(f"{where}: {query.shape[1]} heads do not divide by {key.shape[1]} key/value heads")
