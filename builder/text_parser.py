"""Parse the textual form of a Graph (see text.py). Raises GraphError with the line number, and nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from ..runtime.errors import GraphError
from ..runtime.format.dtypes import DType
from ..runtime.format.plan import KVGroup, StateSpec
from ..runtime.format.tensor_type import LAYOUTS, SYMBOLS, Dim, TensorType
from ..runtime.format.weight_expr import (
    AddScalar,
    CastTo,
    Interleave,
    Pack,
    Permute,
    Reshaped,
    Source,
    Stack,
    WeightExpr,
)
from .graph import Graph, Node, Value
from .ops import OPS, op_from_attributes

T = TypeVar("T")
_MAX_DEPTH = 50  # nesting of weight expressions; the deepest real one is below 10
_MAX_DIM = 1 << 40
_TOKEN = re.compile(r'\s*(%?"(?:[^"\\]|\\.)*"|%?[A-Za-z0-9_.+\-]+|[()\[\]{}:,=@])')


def parse_graph(text: str) -> Graph:
    """The graph that ``print_graph`` printed. It is not verified; see verifier.verify."""
    graph = Graph()
    values: dict[str, Value] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            _Line(line, graph, values).statement()
        except GraphError as error:
            raise GraphError(f"line {number}: {error}") from None
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
            raise GraphError(f"line {number}: {error} in {line.strip()[:120]!r}") from None
    if not graph.inputs:
        raise GraphError(f"line {text.count(chr(10)) + 1}: the text ends without any input statement")
    return graph


class _Line:
    """A scanner over one line."""

    def __init__(self, line: str, graph: Graph, values: dict[str, Value]) -> None:
        self.line = line
        self.at = 0
        self.graph = graph
        self.values = values

    def fail(self, expected: str) -> NoReturn:
        raise GraphError(f"expected {expected} at column {self.at + 1}, found {self.line[self.at : self.at + 30]!r}")

    def peek(self) -> str:
        found = _TOKEN.match(self.line, self.at)
        return found.group(1) if found else ""

    def take(self, expected: str | None = None) -> str:
        """The next token; it must be ``expected`` if that is given."""
        found = _TOKEN.match(self.line, self.at)
        if found is None or (expected is not None and found.group(1) != expected):
            self.fail(repr(expected) if expected is not None else "a word")
        self.at = found.end()
        return found.group(1)

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.take()
            return True
        return False

    def end(self) -> None:
        if self.line[self.at :].strip():
            self.fail("the end of the line")

    def statement(self) -> None:
        parsers: dict[str, Callable[[], None]] = {
            "kv_group": self.kv_group,
            "state": self.state,
            "input": self.input,
            "weight": self.weight,
            "constant": self.constant,
            "output": self.output,
            "names": self.names,
        }
        parser = parsers.get(self.peek())
        if parser is not None:
            self.take()
            parser()
        else:
            self.node()
        self.end()

    # statements

    def kv_group(self) -> None:
        name = self.word()
        self.take("window")
        window = None if self.accept("null") else self.integer()
        self.graph.kv_groups.append(KVGroup(name=name, window=window))

    def state(self) -> None:
        fields: dict[str, Any] = {"name": self.word(), "kind": self.take(), "dtype": self.take(), "shape": self.ints()}
        self.take("group")
        fields["group"] = self.integer()
        self.take("layout")
        fields["layout"] = self.take()
        self.graph.states.append(msgspec.convert(fields, StateSpec))

    def input(self) -> None:
        name, type_ = self.declaration()
        self.define(self.graph.add_input(name, type_))

    def weight(self) -> None:
        name, type_ = self.declaration()
        self.take("=")
        self.define(self.graph.add_weight(name, type_, self.expr(0)))

    def constant(self) -> None:
        name, type_ = self.declaration()
        self.take("=")
        shape = type_.max_shape({})
        count = int(np.prod(shape, dtype=object)) if shape else 1
        dtype = type_.dtype.numpy
        if self.accept("base64"):
            raw = base64.b64decode(self.string(), validate=True)
            if len(raw) != count * dtype.itemsize:
                raise GraphError(f"constant %{name} needs {count * dtype.itemsize} bytes, got {len(raw)}")
            data = np.frombuffer(raw, dtype).reshape(shape).copy()
        else:
            numbers: list[Any] = self.json(list)
            if len(numbers) != count or not all(isinstance(x, int | float) for x in numbers):
                raise GraphError(f"constant %{name} needs {count} numbers, got {len(numbers)}")
            data = np.array(numbers, dtype=np.float64 if type_.dtype.is_float else None).astype(dtype).reshape(shape)
        value = Value(name, type_, "constant")
        self.graph.constants[value] = data
        self.define(value)

    def output(self) -> None:
        self.graph.outputs.append(self.value())

    def names(self) -> None:
        self.graph._next = self.integer()

    def node(self) -> None:
        declared = [self.declaration()]
        while self.accept(","):
            declared.append(self.declaration())
        self.take("=")
        name = self.take()
        if name not in OPS:
            raise GraphError(f"unknown op {name!r}; known: {', '.join(sorted(OPS))}")
        self.take("(")
        inputs = self.items(self.value, ")")
        attributes: dict[str, Any] = self.json(dict) if self.peek() == "{" else {}
        origin = self.string() if self.accept("from") else ""
        node = Node(op_from_attributes(name, attributes), inputs, [], origin)
        for output, type_ in declared:
            node.outputs.append(self.define(Value(output, type_, "node", node)))
        self.graph.nodes.append(node)

    # pieces

    def define(self, value: Value) -> Value:
        if value.name in self.values:
            raise GraphError(f"%{value.name} is defined twice")
        self.values[value.name] = value
        return value

    def word(self) -> str:
        token = self.take()
        return str(json.loads(token)) if token.startswith('"') else token

    def string(self) -> str:
        token = self.take()
        if not token.startswith('"'):
            self.fail("a string")
        return str(json.loads(token))

    def name(self) -> str:
        token = self.take()
        if not token.startswith("%") or len(token) < 2:
            self.fail("a value name (%...)")
        return str(json.loads(token[1:])) if token[1] == '"' else token[1:]

    def value(self) -> Value:
        name = self.name()
        if name not in self.values:
            raise GraphError(f"%{name} is used before it is defined")
        return self.values[name]

    def declaration(self) -> tuple[str, TensorType]:
        name = self.name()
        self.take(":")
        return name, self.tensor_type()

    def tensor_type(self) -> TensorType:
        dtype = DType(self.take())
        self.take("[")
        shape = tuple(self.items(self.dim, "]"))
        layout = self.take() if self.accept("@") else "rows"
        if layout not in LAYOUTS:
            raise GraphError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
        return TensorType(dtype, shape, layout)

    def dim(self) -> Dim:
        token = self.take()
        if token in SYMBOLS:
            return token
        if not token.isdigit() or int(token) > _MAX_DIM:
            raise GraphError(f"{token[:30]!r} is not a dim")
        return int(token)

    def integer(self) -> int:
        token = self.take()
        if not re.fullmatch(r"-?[0-9]{1,18}", token):
            raise GraphError(f"{token[:30]!r} is not an integer")
        return int(token)

    def ints(self) -> tuple[int, ...]:
        self.take("[")
        return tuple(self.items(self.integer, "]"))

    def items(self, parse: Callable[[], T], close: str) -> list[T]:
        """Comma-separated items up to the closing bracket."""
        found: list[T] = []
        if self.accept(close):
            return found
        while True:
            found.append(parse())
            if self.accept(close):
                return found
            self.take(",")

    def json(self, kind: type) -> Any:
        """A JSON value of this type that starts here."""
        while self.line[self.at : self.at + 1].isspace():
            self.at += 1
        value, self.at = json.JSONDecoder().raw_decode(self.line, self.at)
        if not isinstance(value, kind):
            self.fail(f"a JSON {kind.__name__}")
        return value

    def expr(self, depth: int) -> WeightExpr:
        """A weight expression."""
        if depth > _MAX_DEPTH:
            raise GraphError("the weight expression is nested too deeply")
        kind = self.take()
        self.take("(")
        if kind == "source":
            name = self.string()
            self.take(",")
            type_ = self.tensor_type()
            made: WeightExpr = Source(name, type_.max_shape({}), type_.dtype)
            self.take(")")
            return made
        if kind == "concat":
            return Stack(tuple(self.items(lambda: self.expr(depth + 1), ")")))
        if kind == "interleave":
            rows = self.integer()
            self.take(",")
            return Interleave(tuple(self.items(lambda: self.expr(depth + 1), ")")), rows)
        if kind not in ("cast", "permute", "reshape", "add_scalar", "pack"):
            raise GraphError(f"unknown weight expression {kind!r}")
        x = self.expr(depth + 1)
        self.take(",")
        if kind == "cast":
            made = CastTo(x, DType(self.take()))
        elif kind == "permute":
            made = Permute(x, self.ints())
        elif kind == "reshape":
            made = Reshaped(x, self.ints())
        elif kind == "add_scalar":
            made = AddScalar(x, float(self.take()))
        else:
            made = Pack(x, self.take())
        self.take(")")
        return made
