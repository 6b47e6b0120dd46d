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
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .limits import (
    CONTAINERS,
    MAX_RANGE,
    TemplateLimitError,
    before,
    before_format,
    check_product,
    current,
    small_power,
    text_of,
)

# Random or slow filters that no chat template needs.
_REMOVED_FILTERS = ("random", "urlize", "xmlattr", "pprint", "striptags", "wordwrap")
_REMOVED_METHODS = frozenset({"translate", "maketrans", "expandtabs"})


class _Counted:
    """The iterable of a ``for`` loop, one step a turn. ``cost``: characters of plain text in the loop's body."""

    def __init__(self, inner: Any, cost: int) -> None:
        self._inner, self._cost = inner, cost

    def __iter__(self) -> Iterator[Any]:
        budget = current()
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


def _fenced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # such a filter gets the context or environment first

    @wraps(function)
    def fenced(*args: Any, **kwargs: Any) -> Any:
        subject, *rest = args[first:]
        if name == "join" and not hasattr(subject, "__len__"):
            subject = list(subject)
        before(name, subject, *rest, *kwargs.values())
        args = (*args[:first], subject, *rest)
        return current().made(function(*args, **kwargs))

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
            before_format(current(), pattern, "{", [*args, *kwargs.values()])
            return formatter(*args, **kwargs)

        return fenced

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current()
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, (str, bytes)):
            name = __obj.__name__
            if name == "join" and args:
                items = args[0] if hasattr(args[0], "__len__") else list(args[0])
                args = (items, *args[1:])
                before(name, items, subject)
            else:
                before(name, subject, *args, *kwargs.values())
        else:
            budget.step()
        result = super().call(__context, __obj, *args, **kwargs)
        # A fence counts what it makes by itself.
        return result if subject is __self else budget.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        if operator == "**" and not small_power(left, right):
            raise TemplateLimitError("a power that is too large")
        if operator == "*":
            check_product(budget, left, right)
        if operator == "%" and isinstance(left, (str, bytes)):
            before_format(budget, text_of(left), "%", right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.text(len(left) + len(right))  # before it is made
            return left + right
        return budget.made(super().call_binop(context, operator, left, right))

    def fence_loop(self, inner: Any, cost: int) -> _Counted:
        """The iterable of a ``for``."""
        return _Counted(inner, cost)

    def fence_concat(self, *parts: Any) -> str:
        """``a ~ b``."""
        budget = current()
        for part in parts:
            budget.check(part)
        return str(budget.made("".join([str(part) for part in parts])))

    def fence_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        return current().made(value[start:stop:step])

    def fence_made(self, value: Any) -> Any:
        """A list, tuple or dict written in the template."""
        return current().made(value)

    def fence_output(self, value: Any) -> Any:
        """``{{ value }}``."""
        budget = current()
        if isinstance(value, str):
            budget.text(len(value))
        elif isinstance(value, CONTAINERS):
            budget.check(value)
            return budget.made(str(value))
        return value
