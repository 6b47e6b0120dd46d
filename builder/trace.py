"""trace: a transformers model without weights -> one exported graph of aten ops and pelton's own.

Parameters take no memory (one element, broadcast), non-persistent buffers are real, all is fp32. The library's
extension points for attention and masks lead to ``pelton::attention`` with a mask descriptor; everything that is
patched for the duration of a trace is put back afterwards.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..runtime.errors import CheckpointError, UnsupportedModelError
from .checkpoint import Checkpoint, offline
from .trace_attention import AttentionTracer
from .trace_names import stored_names
from .trace_rope import fix_rope

_EXAMPLE_TOKENS = 13  # any count works; a prime unlikely to equal a model dimension reads best in dumps
_IMPLEMENTATION = "pelton"
_NO_ATTENTION = (
    "the model never calls the library's attention interface, so how its tokens see each other is not understood; "
    "the family needs an adapter"
)


@dataclass(frozen=True)
class TracedModel:
    """A model as one exported program over (input_ids [1,T], position_ids [1,T]) -> logits [1,T,V].

    ``parameters``: each parameter and persistent buffer -> the checkpoint tensor that holds it, None if it is missing.
    ``notes``: decisions the build report must show.
    """

    program: torch.export.ExportedProgram
    parameters: dict[str, str | None]
    notes: tuple[str, ...]
    model_type: str


class _Logits(nn.Module):
    """The model as a function of tensors only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


def trace(checkpoint: Checkpoint, *, max_seq_len: int) -> TracedModel:
    """Trace the checkpoint's model at full depth; reads no weights.

    ``max_seq_len`` fixes what depends on the longest sequence (dynamic rope factors, mask kinds).
    Raises UnsupportedModelError naming what was not understood.
    """
    config = copy.deepcopy(checkpoint.hf_config())
    _refuse_by_config(checkpoint, config)
    attention = AttentionTracer(max_seq_len)
    with ExitStack() as stack:
        stack.enter_context(offline())
        stack.enter_context(_library_hooks(attention))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model = _empty_model(checkpoint, config)
        names, notes = stored_names(model, checkpoint)
        _broadcast_parameters(model)
        notes += fix_rope(model, max_seq_len)
        attention.name_modules(model)
        program = export(checkpoint, model, attention)
    if attention.calls == 0:
        raise UnsupportedModelError(f"{config.model_type}: {_NO_ATTENTION}")
    return TracedModel(program, names, tuple(notes), str(config.model_type))


def _refuse_by_config(checkpoint: Checkpoint, config: Any) -> None:
    """Kinds of models that are known not to fit, named before any work is done."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{model_type}: encoder-decoder models are not supported; pelton builds decoders only"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not checkpoint.trust_remote_code:
        raise UnsupportedModelError(f"{model_type}: transformers has no causal language model of this type")


@contextmanager
def _experts_refused(model_type: str) -> Iterator[None]:
    """Refuse a mixture of experts when its first layer begins to be made, not after all of a huge model.

    Known by its class, as the library names them all alike: a config says it in too many ways, or not at all.
    """
    original = nn.Module.__init__

    def begin(module: nn.Module, *given: Any, **named: Any) -> None:
        kind = type(module).__name__
        if kind.lower().endswith(("experts", "moeblock", "moe")):
            raise UnsupportedModelError(
                f"{model_type}: it has layers of kind {kind}, and mixtures of experts are not supported yet"
            )
        original(module, *given, **named)

    with mock.patch.object(nn.Module, "__init__", begin):
        yield


def _empty_model(checkpoint: Checkpoint, config: Any) -> nn.Module:
    """The model with parameters on the meta device and real buffers, in fp32, ready for inference."""
    import transformers

    library: Any = transformers
    try:
        with _experts_refused(config.model_type), _parameters_on_meta(), torch.random.fork_rng():
            model: nn.Module = library.AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=_IMPLEMENTATION,
                trust_remote_code=checkpoint.trust_remote_code,
            )
    except KeyError as error:
        raise UnsupportedModelError(
            f"{config.model_type}: the config names {error}, which transformers has not"
        ) from error
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{config.model_type}: transformers cannot make this model with an attention of ours: {error}"
        ) from error
    except (TypeError, RuntimeError, AttributeError, ZeroDivisionError, AssertionError) as error:
        raise CheckpointError(f"{checkpoint.path}: no model can be made from the config: {error}") from error
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter is moved to the meta device as soon as a module registers it; buffers stay real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    with mock.patch.object(nn.Module, "register_parameter", register):
        yield


def _broadcast_parameters(model: nn.Module) -> None:
    """Replace meta parameters by CPU ones that are one element seen at every index; ties are undone."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise UnsupportedModelError(f"buffer {lost[0]} has no value without weights; the family needs an adapter")


@contextmanager
def _library_hooks(attention: AttentionTracer) -> Iterator[None]:
    """Point the library's attention and mask interfaces at ours; packed rows need no detection while tracing."""
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _IMPLEMENTATION
    with (
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {name: attention.attend}),
        mock.patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {name: attention.mask}),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        yield


def export(checkpoint: Checkpoint, model: nn.Module, attention: AttentionTracer) -> torch.export.ExportedProgram:
    """torch.export over a dynamic token count; every failure is a refusal that quotes the reason."""
    tokens = torch.export.Dim("T", min=1)
    ids = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.long)
    positions = torch.arange(_EXAMPLE_TOKENS)[None]
    try:
        return torch.export.export(
            _Logits(model),
            (ids, positions),
            dynamic_shapes={"input_ids": {1: tokens}, "position_ids": {1: tokens}},
            strict=False,
        )
    except UnsupportedModelError:
        raise
    except Exception as error:  # torch.export fails in many ways; all mean "not understood"
        model_type = checkpoint.config["model_type"]
        if attention.calls == 0:
            raise UnsupportedModelError(f"{model_type}: {_NO_ATTENTION}") from error
        raise UnsupportedModelError(
            f"{model_type}: the model cannot be traced over a free number of tokens: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The telling lines of an export failure: its first, and the first that lists a particular."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    details = [line for line in lines[1:] if line.startswith("- ")]
    return " ".join([lines[0], *details[:1]])
