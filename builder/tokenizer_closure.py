"""Tokenizer closure: whatever tokenizer a checkpoint has, in one form, proven equal to the original.

The original is what ``AutoTokenizer`` makes of the files (tokenizer.json, sentencepiece, tekken, tiktoken, GGUF). Its
backend is written out as a tokenizer.json; what AutoTokenizer answers on a corpus becomes the vectors; then the serving
side's own tokenizer must give the same answers. A difference is a build error, never a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ..runtime.errors import CheckpointError, PeltonError, TokenizerError
from ..runtime.text.chat_template import ChatTemplate
from ..runtime.text.decode_stages import byte_alphabet
from ..runtime.text.section import (
    ChatVector,
    IdVector,
    TextVector,
    TokenizerSection,
    Vectors,
    pack_tokenizer,
    unpack,
)
from ..runtime.text.vectors import FIXED_NOW, check_vectors
from .checkpoint import TOKENIZER_SOURCES, read_json
from .tokenizer_corpus import CONVERSATIONS, TEXTS, id_sequences, special_texts

_MOST_SPECIAL = 12  # special and added tokens that get texts of their own; some models have thousands
_MARK = "PELTONMARK"


def close_tokenizer(path: str | Path) -> bytes:
    """The ``tokenizer`` section of a checkpoint: tokenizer, templates, special tokens, end ids, vectors.

    ``path``: a Hugging Face folder or a GGUF file. Nothing is downloaded and no code of the checkpoint runs.

    Raises:
        TokenizerError: the tokenizer cannot be converted, or gives other answers than AutoTokenizer.
    """
    path = Path(path)
    with _quiet():
        original, source = _load(path)
        section = _convert(original, source)
        vectors = _take_vectors(original, section)
    config, generation_config = (
        ({}, {}) if path.is_file() else (read_json(path / name) for name in ("config.json", "generation_config.json"))
    )
    ends = end_ids(config, generation_config, section)
    data = pack_tokenizer(msgspec.structs.replace(section, eos_token_ids=ends, vectors=vectors))
    problems = check_vectors(data)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TokenizerError(
            f"{path}: the converted tokenizer differs from AutoTokenizer: {problems[0]}{more}; "
            "this tokenizer does what the tokenizers library cannot express, or its template leaves the sandbox"
        )
    return data


def end_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: bytes | TokenizerSection | None
) -> tuple[int, ...]:
    """Ids that end a sequence, ascending: the union of both configs' ``eos_token_id`` and the tokenizer's own.

    ``tokenizer``: a section (or its bytes) whose ``eos_token_ids`` hold the tokenizer's EOS and the turn end of its
    chat template; None for a checkpoint without one.

    Raises:
        CheckpointError: an ``eos_token_id`` is not an id.
    """
    text_config = config.get("text_config")
    found = _stated(config, "config.json") | _stated(generation_config, "generation_config.json")
    if isinstance(text_config, Mapping):
        found |= _stated(text_config, "config.json, text_config")
    if tokenizer is not None:
        section = tokenizer if isinstance(tokenizer, TokenizerSection) else unpack(tokenizer)
        found |= set(section.eos_token_ids)
    return tuple(sorted(found))


def turn_end(templates: Mapping[str, str], special_tokens: Mapping[str, str], added: Sequence[str]) -> str | None:
    """The added token that a chat template writes behind an assistant's text, if it does.

    ``added``: texts of the tokenizer's added tokens.
    """
    if not templates:
        return None
    user = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": _MARK}
    try:
        template = ChatTemplate(templates, special_tokens, clock=lambda: FIXED_NOW)
        text = template.render([user, answer], add_generation_prompt=False)
    except PeltonError:
        return None  # no answer in a conversation; what the template does accept is compared elsewhere
    _, mark, tail = text.rpartition(_MARK)
    tail = tail.lstrip()
    return max((token for token in added if token and mark and tail.startswith(token)), key=len, default=None)


def _stated(config: Mapping[str, Any], where: str) -> set[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for index in ids:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise CheckpointError(f"{where}: eos_token_id is {value!r}; a token id or a list of token ids is needed")
    return set(ids)


def _load(path: Path) -> tuple[Any, str]:
    """AutoTokenizer of a folder or GGUF file, and what it was made from."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_file():
        folder, source, arguments = path.parent, "GGUF", {"gguf_file": path.name}
    elif path.is_dir():
        folder, arguments = path, {}
        source = next((name for name in TOKENIZER_SOURCES if (path / name).is_file()), "")
        if not source:
            names = ", ".join(TOKENIZER_SOURCES)
            raise TokenizerError(f"{path}: no tokenizer; one of {names} is needed beside the weights")
    else:
        raise TokenizerError(f"{path}: no such file or folder")
    try:
        original = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **arguments)
        if not original.is_fast and source == "tokenizer.json":
            # Another file in the folder made AutoTokenizer choose a class in Python (tekken.json does).
            original = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes the converters raise
        remedy = "install what is missing" if isinstance(error, ImportError) else "check that the files are complete"
        raise TokenizerError(
            f"{path}: transformers cannot load the tokenizer from {source}: {type(error).__name__}: {error}; "
            f"{remedy} (a git-lfs pointer instead of the file?)"
        ) from error
    if not original.is_fast:
        raise TokenizerError(
            f"{path}: {type(original).__name__} runs as Python code and has no form in the tokenizers library; "
            "put a tokenizer.json beside the weights (for many kinds PreTrainedTokenizerFast.from_pretrained(folder) "
            "loads what is there, and its save_pretrained(folder) writes one)"
        )
    return original, source


def _convert(original: Any, source: str) -> TokenizerSection:
    """The section of an AutoTokenizer, without vectors."""
    document = json.loads(original.backend_tokenizer.to_str())
    document["truncation"] = document["padding"] = None  # of training; never applied to a prompt
    vocabulary = original.get_vocab()
    special = dict(original.special_tokens_map)
    templates = original.chat_template or {}
    templates = {"default": templates} if isinstance(templates, str) else dict(templates)
    added = {token.content: index for index, token in original.added_tokens_decoder.items()}
    end = turn_end(templates, special, list(added))
    ends = {original.eos_token_id, None if end is None else added[end]} - {None}
    tidies = bool(getattr(original, "clean_up_tokenization_spaces", False))
    if document["model"]["type"] == "BPE":  # where transformers ignores the flag, unless told otherwise
        tidies &= bool(
            getattr(original, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        )
    return TokenizerSection(
        source=source,
        tokenizer=json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True),
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        special_tokens=special,
        extra_special_tokens=tuple(str(token) for token in getattr(original, "extra_special_tokens", None) or ()),
        bos_token_id=original.bos_token_id,
        pad_token_id=original.pad_token_id,
        eos_token_ids=tuple(sorted(ends)),
        chat_templates=templates,
        clean_up_spaces=tidies,
        split_special_tokens=bool(getattr(original, "split_special_tokens", False)),
    )


def _take_vectors(original: Any, section: TokenizerSection) -> Vectors:
    """What the original answers on the corpus."""
    added = {index: token.content for index, token in sorted(original.added_tokens_decoder.items())}
    named = [text for text in section.special_tokens.values() if text in set(added.values())]
    shown = list(dict.fromkeys([*named, *added.values()]))[:_MOST_SPECIAL]
    ids = list(dict.fromkeys(index for index, text in added.items() if text in shown))
    texts = list(dict.fromkeys([*TEXTS, *special_texts(shown)]))
    sequences = id_sequences(section.vocab_size, _byte_ids(original), ids)
    return Vectors(
        texts=tuple(_text_vector(original, text) for text in texts),
        ids=tuple(IdVector(tuple(row), *_decodings(original, row)) for row in sequences),
        chats=tuple(_chat_vectors(original)) if section.chat_templates else (),
    )


def _text_vector(original: Any, text: str) -> TextVector:
    ids = original.encode(text)
    bare = original.encode(text, add_special_tokens=False)
    full, plain = _decodings(original, ids)
    return TextVector(text=text, ids=tuple(ids), bare=tuple(bare), full=full, plain=plain)


def _decodings(original: Any, ids: Sequence[int]) -> tuple[str, str]:
    full = original.decode(list(ids), skip_special_tokens=False)
    return full, original.decode(list(ids), skip_special_tokens=True)


def _byte_ids(original: Any) -> list[int]:
    """Ids of the tokens of one byte, for 0 to 255; empty unless the vocabulary has all of them."""
    vocabulary = original.get_vocab()
    spellings = [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(token in vocabulary for token in spellings):
        spellings = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    return [vocabulary[token] for token in spellings] if all(token in vocabulary for token in spellings) else []


def _chat_vectors(original: Any) -> Iterator[ChatVector]:
    with _fixed_clock():
        for conversation in CONVERSATIONS:
            arguments = {"add_generation_prompt": True, **conversation}
            options = {key: value for key, value in arguments.items() if key != "messages"}
            try:
                rendered = str(original.apply_chat_template(arguments["messages"], tokenize=False, **options))
            except Exception:  # a refusal, by raise_exception or by failing on what is not there
                rendered, ids = None, []
            else:
                ids = original.encode(rendered, add_special_tokens=False)
            text = json.dumps(arguments, ensure_ascii=False)  # templates show the order of keys
            yield ChatVector(conversation=text, rendered=rendered, ids=tuple(ids))


@contextmanager
def _fixed_clock() -> Iterator[None]:
    """``strftime_now`` of transformers' templates shows the vectors' fixed time."""
    from transformers.utils import chat_template_utils as module

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return FIXED_NOW

    names = vars(module)
    before = names["datetime"]
    names["datetime"] = Fixed
    try:
        yield
    finally:
        names["datetime"] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings: what they say is checked here, and fails where it matters."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
