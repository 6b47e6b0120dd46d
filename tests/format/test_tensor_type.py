"""The text of a type, as plans and dumps have it."""

from __future__ import annotations

import pytest

from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.tensor_type import parse_type


@pytest.mark.parametrize(
    "text", ["f32[T,64]", "bf16[16,8]@panel16", "bf16[33,24]@packed12", "token[]", "i32[]", "u8[C,R,S]"]
)
def test_types_round_trip(text: str) -> None:
    assert str(parse_type(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("f33[T]", "f32", "f32[t]", "f32[-1]", "f32[2]@tiles", "f32[2] x", "", "f32[9" + "9" * 40),
        *("f32[1]@", "f32[2]@panel16", "f32[2,]", "f32[,]", "f32[ 2]", "f32[01]", "f32[X]", "f32[[2]]"),
        *("bf16[T,8]@packed12", "bf16[8,T]@packed12", "f32[8,8]@packed12", "bf16[8,8,8]@packed12"),
        *("f32[\u0662]", "f32[" + "9" * 9999 + "]"),
    ],
)
def test_bad_types(text: str) -> None:
    with pytest.raises(EngineFormatError, match="is not a type"):
        parse_type(text)
