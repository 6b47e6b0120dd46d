"""pelton: ahead-of-time compiler, engine builder and runtime for language models.

The public names are imported when first used, so that a server never loads the building side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import LLM as LLM
    from .api import build as build
    from .inflight_batcher import CompletionOutput as CompletionOutput
    from .inflight_batcher import RequestOutput as RequestOutput
    from .inflight_batcher import SamplingParams as SamplingParams

_WHERE = {
    "LLM": "pelton.api",
    "build": "pelton.api",
    "SamplingParams": "pelton.inflight_batcher",
    "RequestOutput": "pelton.inflight_batcher",
    "CompletionOutput": "pelton.inflight_batcher",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "build"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .runtime.version import VERSION

        return VERSION
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
