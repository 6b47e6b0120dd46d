"""A Jinja environment for chat templates, which come with checkpoints and are therefore not trusted.

It renders what transformers renders, with three fences more than Jinja's own sandbox (no attribute that leads to Python
internals, nothing mutable can be changed, no file, no import):

* steps: every loop turn, call and filter counts, and there is a deadline;
* text: every character that the template makes counts, and what an operation is about to make is computed before;
* elements: every list item or dict entry that it makes counts, and no value may unfold to more than the limit.

Not bounded: one operation on data that is within the limits (a sort, a comparison: milliseconds), and what the caller
itself passes in; limits grow with the size of that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, KeysView, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_RANGE = 100_000  # turns of one range()
MAX_WIDTH = 100_000  # of center(), indent() and the like; turns of a repetition
MAX_INT_BITS = 4096

# Random or slow filters that no chat template needs.
_REMOVED_FILTERS = ("random", "urlize", "xmlattr", "pprint", "striptags", "wordwrap")
_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "indent", "batch", "slice", "truncate", "round"})
_REMOVED_METHODS = frozenset({"translate", "maketrans", "expandtabs"})


class TemplateLimitError(TemplateRuntimeError):
    """A template went over one of the limits."""


@dataclass(frozen=True)
class Limits:
    """What one rendering may use, apart from an allowance for the size of its input."""

    steps: int = 1_000_000
    chars: int = 16_000_000
    elements: int = 1_000_000
    seconds: float = 10.0


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
        if isinstance(value, _CONTAINERS):
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
        elif isinstance(value, _CONTAINERS):
            self.fits(len(value))
            self._elements -= len(value)
            self.check(value)
        return value


_CONTAINERS = (list, tuple, dict, Set, KeysView, ValuesView)  # an ItemsView is a Set
_budget: ContextVar[Budget] = ContextVar("budget")


def _current() -> Budget:
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


class _Counted:
    """The iterable of a ``for`` loop, one step a turn. ``cost``: characters of plain text in the loop's body."""

    def __init__(self, inner: Any, cost: int) -> None:
        self._inner, self._cost = inner, cost

    def __iter__(self) -> Iterator[Any]:
        budget = _current()
        for item in self._inner:
            budget.step()
            budget.text(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._inner)


class _Fences(NodeTransformer):
    """Rewrites a template so that what Jinja's sandbox does not intercept goes through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        if isinstance(node.iter, nodes.Expr):
            node.iter = _call(node.iter, "fence_loop", [node.iter, nodes.Const(cost)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(node, "fence_concat", list(node.nodes))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        arguments = [node.node, *(part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step))]
        return _call(node, "fence_slice", [part for part in arguments if isinstance(part, nodes.Expr)])

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._made(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.generic_visit(node) if node.ctx != "load" else self._made(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._made(node, [pair.value for pair in node.items])

    def _made(self, node: nodes.Expr, items: Iterable[nodes.Node]) -> nodes.Node:
        constant = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if constant else _call(node, "fence_made", [node])


def _call(at: nodes.Node, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(at.lineno)
    return call


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training: its body is rendered, in its own scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """``namespace()`` without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self, so that a template may use that name
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # never its contents, which may hold itself many times


def _public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


class _DictMaker:
    """``dict(...)`` and ``dict.fromkeys``, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _range(*args: int) -> range:
    turns = range(*args)
    if len(turns) > MAX_RANGE:
        raise TemplateLimitError(f"range() of {len(turns)} turns; {MAX_RANGE} is the most")
    return turns


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own ``tojson`` it does not escape for HTML."""
    if isinstance(indent, int) and indent > 100:
        raise TemplateLimitError("tojson: an indent over 100")
    if any(len(text) > 100 for text in (indent, *(separators or ())) if isinstance(text, str)):
        raise TemplateLimitError("tojson: an indent or separator of more than 100 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


class TemplateRefusal(jinja2.TemplateError):
    """``raise_exception``: the template refuses the conversation."""


_PERCENT_FIELD = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*?([0-9]{4}|\*)")
_BRACE_FIELD = re.compile(r"\{[^{}]*:[^{}]*([0-9]{4}|\{)")


def _before_format(budget: Budget, pattern: str, sign: str, values: Any) -> None:
    """``'%9999999d' % 1`` and ``'{:9999999}'.format(1)`` would make text out of nothing."""
    if (_PERCENT_FIELD if sign == "%" else _BRACE_FIELD).search(pattern):
        raise TemplateLimitError("a format with a width over 999, or a computed width")
    budget.check(values)
    budget.text(pattern.count(sign) * (999 + budget.unfolded_chars(values)))


def _before(name: str, subject: Any, *rest: Any) -> None:
    """Refuses a filter or string method whose result would be too large."""
    budget = _current()
    budget.step()
    for value in (subject, *rest):
        budget.check(value)
    numbers = [value for value in rest if isinstance(value, int)]
    strings = [value for value in rest if isinstance(value, (str, bytes))]
    longest = max(map(len, strings), default=0)
    text = _text_of(subject)
    if name in _WIDTHS:
        if any(number > MAX_WIDTH for number in numbers):
            raise TemplateLimitError(f"{name}: a number over {MAX_WIDTH}")
        lines = len(text.splitlines()) + 1 if name == "indent" else 1
        budget.text(lines * max([longest, *numbers], default=0))
    elif name == "replace":
        budget.text(longest * max((text.count(_text_of(old)) for old in strings), default=0))
    elif name == "join":
        budget.text(longest * (len(subject) if hasattr(subject, "__len__") else 0))
    elif name in ("split", "rsplit"):
        budget.fits(max((text.count(_text_of(mark)) for mark in strings if mark), default=len(text) // 2))
    elif name == "format":
        _before_format(budget, text, "%", rest)
    elif name == "sum" and any(isinstance(value, _CONTAINERS) for value in rest):
        raise TemplateLimitError("sum: of numbers only")


def _text_of(value: Any) -> str:
    """What a filter makes text of; bytes as Latin-1, which keeps their number; nothing of other kinds of value."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value) if isinstance(value, (str, *_CONTAINERS)) else ""


def _fenced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # such a filter gets the context or environment first

    @wraps(function)
    def fenced(*args: Any, **kwargs: Any) -> Any:
        subject, *rest = args[first:]
        if name == "join" and not hasattr(subject, "__len__"):
            subject = list(subject)
        _before(name, subject, *rest, *kwargs.values())
        args = (*args[:first], subject, *rest)
        return _current().made(function(*args, **kwargs))

    return fenced


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """See the module's description."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[str], str]) -> None:
        """``now``: formats the present time by a ``strftime`` pattern."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self.fence_output,
            optimized=False,
            cache_size=0,
        )
        self.filters["tojson"] = _to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _fenced_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=now,
            range=_range,
            dict=_DictMaker(),
            namespace=_TemplateNamespace,
        )

    def fenced(self, source: str) -> jinja2.Template:
        """Compiles a template behind the fences."""
        tree = self.parse(source)
        _Fences().visit(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None
        pattern = str(value.__self__)

        def fenced(*args: Any, **kwargs: Any) -> str:
            _before_format(_current(), pattern, "{", [*args, *kwargs.values()])
            return formatter(*args, **kwargs)

        return fenced

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current()
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, (str, bytes)):
            name = __obj.__name__
            if name == "join" and args:
                items = args[0] if hasattr(args[0], "__len__") else list(args[0])
                args = (items, *args[1:])
                _before(name, items, subject)
            else:
                _before(name, subject, *args, *kwargs.values())
        else:
            budget.step()
        result = super().call(__context, __obj, *args, **kwargs)
        # A fence counts what it makes by itself.
        return result if subject is __self else budget.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _current()
        if operator == "**" and not _small_power(left, right):
            raise TemplateLimitError("a power that is too large")
        if operator == "*":
            _check_product(budget, left, right)
        if operator == "%" and isinstance(left, (str, bytes)):
            _before_format(budget, _text_of(left), "%", right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.text(len(left) + len(right))  # before it is made
            return left + right
        return budget.made(super().call_binop(context, operator, left, right))

    def fence_loop(self, inner: Any, cost: int) -> _Counted:
        """The iterable of a ``for``."""
        return _Counted(inner, cost)

    def fence_concat(self, *parts: Any) -> str:
        """``a ~ b``."""
        budget = _current()
        for part in parts:
            budget.check(part)
        return str(budget.made("".join([str(part) for part in parts])))

    def fence_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        return _current().made(value[start:stop:step])

    def fence_made(self, value: Any) -> Any:
        """A list, tuple or dict written in the template."""
        return _current().made(value)

    def fence_output(self, value: Any) -> Any:
        """``{{ value }}``."""
        budget = _current()
        if isinstance(value, str):
            budget.text(len(value))
        elif isinstance(value, _CONTAINERS):
            budget.check(value)
            return budget.made(str(value))
        return value


def _small_power(left: Any, right: Any) -> bool:
    if not (isinstance(left, int) and isinstance(right, int)):
        return True  # a float overflows by itself
    return right < 0 or left.bit_length() * right <= MAX_INT_BITS


def _check_product(budget: Budget, left: Any, right: Any) -> None:
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
