"""What a refusal looks like at the console."""

from __future__ import annotations

from collections.abc import Callable

#: ``run(*arguments, entry=...)``: (status, stdout, stderr) of a console script; the fixture is in conftest.py.
Run = Callable[..., tuple[int, str, str]]


def check_refused(result: tuple[int, str, str], *parts: str) -> None:
    """Status 2, nothing on stdout, an error on stderr that has these parts, no traceback."""
    status, out, err = result
    assert status == 2, err
    assert out == ""
    assert "error: " in err
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 4
    return bytes(changed)
