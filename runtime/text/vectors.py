"""Re-runs the vectors that the build took from the checkpoint's own tokenizer (for ``pelton verify``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from ..errors import PeltonError
from .chat_template import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .section import ChatVector, unpack
from .tokenizer import Tokenizer

FIXED_NOW = datetime(2024, 7, 26, 12, 30, 45)  # what strftime_now shows while vectors are made and checked


def check_vectors(section: bytes | bytearray | memoryview) -> list[str]:
    """What differs between this tokenizer section's vectors and what it does here; empty when all is well.

    Raises:
        EngineFormatError, TokenizerError: the section cannot be used at all.
    """
    return list(_differences(Tokenizer(unpack(section))))


def count_vectors(section: bytes | bytearray | memoryview) -> int:
    """How many vectors a tokenizer section has: texts, runs of ids, conversations. Raises as check_vectors."""
    unpacked = unpack(section)
    vectors = unpacked.vectors
    return len(vectors.texts) + len(vectors.ids) + (len(vectors.chats) if unpacked.chat_templates else 0)


def _differences(tokenizer: Tokenizer) -> Iterator[str]:
    vectors = tokenizer.section.vectors
    for text in vectors.texts:
        what = f"text {_shown(text.text)}"
        yield from _differ(f"{what}, encoded", text.ids, tuple(tokenizer.encode(text.text)))
        bare = tuple(tokenizer.encode(text.text, add_special_tokens=False))
        yield from _differ(f"{what}, encoded without special tokens", text.bare, bare)
        yield from _decoding(tokenizer, what, text.ids, text.full, text.plain)
    for vector in vectors.ids:
        yield from _decoding(tokenizer, f"ids {_shown(list(vector.ids))}", vector.ids, vector.full, vector.plain)
    templates = tokenizer.section.chat_templates
    if templates and vectors.chats:
        template = ChatTemplate(templates, tokenizer.section.special_tokens, clock=lambda: FIXED_NOW)
        for chat in vectors.chats:
            yield from _chat(tokenizer, template, chat)


def _decoding(tokenizer: Tokenizer, what: str, ids: Sequence[int], full: str, plain: str) -> Iterator[str]:
    for expected, skip in ((full, False), (plain, True)):
        how = f"{what}, decoded {'without' if skip else 'with'} special tokens"
        yield from _differ(how, expected, tokenizer.decode(ids, skip_special_tokens=skip))
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        pieces = [stream.push(index) for index in ids]
        yield from _differ(f"{how}, one by one", expected, "".join(pieces) + stream.flush())


def _chat(tokenizer: Tokenizer, template: ChatTemplate, vector: ChatVector) -> Iterator[str]:
    arguments: dict[str, Any] = json.loads(vector.conversation)
    rendered: str | None
    try:
        rendered, reason = template.render(**arguments), ""
    except PeltonError as error:
        rendered, reason = None, f" ({error})"
    what = f"chat {_shown(vector.conversation, 400)}{reason}"
    yield from _differ(f"{what}, rendered", vector.rendered, rendered)
    if rendered is not None and rendered == vector.rendered:
        yield from _differ(f"{what}, encoded", vector.ids, tuple(tokenizer.encode(rendered, add_special_tokens=False)))


def _differ(what: str, expected: object, got: object) -> Iterator[str]:
    if expected != got:
        start = _first_difference(expected, got)
        yield f"{what}: the original gives {_shown(expected, 120, start)}, this engine {_shown(got, 120, start)}"


def _first_difference(left: object, right: object) -> int:
    """Where two strings or tuples part; 0 for anything else."""
    if isinstance(left, (str, tuple)) and isinstance(right, (str, tuple)):
        return next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
    return 0


def _shown(value: object, most: int = 80, start: int = 0) -> str:
    """A value as printable ASCII, the part from a little before ``start`` if it is long."""
    if value is None:
        return "a refusal"
    if isinstance(value, (str, tuple)) and start > 20:
        return f"...[{start - 10}:] {_shown(value[start - 10 :], most)}"
    text = ascii(value)
    return text if len(text) <= most else f"{text[:most]}..."
