"""The engine file's ``tokenizer`` section: one tokenizer in one form, whatever the checkpoint had, with vectors.

The bytes are msgpack with sorted maps, hence deterministic; the container deflates them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import EngineFormatError

SECTION_SCHEMA = 1

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class TextVector(msgspec.Struct, frozen=True):
    """What the original tokenizer makes of one text."""

    text: str
    ids: tuple[TokenId, ...]  # with the special tokens that the post-processor adds
    bare: tuple[TokenId, ...]  # without them
    full: str  # decode(ids), special tokens shown
    plain: str  # decode(ids), special tokens skipped


class IdVector(msgspec.Struct, frozen=True):
    """What the original tokenizer decodes from ids that no text gives (cut UTF-8, byte tokens, specials in a run)."""

    ids: tuple[TokenId, ...]
    full: str
    plain: str


class ChatVector(msgspec.Struct, frozen=True):
    """One rendered conversation, under the fixed clock of :mod:`.vectors`."""

    conversation: str  # JSON: the keyword arguments of ChatTemplate.render
    rendered: str | None  # None: the template refuses this conversation
    ids: tuple[TokenId, ...] = ()  # of the rendered text, without added special tokens


class Vectors(msgspec.Struct, frozen=True):
    """All vectors of one tokenizer."""

    texts: tuple[TextVector, ...] = ()
    ids: tuple[IdVector, ...] = ()
    chats: tuple[ChatVector, ...] = ()


class TokenizerSection(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the serving side knows about text."""

    schema: int = SECTION_SCHEMA
    source: str  # what it was converted from, for people: "tokenizer.json", "tokenizer.model", "GGUF", ...
    tokenizer: str  # text of a tokenizer.json without truncation and padding
    vocab_size: int  # one past the highest token id
    special_tokens: dict[str, str] = {}  # role -> text: bos_token, eos_token, ...; variables of the chat template
    extra_special_tokens: tuple[str, ...] = ()
    bos_token_id: TokenId | None = None
    pad_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()  # any of them ends a sequence; ascending
    chat_templates: dict[str, str] = {}  # name -> Jinja source; "default", and "tool_use" where a model has both
    clean_up_spaces: bool = False  # decode() tidies " ." to "." (WordPiece kinds)
    split_special_tokens: bool = False  # special tokens inside a text are encoded as plain text
    vectors: Vectors = Vectors()


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_DECODER = msgspec.msgpack.Decoder(TokenizerSection)


def pack_tokenizer(section: TokenizerSection) -> bytes:
    """The section's bytes; equal sections give equal bytes."""
    return _ENCODER.encode(section)


def unpack(data: bytes | bytearray | memoryview) -> TokenizerSection:
    """The inverse of :func:`pack_tokenizer`.

    Raises:
        EngineFormatError: the bytes are damaged, or of a newer schema.
    """
    try:
        section = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(
            f"section 'tokenizer' cannot be read: {error}; the engine file is damaged, build it again"
        ) from error
    if section.schema != SECTION_SCHEMA:
        raise EngineFormatError(
            f"section 'tokenizer' has schema {section.schema}, this pelton reads schema {SECTION_SCHEMA}; "
            "use the pelton version that built the engine, or build it again"
        )
    return section
