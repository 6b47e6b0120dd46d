"""Tiny tokenizers of the kinds that models use, made on the fly."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pelton.builder.tokenizer_closure import close_tokenizer
from pelton.runtime.text import Tokenizer, TokenizerSection

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "def f(x):\n    return x + 1\n\n",
    "Größe, naïve café, 東京 and 北京, привет мир; 1234 + 5678 = 6912.",
    "hello world, hello there, what is the weather there? isn't it nice! I'm sure we've seen this.",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("\n\n\n", normalized=False)])
    return tokenizer


def _with_bytes(model: str, add_prefix: bool) -> tokenizers.Tokenizer:
    """A model over text with U+2581 for spaces, with tokens for all bytes."""
    source = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    source.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    source.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainer)
    document = json.loads(source.to_str())
    vocabulary = document["model"]["vocab"]
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    names = [*order[: len(SPECIAL)], *BYTES, *order[len(SPECIAL) :]]
    if model == "BPE":
        merges = [tuple(merge) for merge in document["model"]["merges"]]
        ids = {name: index for index, name in enumerate(names)}
        tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
    else:
        scores = [(name, -float(index) / 10) for index, name in enumerate(names)]
        tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    steps = [normalizers.Prepend("\u2581")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    chain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if add_prefix else chain)
    return tokenizer


def llama2() -> tokenizers.Tokenizer:
    """Sentencepiece BPE: byte fallback, a space before the text that decoding takes away, BOS added."""
    tokenizer = _with_bytes("BPE", add_prefix=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma() -> tokenizers.Tokenizer:
    """Sentencepiece BPE without the space before the text; runs of spaces are added tokens."""
    tokenizer = _with_bytes("BPE", add_prefix=False)
    tokenizer.add_tokens([AddedToken("\u2581" * count, normalized=False) for count in (2, 3, 4)])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Sentencepiece Unigram with the Metaspace decoder, byte fallback before it."""
    tokenizer = _with_bytes("Unigram", add_prefix=False)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """BERT's kind: a decoder that joins words and tidies them."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def suffix_bpe() -> tokenizers.Tokenizer:
    """The first GPT's kind: words end in </w>."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    """No decoder: the library joins with spaces."""
    words = sorted({word for text in CORPUS for word in text.split()})
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def odd_chain() -> tokenizers.Tokenizer:
    """Decoders in an unusual order: a regular expression, and replacements in the joined text."""
    tokenizer = llama2()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("[aeiou]{2}"), "_"),
            decoders.Strip("t", 2, 0),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("\u2581\u2581h", "H"),
            decoders.Replace("\u2581", " "),
            decoders.Strip(" ", 3, 0),
        ]
    )
    return tokenizer


def not_streamable() -> tokenizers.Tokenizer:
    """A chain of decoders that no stream follows: its text comes at the end."""
    tokenizer = llama2()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    return tokenizer


KINDS: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "unigram": unigram,
    "word_piece": word_piece,
    "suffix_bpe": suffix_bpe,
    "word_level": word_level,
    "odd_chain": odd_chain,
    "not_streamable": not_streamable,
}


@functools.cache
def tiny(kind: str, clean_up_spaces: bool = False) -> Tokenizer:
    """The serving side's tokenizer of one kind, without a template."""
    made = KINDS[kind]()
    return Tokenizer(
        TokenizerSection(
            source="test",
            tokenizer=made.to_str(),
            vocab_size=max(made.get_vocab().values()) + 1,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            bos_token_id=made.token_to_id("<s>"),
            eos_token_ids=(2,),
            clean_up_spaces=clean_up_spaces,
        )
    )


def save_folder(folder: Path, kind: str, template: str | None = None, **config: Any) -> Path:
    """A Hugging Face folder that holds a tokenizer and configs, no weights. ``config``: of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@functools.cache
def closed(folder: Path) -> bytes:
    """The section of a folder, made once."""
    return close_tokenizer(folder)


def real_model() -> Path:
    """The real model's folder; skips the test where there is none."""
    named = os.environ.get("PELTON_TEST_MODEL")
    folder = Path(named) if named else ROOT / "models" / "smollm2-135m-instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no real tokenizer at {folder}; scripts/get_model smollm2-135m-instruct, or PELTON_TEST_MODEL")
    return folder
