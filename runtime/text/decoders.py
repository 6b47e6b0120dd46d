"""Decoding as a stream: what ``tokenizers`` does with all tokens of a text at once, done one token at a time.

A decoder is a chain of stages. Up to the first stage that joins its input (``Fuse``, ``ByteLevel``) a stage turns
tokens into tokens; behind it, fragments of one text into fragments of one text. Each stage gives out what no later
token can change and keeps the rest, so that the concatenation of everything it gave out is exact for any tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from tokenizers import Regex
from tokenizers import decoders as library

Spec = Mapping[str, Any]

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


class _Each:
    """A stage that looks at one token alone."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def push(self, token: str) -> list[str]:
        return [self._function(token)]

    def finish(self) -> list[str]:
        return []

    def piece(self, token: str) -> str | bytes:
        return self._function(token)


class _FirstDiffers:
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


class _BpeSuffix:
    """``</w>`` ends a word: a space, except in the last token, hence one token late."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, token: str) -> list[str]:
        last, self._last = self._last, token
        return [] if last is None else [_replace(last, self._suffix, " ")]

    def finish(self) -> list[str]:
        last, self._last = self._last, None
        return [] if last is None else [_replace(last, self._suffix, "")]

    def piece(self, token: str) -> str | bytes:
        return _replace(token, self._suffix, " ")


class _ByteFallback:
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


class _ByteLevel:
    """Byte-level BPE: the bytes of all tokens are one UTF-8 text; an incomplete character waits for its rest."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        return [self._utf8.decode(_byte_level(token))]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]

    def piece(self, token: str) -> str | bytes:
        return _byte_level(token)


class _TextReplace:
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
        return _replace(token, self._old, self._new)


class _TextStripStart:
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


def _replace(text: str, old: str, new: str) -> str:
    return text.replace(old, new) if old else text


def _strip_start(token: str, char: str, count: int) -> str:
    """``token`` without up to ``count`` leading ``char``."""
    start = 0
    while start < min(count, len(token)) and token[start] == char:
        start += 1
    return token[start:]


def _tidy(token: str) -> str:
    for old, new in _WORDPIECE_TIDY:
        token = token.replace(old, new)
    return token


StageMaker = Callable[[], Stage]


def _word_piece(spec: Spec) -> StageMaker:
    prefix, clean = str(spec["prefix"]), _tidy if spec["cleanup"] else str

    def later(token: str) -> str:
        return clean(token.removeprefix(prefix) if token.startswith(prefix) else " " + token)

    return lambda: _FirstDiffers(clean, later)


def _metaspace(spec: Spec) -> StageMaker:
    mark = str(spec["replacement"])
    scheme = spec.get("prepend_scheme") or ("always" if spec.get("add_prefix_space", True) else "never")

    def later(token: str) -> str:
        return token.replace(mark, " ")

    def first(token: str) -> str:
        return later(token) if scheme == "never" else token.replace(mark, "")

    return lambda: _FirstDiffers(first, later)


def _replace_stage(spec: Spec, joined: bool) -> StageMaker | None:
    pattern, new = spec["pattern"], str(spec["content"])
    if "String" in pattern:
        old = str(pattern["String"])
        return (lambda: _TextReplace(old, new)) if joined else (lambda: _Each(lambda token: _replace(token, old, new)))
    if joined:
        return None
    # The dialect of regular expressions is the library's, so the library applies it.
    decoder = library.Replace(Regex(str(pattern["Regex"])), new)
    return lambda: _Each(lambda token: str(decoder.decode([token])))


def _stage(spec: Spec, joined: bool) -> StageMaker | None:
    """The stage of one decoder; None where it cannot be streamed."""
    kind = spec["type"]
    if kind == "Replace":
        return _replace_stage(spec, joined)
    if kind == "Strip" and spec["stop"] == 0:
        char, count = str(spec["content"]), int(spec["start"])
        if joined:
            return lambda: _TextStripStart(char, count)
        return lambda: _Each(lambda token: _strip_start(token, char, count))
    if kind == "Fuse":
        return lambda: _Each(str)
    if joined:
        return None
    if kind == "ByteLevel":
        return _ByteLevel
    if kind == "ByteFallback":
        return _ByteFallback
    if kind == "Metaspace":
        return _metaspace(spec)
    if kind == "WordPiece":
        return _word_piece(spec)
    if kind == "BPEDecoder":
        suffix = str(spec["suffix"])
        return lambda: _BpeSuffix(suffix)
    return None


def _flatten(spec: Spec) -> list[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    return [inner for part in spec["decoders"] for inner in _flatten(part)]


class StreamPlan:
    """The stages of one tokenizer's decoder; makes a fresh :class:`Stream` for each text.

    ``exact`` is False where a stage cannot be streamed: the caller must then decode everything at the end.
    """

    def __init__(self, decoder: Spec | None, *, clean_up_spaces: bool = False) -> None:
        makers: list[StageMaker | None] = []
        joined = False
        if decoder is None:  # the library joins with spaces
            makers.append(lambda: _FirstDiffers(str, lambda token: " " + token))
        else:
            for spec in _flatten(decoder):
                makers.append(_stage(spec, joined))
                joined = joined or spec["type"] in ("Fuse", "ByteLevel")
        if clean_up_spaces:
            makers += [partial(_TextReplace, old, new) for old, new in CLEAN_UP]
        self._makers = [maker for maker in makers if maker is not None]
        self.exact = len(self._makers) == len(makers)
        self._single = [make() for make in self._makers]  # for piece(), which leaves no trace in a stage

    def stream(self) -> Stream:
        """A fresh stream."""
        return Stream([make() for make in self._makers])

    def piece(self, token: str) -> bytes:
        """The bytes that ``token`` stands for in the middle of a text."""
        value: str | bytes = token
        for stage in self._single:
            if isinstance(value, bytes):
                break
            value = stage.piece(value)
        return value if isinstance(value, bytes) else value.encode("utf-8")


class Stream:
    """Tokens in, final text out. The cost of a token does not depend on how many came before."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        """The text that became final with ``token``."""
        return self._run([token], 0)

    def finish(self) -> str:
        """The rest of the text."""
        return "".join([self._run(stage.finish(), index + 1) for index, stage in enumerate(self._stages)])

    def _run(self, tokens: list[str], first: int) -> str:
        for stage in self._stages[first:]:
            tokens = [out for token in tokens for out in stage.push(token)]
        return "".join(tokens)
