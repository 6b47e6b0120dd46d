"""Where Python's objects lie, for fetching them before they are used."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

#: CPython 3.11 keeps up to this many bytes about an object in front of it (garbage collection, attributes).
_IN_FRONT = 32
_LINE = 64  # of the caches


def memory_of(objects: Iterable[object]) -> list[tuple[int, int]]:
    """(address, bytes) of each object, and of the code of each function, from a line's start on.

    What an object keeps elsewhere (a list's items, attributes) is not in it. Empty where ids are no addresses.
    """
    if sys.implementation.name != "cpython":
        return []
    return [_lines(part) for part in _parts(objects)]


def _lines(part: object) -> tuple[int, int]:
    whole = isinstance(part, CodeType | tuple | type)  # these keep all that they have in one place
    end = id(part) + (sys.getsizeof(part) if whole else type(part).__basicsize__)
    begin = (id(part) - _IN_FRONT) // _LINE * _LINE
    return begin, end - begin


def _parts(objects: Iterable[object]) -> Iterator[object]:
    for item in objects:
        yield item
        if isinstance(item, FunctionType):
            code = item.__code__
            yield from (code, code.co_consts, code.co_names)
