"""Keywords that nobody knows: refused by name, with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import PeltonError


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str], error: type[PeltonError]) -> None:
    """Raise ``error`` for the first of ``given`` that is not among ``known``. ``what``: whose keywords they are."""
    allowed = list(known)
    for name in given:
        if name not in allowed:
            raise error(f"{what} has no {name!r}; {_remedy(name, allowed)}")


def _remedy(name: str, allowed: list[str]) -> str:
    from difflib import get_close_matches  # only needed where something is wrong

    near = get_close_matches(name, allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(allowed)}"
