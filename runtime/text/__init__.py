"""Text in and out of an engine: tokenizer, incremental detokenizer, sandboxed chat template."""

from .chat_template import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .section import TokenizerSection, pack_tokenizer, unpack
from .tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "TokenizerSection", "pack_tokenizer", "unpack"]
