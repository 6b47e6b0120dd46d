"""The tokenizer of an engine: text to ids and back, exactly as the checkpoint's own tokenizer does it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from ..errors import RequestError, TokenizerError
from .chat_template import ChatTemplate
from .decode_stages import CLEAN_UP
from .decoders import StreamPlan
from .section import TokenizerSection, unpack

_MAX_ID = (1 << 32) - 1


class Tokenizer:
    """Built from the engine's ``tokenizer`` section; safe to share between threads."""

    def __init__(self, section: TokenizerSection) -> None:
        """Raises TokenizerError where the tokenizers library cannot read the section's tokenizer."""
        self.section = section
        try:
            self._backend = Backend.from_str(section.tokenizer)
            decoder = self._backend.decoder and json.loads(self._backend.decoder.__getstate__())
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the tokenizers library cannot read the engine's tokenizer (from {section.source}): {error}; "
                "install the tokenizers version that pelton was released with, or build the engine again"
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = section.split_special_tokens
        added = self._backend.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        self._special = {index: str(token.content) for index, token in added.items() if token.special}
        self._special_ids = frozenset(self._special)
        self.stream_plan = StreamPlan(decoder, clean_up_spaces=section.clean_up_spaces)

    @classmethod
    def from_section(cls, data: bytes | bytearray | memoryview) -> Tokenizer:
        """From the bytes of the engine's ``tokenizer`` section (see :func:`.section.unpack` for errors)."""
        return cls(unpack(data))

    @property
    def vocab_size(self) -> int:
        """One past the highest token id."""
        return self.section.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""
        return self.section.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, ascending."""
        return self.section.eos_token_ids

    @property
    def pad_token_id(self) -> int | None:
        """The padding id, if the model has one."""
        return self.section.pad_token_id

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None for a model without one. Raises TokenizerError if it does not compile."""
        if not self.section.chat_templates:
            return None
        return ChatTemplate(self.section.chat_templates, self.section.special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the model's post-processor adds (BOS and the like).

        Raises:
            RequestError: ``text`` is not a string, or holds half a surrogate pair.
        """
        try:
            with _no_panic(f"encode {_shown(text)}"):
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise RequestError(
                f"cannot encode {_shown(text)}: the text must be a string of whole characters"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. The template writes its own special tokens, so that none is added twice.

        Raises:
            RequestError: the model has no chat template, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; send a plain prompt instead of messages")
        text = self.chat_template.render(messages, tools, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids that the tokenizer does not know give nothing (a padded vocabulary has some).

        Raises:
            RequestError: an id is negative or not an integer.
        """
        wanted = list(ids)
        try:
            with _no_panic(f"decode {_shown(wanted)}"):
                text = str(self._backend.decode(wanted, skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            culprit = next((i for i in wanted if not _is_id(i)), wanted)
            raise RequestError(f"cannot decode token id {culprit!r}: ids are integers from 0 to {_MAX_ID}") from error
        if self.section.clean_up_spaces:
            for old, new in CLEAN_UP:
                text = text.replace(old, new)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id without a token."""
        try:
            token = self._backend.id_to_token(token_id)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token id {token_id!r} is not an integer from 0 to {_MAX_ID}") from error
        return None if token is None else str(token)

    def token_to_id(self, token: str) -> int | None:
        """The inverse of :meth:`id_to_token`."""
        index = self._backend.token_to_id(token)
        return None if index is None else int(index)

    def is_special(self, token: str) -> bool:
        """Whether ``skip_special_tokens`` leaves this token out."""
        return token in self._special_texts

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for in the middle of a text; may be a part of a character.

        Special tokens stand for their own text, an id without a token for nothing.
        """
        special = self._special.get(token_id)
        if special is not None:
            return special.encode("utf-8")
        token = self.id_to_token(token_id)
        return b"" if token is None else self.stream_plan.piece(token)


@contextmanager
def _no_panic(what: str) -> Iterator[None]:
    """A panic of the library's Rust code is no Exception in Python and would end a server."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"the tokenizers library panicked when it had to {what}: {error}") from error


def _is_id(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= _MAX_ID


def _shown(value: object) -> str:
    """A value for an error message, short and printable."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
