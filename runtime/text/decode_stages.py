"""The stages of a streaming decoder, see :mod:`.decoders`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x(\+[0-9a-fA-F]|[0-9a-fA-F]{2})>")
_WORDPIECE_TIDY = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
# The clean-up of transformers is the same list without "do not".
CLEAN_UP = tuple(pair for pair in _WORDPIECE_TIDY if pair[0] != " do not")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token is written as plain text
        return token.encode("utf-8")


def _byte_of(token: str) -> int | None:
    """65 for ``<0x41>``, None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


class Stage(Protocol):
    """Turns tokens into tokens (or, behind a joining stage, fragments into fragments)."""

    def push(self, token: str) -> list[str]:
        """Takes the next token; gives out what is final."""

    def finish(self) -> list[str]:
        """Ends the stream; gives out what was kept."""

    def piece(self, token: str) -> str | bytes:
        """What one token stands for in the middle of a text."""


class Each:
    """A stage that looks at one token alone."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def push(self, token: str) -> list[str]:
        return [self._function(token)]

    def finish(self) -> list[str]:
        return []

    def piece(self, token: str) -> str | bytes:
        return self._function(token)


class FirstDiffers:
    """A stage that treats the first token in its own way."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._next, self._later = first, later

    def push(self, token: str) -> list[str]:
        function, self._next = self._next, self._later
        return [function(token)]

    def finish(self) -> list[str]:
        return []

    def piece(self, token: str) -> str | bytes:
        return self._later(token)


class BpeSuffix:
    """``</w>`` ends a word: a space, except in the last token, hence one token late."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, token: str) -> list[str]:
        last, self._last = self._last, token
        return [] if last is None else [replace(last, self._suffix, " ")]

    def finish(self) -> list[str]:
        last, self._last = self._last, None
        return [] if last is None else [replace(last, self._suffix, "")]

    def piece(self, token: str) -> str | bytes:
        return replace(token, self._suffix, " ")


class ByteFallback:
    """Runs of ``<0xNN>`` become text if the whole run is UTF-8, else one U+FFFD a byte: known only at the run's end."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        byte = _byte_of(token)
        if byte is not None:
            self._run.append(byte)
            return []
        return [*self.finish(), token] if self._run else [token]

    def finish(self) -> list[str]:
        if not self._run:
            return []
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def piece(self, token: str) -> str | bytes:
        byte = _byte_of(token)
        return token if byte is None else bytes([byte])


class ByteLevel:
    """Byte-level BPE: the bytes of all tokens are one UTF-8 text; an incomplete character waits for its rest."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        return [self._utf8.decode(_byte_level(token))]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]

    def piece(self, token: str) -> str | bytes:
        return _byte_level(token)


class TextReplace:
    """Replaces a string in the joined text; keeps a tail that may be the string's beginning."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._tail = old, new, ""

    def push(self, token: str) -> list[str]:
        if not self._old:
            return [token]
        *done, rest = (self._tail + token).split(self._old)
        keep = next((n for n in range(min(len(rest), len(self._old) - 1), 0, -1) if self._old.startswith(rest[-n:])), 0)
        self._tail = rest[len(rest) - keep :]
        return [self._new.join([*done, rest[: len(rest) - keep]])]

    def finish(self) -> list[str]:
        tail, self._tail = self._tail, ""
        return [tail]

    def piece(self, token: str) -> str | bytes:
        return replace(token, self._old, self._new)


class TextStripStart:
    """Takes up to ``count`` leading characters ``char`` off the joined text."""

    def __init__(self, char: str, count: int) -> None:
        self._char, self._left = char, count

    def push(self, token: str) -> list[str]:
        while self._left and token:
            if token[0] != self._char:
                self._left = 0
                break
            token, self._left = token[1:], self._left - 1
        return [token]

    def finish(self) -> list[str]:
        return []

    def piece(self, token: str) -> str | bytes:
        return token  # the middle of a text


def replace(text: str, old: str, new: str) -> str:
    """``text.replace``, where nothing is replaced by anything."""
    return text.replace(old, new) if old else text


def strip_start(token: str, char: str, count: int) -> str:
    """``token`` without up to ``count`` leading ``char``."""
    start = 0
    while start < min(count, len(token)) and token[start] == char:
        start += 1
    return token[start:]


def tidy(token: str) -> str:
    """The clean-up of the WordPiece decoder."""
    for old, new in _WORDPIECE_TIDY:
        token = token.replace(old, new)
    return token
