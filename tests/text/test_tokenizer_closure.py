"""Tokenizer closure: what a checkpoint has, in one form, equal to AutoTokenizer; a difference is an error."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import sentencepiece
from transformers import AutoTokenizer

from pelton.builder import tokenizer_closure
from pelton.builder.tokenizer_closure import close_tokenizer, end_ids, turn_end
from pelton.runtime.errors import CheckpointError, TokenizerError
from pelton.runtime.text import Tokenizer, unpack
from pelton.runtime.text.vectors import check_vectors

from .tokenizers import CHATML, CORPUS, SPECIAL, byte_level, closed, real_model, save_folder, tiny

TEXT = "The quick brown fox, 1234 Größe 東京 🙂\n\tx = 1"


def same_as_auto(path: Path, section: bytes, **arguments: Any) -> Tokenizer:
    """Checks one text that is not in the corpus, apart from all vectors."""
    folder, gguf_file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    original = AutoTokenizer.from_pretrained(folder, **gguf_file, **arguments)
    tokenizer = Tokenizer.from_section(section)
    assert tokenizer.encode(TEXT) == original.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == original.decode(original.encode(TEXT), skip_special_tokens=True)
    assert check_vectors(section) == []
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "unigram", "word_piece"])
def test_tokenizer_json(kind: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", kind, CHATML)
    section = close_tokenizer(folder)
    tokenizer = same_as_auto(folder, section)
    facts = tokenizer.section
    assert facts.source == "tokenizer.json"
    assert facts.vocab_size == tiny(kind).vocab_size
    assert facts.special_tokens["eos_token"] == "</s>"
    assert facts.chat_templates == {"default": CHATML}
    assert tokenizer.eos_token_ids == (2, tokenizer.token_to_id("<|im_end|>"))
    assert len(facts.vectors.texts) > 60
    assert any(chat.rendered is not None for chat in facts.vectors.chats)
    assert any(chat.rendered is None for chat in facts.vectors.chats)
    assert close_tokenizer(folder) == section  # the same bytes


def test_config_flags(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", "byte_level", add_bos_token=True, add_eos_token=True, pad_token="<|im_end|>")
    tokenizer = same_as_auto(folder, close_tokenizer(folder))
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 4)
    folder = save_folder(tmp_path / "w", "word_piece", clean_up_tokenization_spaces=True)
    assert same_as_auto(folder, close_tokenizer(folder)).section.clean_up_spaces
    folder = save_folder(tmp_path / "b", "byte_level", clean_up_tokenization_spaces=True)
    assert not same_as_auto(folder, close_tokenizer(folder)).section.clean_up_spaces  # ignored for BPE
    folder = save_folder(tmp_path / "s", "byte_level", split_special_tokens=True)
    assert len(same_as_auto(folder, close_tokenizer(folder)).encode("</s>")) > 1


def test_named_templates(tmp_path: Path) -> None:
    folder = save_folder(
        tmp_path / "m",
        "byte_level",
        chat_template=[
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML},
        ],
    )
    assert sorted(unpack(close_tokenizer(folder)).chat_templates) == ["default", "tool_use"]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_sentencepiece_model(byte_fallback: bool, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=byte_fallback,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    assert same_as_auto(folder, close_tokenizer(folder)).section.source == "tokenizer.model"


def test_tiktoken_model(tmp_path: Path) -> None:
    words = [b"th", b"the", b" the", b"in", b"ing", b"qu", b" quick"[:3], b"fox", b"  ", b"12"]
    tokens = [*(bytes([b]) for b in range(256)), *words]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    section = close_tokenizer(tmp_path)
    assert same_as_auto(tmp_path, section).decode(tiny("byte_level").encode("")) == ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        document = json.loads(byte_level().to_str())
        vocabulary = document["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    else:
        vocabulary = json.loads(tiny("llama2").section.tokenizer)["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = same_as_auto(path, close_tokenizer(path))
    assert tokenizer.section.source == "GGUF"
    assert tokenizer.eos_token_ids == (2, 4)


def test_real_model() -> None:
    section = closed(real_model())
    tokenizer = same_as_auto(real_model(), section)
    assert tokenizer.eos_token_ids == (2,)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is gravity?"}])
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("gravity?<|im_end|>\n<|im_start|>assistant\n")


class _Changed:
    """An AutoTokenizer with one answer changed."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self._original = original
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _one_more(original: Any) -> Any:
    def encode(text: str, **options: Any) -> list[int]:
        ids = original.encode(text, **options)
        return [*ids, 9] if text == "a" else list(ids)

    return encode


def _misread(original: Any) -> Any:
    return lambda ids, **options: original.decode(ids, **options).replace("fox", "fux")


def _shout(original: Any) -> Any:
    return lambda messages, **options: original.apply_chat_template(messages, **options) + "!"


@pytest.mark.parametrize(
    "method, make, message",
    [
        ("encode", _one_more, r"text 'a', encoded: the original gives \(\d+, 9\), this engine \(\d+,\)"),
        ("decode", _misread, "decoded with special tokens: the original gives .*fux.* this engine .*fox"),
        ("apply_chat_template", _shout, "What is <gravity>.*rendered: the original gives .*!"),
    ],
)
def test_a_difference_is_an_error(
    method: str, make: Callable[[Any], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AutoTokenizer.from_pretrained(save_folder(tmp_path / "m", "byte_level", CHATML))
    changed = _Changed(original, **{method: make(original)})
    monkeypatch.setattr(tokenizer_closure, "_load", lambda path: (changed, "test"))
    with pytest.raises(TokenizerError, match=message):
        close_tokenizer(tmp_path / "m")


def test_a_template_that_leaves_the_sandbox_is_an_error(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", "byte_level", "{{ '%1000d' % 1 }}")
    with pytest.raises(TokenizerError, match="width over 999"):
        close_tokenizer(folder)
    folder = save_folder(tmp_path / "n", "byte_level", "{% for %}")
    with pytest.raises(TokenizerError, match="'default', line 1"):
        close_tokenizer(folder)


def test_bad_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        close_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"no tokenizer; one of tokenizer\.json"):
        close_tokenizer(tmp_path)
    folder = save_folder(tmp_path / "m", "byte_level")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(TokenizerError, match="git-lfs pointer"):
        close_tokenizer(folder)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match=r"x\.gguf: transformers cannot load"):
        close_tokenizer(tmp_path / "x.gguf")
    folder = save_folder(tmp_path / "c", "byte_level")
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 'two'"):
        close_tokenizer(folder)


def test_end_ids() -> None:
    assert end_ids({}, {}, None) == ()
    assert end_ids({"eos_token_id": 7}, {"eos_token_id": [9, 7, 3]}, None) == (3, 7, 9)
    assert end_ids({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, {}, None) == (5,)
    section = msgspec.structs.replace(tiny("byte_level").section, eos_token_ids=(4, 2))
    assert end_ids({"eos_token_id": 7}, {}, section) == (2, 4, 7)
    for bad in ([1, None], -1, True, "2"):
        with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
            end_ids({"eos_token_id": bad}, {}, None)


def test_turn_end() -> None:
    added = ["<s>", "</s>", "<|im_end|>", "<|im_end|>2", "<|user|>"]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert turn_end({"default": CHATML}, special, added) == "<|im_end|>"
    assert turn_end({}, special, added) is None
    each = "{% for m in messages %}{{ m.content }}END{% endfor %}"
    assert turn_end({"default": each.replace("END", "{{ eos_token }}")}, special, added) == "</s>"
    assert turn_end({"default": each.replace("END", " \n<|im_end|>2<s>")}, special, added) == "<|im_end|>2"
    assert turn_end({"default": each.replace("END", "")}, special, added) is None
    assert turn_end({"default": each.replace("END", "done</s>")}, special, added) is None
    assert turn_end({"default": "{{ raise_exception('no') }}"}, special, added) is None
    assert turn_end({"default": "no answers</s>"}, special, added) is None
