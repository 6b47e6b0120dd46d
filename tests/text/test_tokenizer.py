"""Tokenizer: ids, text, bytes, errors; the section's bytes."""

from __future__ import annotations

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.errors import EngineFormatError, RequestError, TokenizerError
from pelton.runtime.text import Tokenizer, TokenizerSection, pack_tokenizer, unpack
from pelton.runtime.text.section import ChatVector, IdVector, TextVector, Vectors
from pelton.runtime.text.vectors import check_vectors

from .tokenizers import CHATML, tiny


def test_ids_and_text() -> None:
    tokenizer = tiny("llama2")
    assert tokenizer.encode("the fox")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("the fox", add_special_tokens=False) == tokenizer.encode("the fox")[1:]
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert tokenizer.decode(tokenizer.encode("the fox"), skip_special_tokens=False) == "<s> the fox"
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.id_to_token(1) == "<s>"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_token_bytes_spell_the_text(kind: str) -> None:
    tokenizer = tiny(kind)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.text(max_size=30))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        wanted = text.replace("\u2581", " ").encode() if kind != "byte_level" else text.encode()
        assert spelled.removeprefix(b" " if kind == "llama2" and text else b"") == wanted

    check()


def test_token_bytes() -> None:
    fallback = tiny("llama2")
    byte = fallback.token_to_id("<0xE2>")
    assert byte is not None
    assert fallback.token_bytes(byte) == b"\xe2"
    assert fallback.token_bytes(3) == b"<|im_start|>"
    assert fallback.token_bytes(fallback.vocab_size) == b""
    byte_level = tiny("byte_level")
    assert [byte_level.token_bytes(i) for i in byte_level.encode("🙂")] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert {byte_level.token_bytes(i) for i in range(byte_level.vocab_size)} >= {bytes([b]) for b in range(256)}
    words = tiny("word_piece")
    assert {words.token_bytes(i) for i in words.encode("there")} <= {b" the", b" there", b"re", b" t", b"here"}


def test_bad_input() -> None:
    tokenizer = tiny("byte_level")
    with pytest.raises(RequestError, match="cannot encode"):
        tokenizer.encode("half a pair: \ud800")
    with pytest.raises(RequestError, match="cannot encode b'bytes'"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token id -1"):
        tokenizer.decode([1, -1, 2])
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_chat_has_one_bos() -> None:
    plain = tiny("llama2").section
    section = msgspec.structs.replace(plain, chat_templates={"default": "{{ bos_token }}" + CHATML})
    tokenizer = Tokenizer(section)
    ids = tokenizer.encode_chat([{"role": "user", "content": "the fox"}])
    assert ids.count(1) == 1
    assert tokenizer.decode(ids, False).endswith("<|im_start|> assistant\n")


def test_training_truncation_and_padding_never_apply() -> None:
    section = tiny("byte_level").section
    trained = tokenizers.Tokenizer.from_str(section.tokenizer)
    trained.enable_truncation(2)
    trained.enable_padding(length=9)
    tokenizer = Tokenizer(msgspec.structs.replace(section, tokenizer=trained.to_str()))
    assert tokenizer.encode("the quick brown fox") == tiny("byte_level").encode("the quick brown fox")


SECTION = TokenizerSection(source="test", tokenizer="{}", vocab_size=3, special_tokens={"b": "2", "a": "1"})


def test_section_bytes_are_stable() -> None:
    other = msgspec.structs.replace(SECTION, special_tokens={"a": "1", "b": "2"})
    assert pack_tokenizer(SECTION) == pack_tokenizer(other)
    assert unpack(pack_tokenizer(SECTION)) == SECTION


def test_damaged_sections() -> None:
    data = pack_tokenizer(tiny("byte_level").section)
    for bad in (b"", data[:-1], data[: len(data) // 2], b"\xc1" + data, data + b"x"):
        with pytest.raises(EngineFormatError, match="section 'tokenizer'"):
            unpack(bad)
    with pytest.raises(EngineFormatError, match="schema 99"):
        unpack(pack_tokenizer(msgspec.structs.replace(SECTION, schema=99)))
    with pytest.raises(TokenizerError, match="cannot read the engine's tokenizer"):
        Tokenizer(SECTION)


def test_a_panic_in_the_library_is_an_error() -> None:
    section = tiny("llama2").section
    made = tokenizers.Tokenizer.from_str(section.tokenizer)
    made.decoder = tokenizers.decoders.Strip("e", 1, 1)
    tokenizer = Tokenizer(msgspec.structs.replace(section, tokenizer=made.to_str()))
    with pytest.raises(TokenizerError, match="panicked"):
        tokenizer.decode([made.token_to_id("e") or 0])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 20), st.integers(1, 255))
def test_flipped_bytes_never_crash(position: int, flip: int) -> None:
    data = bytearray(pack_tokenizer(SECTION))
    data[position % len(data)] ^= flip
    try:
        unpack(bytes(data))
    except EngineFormatError:
        pass


def test_vectors_name_the_culprit() -> None:
    section = msgspec.structs.replace(tiny("byte_level").section, chat_templates={"default": CHATML})
    fox = tuple(tiny("byte_level").encode("fox"))
    chat = '{"messages": [{"role": "user", "content": "fox"}]}'
    rendered = "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(tiny("byte_level").encode(rendered))

    def problems(**vectors: object) -> list[str]:
        return check_vectors(pack_tokenizer(msgspec.structs.replace(section, vectors=Vectors(**vectors))))  # type: ignore[arg-type]

    assert problems(texts=(TextVector("fox", fox, fox, "fox", "fox"),), ids=(IdVector(fox, "fox", "fox"),)) == []
    assert problems(chats=(ChatVector(chat, rendered, ids),)) == []
    (wrong,) = problems(texts=(TextVector("fox", (*fox, 7), fox, "fox", "fox"),))[:1]
    assert "text 'fox', encoded" in wrong
    assert "7" in wrong
    assert "decoded with" in problems(ids=(IdVector(fox, "fix", "fox"),))[0]
    assert "rendered" in problems(chats=(ChatVector(chat, rendered + "x", ids),))[0]
    assert "a refusal" in problems(chats=(ChatVector(chat, None),))[0]
    assert "encoded" in problems(chats=(ChatVector(chat, rendered, ids[1:]),))[0]
