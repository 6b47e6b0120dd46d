"""Text piece by piece is the text at once, for any tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.errors import RequestError
from pelton.runtime.text import IncrementalDetokenizer, Tokenizer

from .tokenizers import KINDS, closed, real_model, tiny

MIXED = "Größe 東京 🙂👩‍👩‍👧 e\u0301 ሰማይ 𒀀 the  fox\n"


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> list[str]:
    """What each push gives, and the flush."""
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(index) for index in ids), stream.flush()]


def id_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of all kinds, with single bytes and special tokens more often than by chance, and some unknown."""
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    high = [i for i in single if tokenizer.token_bytes(i)[0] >= 0x80] or [0]
    each = st.one_of(
        st.integers(0, tokenizer.vocab_size + 3),
        st.sampled_from(single or [0]),
        st.sampled_from(high),
        st.sampled_from(sorted(tokenizer.special_ids) or [0]),
    )
    return st.lists(each, max_size=40)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole(kind: str) -> None:
    tokenizer = tiny(kind)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(ids=id_lists(tokenizer), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", ["word_piece", "word_level", "unigram"])
def test_pieces_are_the_whole_when_spaces_are_tidied(kind: str) -> None:
    tokenizer = tiny(kind, clean_up_spaces=True)
    marks = [
        i for i in range(tokenizer.vocab_size) if (tokenizer.id_to_token(i) or "")[-2:] in ("'", "n", "t", ".", "?")
    ]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(ids=st.lists(st.one_of(st.sampled_from(marks or [0]), st.integers(0, tokenizer.vocab_size)), max_size=30))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "unigram"])
def test_no_replacement_character_within_text(kind: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode(MIXED)
    parts = pieces(tokenizer, ids, True)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).strip(" ") == MIXED.strip(" ")


def test_text_comes_as_soon_as_it_is_final() -> None:
    tokenizer = tiny("byte_level")
    smile = tokenizer.encode("🙂")
    assert pieces(tokenizer, smile, True) == ["", "", "", "🙂", ""]
    assert pieces(tokenizer, smile[:-1], True) == ["", "", "", "\ufffd"]
    fallback = tiny("llama2")
    ids = [fallback.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "🙂".encode()]
    word = fallback.token_to_id("\u2581") or 0
    assert pieces(fallback, [*ids, word], True) == ["", "", "", "", "🙂 ", ""]
    assert pieces(fallback, [*ids, ids[0]], True) == [""] * 5 + ["\ufffd" * 5]  # one bad byte spoils its whole run


def test_special_tokens_inside_a_character() -> None:
    tokenizer = tiny("byte_level")
    first, *rest = tokenizer.encode("🙂")
    end = tokenizer.token_to_id("<|im_end|>") or 0
    assert "".join(pieces(tokenizer, [first, end, *rest], True)) == "🙂"
    assert "".join(pieces(tokenizer, [first, end, *rest], False)) == tokenizer.decode([first, end, *rest], False)


def test_the_first_space_goes_and_no_other() -> None:
    tokenizer = tiny("llama2")
    ids = tokenizer.encode("  the fox")
    assert (
        pieces(tokenizer, ids, True)[1] == "".join(pieces(tokenizer, ids, True))[: len(pieces(tokenizer, ids, True)[1])]
    )
    assert "".join(pieces(tokenizer, ids, True)) == "  the fox"


def test_a_push_never_decodes_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("byte_level", "llama2", "gemma", "unigram", "word_piece"):
        tokenizer = tiny(kind)
        ids = tokenizer.encode(MIXED) * 50
        whole = tokenizer.decode(ids)
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "decode", None)
            assert "".join(pieces(tokenizer, ids, True)) == whole


def test_a_flushed_detokenizer_is_new() -> None:
    tokenizer = tiny("llama2")
    ids = tokenizer.encode("the fox 🙂")
    stream = IncrementalDetokenizer(tokenizer)
    twice = ["".join([*(stream.push(i) for i in ids), stream.flush()]) for _ in range(2)]
    assert twice == ["the fox 🙂", "the fox 🙂"]


def test_impossible_ids() -> None:
    for bad in (-1, 1 << 40, 1.5, "x"):
        with pytest.raises(RequestError, match="token id"):
            IncrementalDetokenizer(tiny("byte_level")).push(bad)  # type: ignore[arg-type]


def test_real_tokenizer() -> None:
    tokenizer = Tokenizer.from_section(closed(real_model()))

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(ids=id_lists(tokenizer), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()
