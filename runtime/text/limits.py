"""What rendering a chat template may use, counted while it runs and computed before an operation makes too much."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, KeysView, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

MAX_RANGE = 100_000  # turns of one range()
MAX_WIDTH = 100_000  # of center(), indent() and the like; turns of a repetition
MAX_INT_BITS = 4096  # of a power or product

_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "indent", "batch", "slice", "truncate", "round"})


class TemplateLimitError(TemplateRuntimeError):
    """A template went over one of the limits."""


@dataclass(frozen=True)
class Limits:
    """What one rendering may use, apart from an allowance for the size of its input."""

    steps: int = 1_000_000
    chars: int = 16_000_000
    elements: int = 1_000_000
    seconds: float = 5.0


class Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: Limits, given: Any = None) -> None:
        """``given``: what the caller passes to the template; the limits grow by 16 times its size."""
        chars, elements = _unfolded(given, 1 << 60, 1 << 60)
        self._steps = limits.steps + 16 * elements
        self._chars = self._max_chars = limits.chars + 16 * chars
        self._elements = self._max_elements = limits.elements + 16 * elements
        self._seconds = limits.seconds
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        """Counts one loop turn or call."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimitError("the template takes too many steps (loop turns and calls)")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template runs longer than {self._seconds:g} s")

    def text(self, chars: int) -> None:
        """Counts text that was or will be made."""
        self._chars -= chars
        if self._chars < 0:
            raise TemplateLimitError("the template makes too much text")

    def check(self, value: Any) -> None:
        """Refuses a value that would unfold to too much (``[x, x]`` of ``[y, y]`` of ... doubles at each level)."""
        if isinstance(value, CONTAINERS):
            chars, elements = _unfolded(value, self._max_chars, self._max_elements)
            if chars > self._max_chars or elements > self._max_elements:
                raise TemplateLimitError("the template builds too large a value")

    def fits(self, elements: int) -> None:
        """Refuses a list of more elements than are left."""
        if elements > self._elements:
            raise TemplateLimitError("the template builds too many values")

    def unfolded_chars(self, value: Any) -> int:
        """Characters of a value written out in full, at most one over the limit."""
        return min(_unfolded(value, self._max_chars, self._max_elements)[0], self._max_chars + 1)

    def made(self, value: Any) -> Any:
        """Counts a value that an operation has made; returns it."""
        if isinstance(value, (str, bytes)):
            self.text(len(value))
        elif isinstance(value, CONTAINERS):
            self.fits(len(value))
            self._elements -= len(value)
            self.check(value)
        return value


CONTAINERS = (list, tuple, dict, Set, KeysView, ValuesView)  # an ItemsView is a Set
_budget: ContextVar[Budget] = ContextVar("budget")


def current() -> Budget:
    """The budget of the rendering at hand; while a template compiles, a fresh small one for each constant."""
    return _budget.get(None) or Budget(Limits(steps=1000, chars=100_000, elements=10_000, seconds=1.0))


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Renders under ``budget``."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def _unfolded(value: Any, max_chars: int, max_elements: int) -> tuple[int, int]:
    """Characters and elements of a value written out in full; stops counting once over a limit."""
    chars = elements = 0
    stack = [value]
    while stack and chars <= max_chars and elements <= max_elements:
        item = stack.pop()
        elements += 1
        if isinstance(item, (str, bytes)):
            chars += len(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, Set, KeysView, ValuesView)):
            stack.extend(item)
    return chars, elements


_PERCENT_FIELD = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*?([0-9]{4}|\*)")
_BRACE_FIELD = re.compile(r"\{[^{}]*:[^{}]*([0-9]{4}|\{)")


def before_format(budget: Budget, pattern: str, sign: str, values: Any) -> None:
    """``'%9999999d' % 1`` and ``'{:9999999}'.format(1)`` would make text out of nothing."""
    if (_PERCENT_FIELD if sign == "%" else _BRACE_FIELD).search(pattern):
        raise TemplateLimitError("a format with a width over 999, or a computed width")
    budget.check(values)
    budget.text(pattern.count(sign) * (999 + budget.unfolded_chars(values)))


def before(name: str, subject: Any, *rest: Any) -> None:
    """Refuses a filter or string method whose result would be too large."""
    budget = current()
    budget.step()
    for value in (subject, *rest):
        budget.check(value)
    numbers = [value for value in rest if isinstance(value, int)]
    strings = [value for value in rest if isinstance(value, (str, bytes))]
    longest = max(map(len, strings), default=0)
    text = text_of(subject)
    if name in _WIDTHS:
        if any(number > MAX_WIDTH for number in numbers):
            raise TemplateLimitError(f"{name}: a number over {MAX_WIDTH}")
        lines = len(text.splitlines()) + 1 if name == "indent" else 1
        budget.text(lines * max([longest, *numbers], default=0))
    elif name == "replace":
        budget.text(longest * max((text.count(text_of(old)) for old in strings), default=0))
    elif name == "join":
        budget.text(longest * (len(subject) if hasattr(subject, "__len__") else 0))
    elif name in ("split", "rsplit"):
        budget.fits(max((text.count(text_of(mark)) for mark in strings if mark), default=len(text) // 2))
    elif name == "format":
        before_format(budget, text, "%", rest)
    elif name == "sum" and any(isinstance(value, CONTAINERS) for value in rest):
        raise TemplateLimitError("sum: of numbers only")


def text_of(value: Any) -> str:
    """What a filter makes text of; bytes as Latin-1, which keeps their number; nothing of other kinds of value."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, (str, *CONTAINERS)) else ""


def small_power(left: Any, right: Any) -> bool:
    if not (isinstance(left, int) and isinstance(right, int)):
        return True  # a float overflows by itself
    return right < 0 or left.bit_length() * right <= MAX_INT_BITS


def check_product(budget: Budget, left: Any, right: Any) -> None:
    """``'x' * n``, ``[x] * n`` and products of huge integers."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise TemplateLimitError("a product that is too large")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, (str, bytes, list, tuple)):
            if times > MAX_WIDTH:
                raise TemplateLimitError(f"a sequence repeated more than {MAX_WIDTH} times")
            budget.text(len(sequence) * max(times, 0) if isinstance(sequence, (str, bytes)) else 0)
            budget.fits(len(sequence) * times if isinstance(sequence, (list, tuple)) else 0)
