"""In-flight batching: requests in, tokens out, over any driver."""

from __future__ import annotations

from .batch import Batch
from .block_pool import BlockPool
from .chunking import ChunkPolicy
from .llm import LLM
from .loading import EngineParts
from .output import CompletionOutput, Logprob, RequestOutput, TokenEvent
from .request import ContextLengthError, Request
from .sampling_params import SamplingParams
from .scheduler import CapacityPolicy, Scheduler, SchedulerConfig
from .sequence import Sequence
from .step_loop import StepLoop

__all__ = [
    "LLM",
    "Batch",
    "BlockPool",
    "CapacityPolicy",
    "ChunkPolicy",
    "CompletionOutput",
    "ContextLengthError",
    "EngineParts",
    "Logprob",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepLoop",
    "TokenEvent",
]
