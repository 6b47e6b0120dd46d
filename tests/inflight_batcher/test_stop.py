"""Stop strings: earliest completion, list order, nothing leaks, whatever pieces the text comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.inflight_batcher import SamplingParams
from pelton.inflight_batcher.output import SequenceValues
from pelton.inflight_batcher.stop import StopStrings

from .helpers import EOS, ByteDetokenizer


def feed(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """(text shown, stop string that matched, what was shown after each piece)."""
    watcher, shown, history = StopStrings(stops, include), "", []
    for piece in pieces:
        scan = watcher.push(piece, may_stop=True)
        shown += scan.text
        history.append(shown)
        if scan.matched is not None:
            return shown, scan.matched, history
    return shown + watcher.flush(), None, history


def by_definition(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The first end of any stop string in the text, ties to the first of the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abcd", max_size=5), max_size=12),
    include=st.booleans(),
)
def test_like_the_definition(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, matched, history = feed(stops, pieces, include)
    assert (shown, matched) == by_definition(stops, "".join(pieces), include)
    assert all(shown.startswith(text) for text in history)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["bc", "abc"], "xabc", ("xa", "bc")),  # both end here: list order
        (["abc", "bc"], "xabc", ("x", "abc")),
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # ends first
        (["\n\n"], "a\nb\n\nc", ("a\nb", "\n\n")),
        (["é"], "caféx", ("caf", "é")),
    ],
)
def test_which_one_wins(stops: list[str], text: str, expected: tuple[str, str]) -> None:
    assert feed(stops, [text])[:2] == expected
    assert feed(stops, list(text))[:2] == expected


def test_what_completed_while_stops_did_not_count_stays_text() -> None:
    watcher = StopStrings(["ab", "xabc"], include_match=False)
    assert watcher.push("xab", may_stop=False).text == ""  # may yet become xabc
    scan = watcher.push("z", may_stop=True)
    assert (scan.text, scan.matched) == ("xabz", None)


def values(**params: object) -> SequenceValues:
    return SequenceValues(SamplingParams(max_tokens=50, **params), frozenset([EOS]), ByteDetokenizer())  # type: ignore[arg-type]


def push_all(seq: SequenceValues, data: bytes) -> None:
    for i, byte in enumerate(data):
        seq.append(byte, last=i == len(data) - 1)
        if seq.finish_reason is not None:
            return


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_in_the_output_only_when_asked(include: bool) -> None:
    seq = values(stop="END", include_stop_str_in_output=include)
    push_all(seq, b"the END of")
    assert (seq.text, seq.finish_reason, seq.stop_reason) == ("the END" if include else "the ", "stop", "END")
    assert bytes(seq.token_ids) == b"the END"


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token_only_when_asked(include: bool) -> None:
    seq = values(stop_token_ids=[ord("!")], include_stop_str_in_output=include)
    push_all(seq, b"hi! you")
    assert (seq.text, seq.finish_reason, seq.stop_reason) == ("hi!" if include else "hi", "stop", ord("!"))


def test_end_of_sequence_releases_what_was_held() -> None:
    seq = values(stop="wait")
    push_all(seq, b"wai")
    assert (seq.text, seq.finish_reason) == ("wai", "length")
    seq = values(stop="wait")
    for token in [*b"wai", EOS]:
        seq.append(token, last=False)
    assert (seq.text, seq.finish_reason, seq.stop_reason) == ("wai", "stop", None)


def test_a_stop_string_that_completes_in_the_last_flush() -> None:
    seq = values(stop="\ufffd")
    push_all(seq, "aé".encode()[:-1])  # a character cut short by the length limit
    assert (seq.text, seq.finish_reason, seq.stop_reason) == ("a", "stop", "\ufffd")


def test_both_stop_id_and_string() -> None:
    seq = values(stop="ab", stop_token_ids=[ord("b")])
    push_all(seq, b"xab")
    assert (seq.text, seq.stop_reason) == ("xa", ord("b"))


def test_abort_keeps_the_text_that_is_certain() -> None:
    seq = values(stop="abc")
    push_all(seq, b"xyab")
    seq = values(stop="abc")
    for token in b"xyab":
        seq.append(token, last=False)
    assert seq.finish("abort") == "ab"
    assert (seq.text, seq.finish_reason) == ("xyab", "abort")


@given(text=st.text(max_size=20), stop=st.text(min_size=1, max_size=2), skip=st.booleans())
def test_utf8_text_byte_by_byte(text: str, stop: str, skip: bool) -> None:
    seq = values(stop=stop, skip_special_tokens=skip)
    data = text.encode(errors="ignore")
    shown = ""
    for i, byte in enumerate(data):
        shown += seq.append(byte, last=i == len(data) - 1)
        if seq.finish_reason is not None:
            break
    assert shown == seq.text
    if data:
        assert seq.text == by_definition([stop], data.decode(), False)[0]
