"""Stop strings in streamed text: find the first to complete, and never show the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """``text`` may be shown; ``matched`` is the stop string that completed, or None."""

    text: str
    matched: str | None = None


class StopStrings:
    """Watches text for stop strings as it grows.

    The stop string that completes at the earliest character wins; of those that complete there, the first in the
    list. Text that could be the beginning of one is held back until it is clear that it is not. The work per call
    depends on the new text and the stop strings, not on how much text came before.
    """

    def __init__(self, stops: Sequence[str], include_match: bool) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match
        self._held = ""  # the longest end of the text so far that begins a stop string

    def push(self, text: str, may_stop: bool) -> StopScan:
        """Take more text. With ``may_stop`` false, stop strings that complete in it are ordinary text."""
        buffer = self._held + text
        match = self._first_match(buffer) if may_stop else None
        if match is not None:
            end, stop = match
            self._held = ""
            return StopScan(buffer[: end if self._include_match else end - len(stop)], stop)
        shown = len(buffer) - self._partial(buffer)
        self._held = buffer[shown:]
        return StopScan(buffer[:shown])

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """(end, stop) of the earliest completion that lies in the new text."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best

    def _partial(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
