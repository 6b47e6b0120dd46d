"""The engine file: one safetensors file that holds all a server needs. See docs/engine_format.md.

This module is the public face; reading, writing, the header and the hash tree have files of their own.
"""

from .engine_reader import EngineFile, Trust, VerifyWeights
from .engine_writer import EngineWriter
from .tensor_spec import TensorSpec

__all__ = ["EngineFile", "EngineWriter", "TensorSpec", "Trust", "VerifyWeights"]
