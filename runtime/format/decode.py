"""Reading the JSON of an engine file: whatever is wrong with it is one kind of error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import EngineFormatError

T = TypeVar("T")


def decoded(what: str, data: bytes | memoryview | str, kind: type[T]) -> T:
    """JSON as a value of this type. Raises EngineFormatError that ``what`` is damaged, naming the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise EngineFormatError(f"{what} is damaged: {error}") from error
