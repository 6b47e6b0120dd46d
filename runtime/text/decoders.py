"""Decoding as a stream: what ``tokenizers`` does with all tokens of a text at once, done one token at a time.

A decoder is a chain of stages. Up to the first stage that joins its input (``Fuse``, ``ByteLevel``) a stage turns
tokens into tokens; behind it, fragments of one text into fragments of one text. Each stage gives out what no later
token can change and keeps the rest, so that the concatenation of everything it gave out is exact for any tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import Regex
from tokenizers import decoders as library

from .decode_stages import (
    CLEAN_UP,
    BpeSuffix,
    ByteFallback,
    ByteLevel,
    Each,
    FirstDiffers,
    Stage,
    TextReplace,
    TextStripStart,
    replace,
    strip_start,
    tidy,
)

Spec = Mapping[str, Any]
StageMaker = Callable[[], Stage]


def _word_piece(spec: Spec) -> StageMaker:
    prefix, clean = str(spec["prefix"]), tidy if spec["cleanup"] else str

    def later(token: str) -> str:
        return clean(token.removeprefix(prefix) if token.startswith(prefix) else " " + token)

    return lambda: FirstDiffers(clean, later)


def _metaspace(spec: Spec) -> StageMaker:
    mark = str(spec["replacement"])
    scheme = spec.get("prepend_scheme") or ("always" if spec.get("add_prefix_space", True) else "never")

    def later(token: str) -> str:
        return token.replace(mark, " ")

    def first(token: str) -> str:
        return later(token) if scheme == "never" else token.replace(mark, "")

    return lambda: FirstDiffers(first, later)


def _replace_stage(spec: Spec, joined: bool) -> StageMaker | None:
    pattern, new = spec["pattern"], str(spec["content"])
    if "String" in pattern:
        old = str(pattern["String"])
        return (lambda: TextReplace(old, new)) if joined else (lambda: Each(lambda token: replace(token, old, new)))
    if joined:
        return None
    # The dialect of regular expressions is the library's, so the library applies it.
    decoder = library.Replace(Regex(str(pattern["Regex"])), new)
    return lambda: Each(lambda token: str(decoder.decode([token])))


def _stage(spec: Spec, joined: bool) -> StageMaker | None:
    """The stage of one decoder; None where it cannot be streamed."""
    kind = spec["type"]
    if kind == "Replace":
        return _replace_stage(spec, joined)
    if kind == "Strip" and spec["stop"] == 0:
        char, count = str(spec["content"]), int(spec["start"])
        if joined:
            return lambda: TextStripStart(char, count)
        return lambda: Each(lambda token: strip_start(token, char, count))
    if kind == "Fuse":
        return lambda: Each(str)
    if joined:
        return None
    if kind == "ByteLevel":
        return ByteLevel
    if kind == "ByteFallback":
        return ByteFallback
    if kind == "Metaspace":
        return _metaspace(spec)
    if kind == "WordPiece":
        return _word_piece(spec)
    if kind == "BPEDecoder":
        suffix = str(spec["suffix"])
        return lambda: BpeSuffix(suffix)
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
            makers.append(lambda: FirstDiffers(str, lambda token: " " + token))
        else:
            for spec in _flatten(decoder):
                makers.append(_stage(spec, joined))
                joined = joined or spec["type"] in ("Fuse", "ByteLevel")
        if clean_up_spaces:
            makers += [partial(TextReplace, old, new) for old, new in CLEAN_UP]
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
