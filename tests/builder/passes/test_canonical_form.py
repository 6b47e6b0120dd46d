"""canonicalise, fold_constants, squeeze_batch, sink_transposes, common_nodes."""

from __future__ import annotations

import pytest

from pelton.builder.passes import canonicalise, common_nodes, fold_constants, sink_transposes, squeeze_batch
from tests.builder.passes.rewrites import check, unchanged

X = """
weight %emb: f32[40,8] = source("emb", f32[40,8])
%x: f32[T,8] = embedding(%token_ids, %emb) {"dtype": "f32", "scale": 1.0}
"""

CANONICAL = {
    "reshape of reshape": (
        """%a: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
           %b: f32[1,T,8] = reshape(%a) {"shape": [1, "T", 8]}
           output %b""",
        """%b: f32[1,T,8] = reshape(%x) {"shape": [1, "T", 8]}
           output %b""",
    ),
    "there and back": (
        """%a: f32[1,T,8] = reshape(%x) {"shape": [1, "T", 8]}
           %b: f32[T,8] = reshape(%a) {"shape": ["T", 8]}
           output %b""",
        "output %x",
    ),
    "transpositions cancel": (
        """%a: f32[8,T] = transpose(%x) {"axes": [1, 0]}
           %b: f32[T,8] = transpose(%a) {"axes": [1, 0]}
           output %b""",
        "output %x",
    ),
    "transposition of a unit dim is a view": (
        """%a: f32[T,1,8] = reshape(%x) {"shape": ["T", 1, 8]}
           %b: f32[1,T,8] = transpose(%a) {"axes": [1, 0, 2]}
           output %b""",
        """%b: f32[1,T,8] = reshape(%x) {"shape": [1, "T", 8]}
           output %b""",
    ),
    "cast to the same type": (
        """%a: f32[T,8] = cast(%x) {"dtype": "f32"}
           output %a""",
        "output %x",
    ),
    "cast through a wider type": (
        """%a: i64[T] = cast(%positions) {"dtype": "i64"}
           %b: f32[T] = cast(%a) {"dtype": "f32"}
           output %b""",
        """%b: f32[T] = cast(%positions) {"dtype": "f32"}
           output %b""",
    ),
    "powers have names": (
        """constant %two: f32[] = [2.0]
           %a: f32[T,8] = binary(%x, %two) {"kind": "pow"}
           %b: f32[T,8] = binary(%x, %x) {"kind": "mul"}
           %c: f32[T,8] = binary(%a, %b) {"kind": "add"}
           output %c""",
        """%a: f32[T,8] = unary(%x) {"kind": "square"}
           %b: f32[T,8] = unary(%x) {"kind": "square"}
           %c: f32[T,8] = binary(%a, %b) {"kind": "add"}
           output %c""",
    ),
    "x * sigmoid(x) is silu, times 1 is nothing": (
        """constant %one: f32[] = [1.0]
           %a: f32[T,8] = unary(%x) {"kind": "sigmoid"}
           %b: f32[T,8] = binary(%a, %x) {"kind": "mul"}
           %c: f32[T,8] = binary(%b, %one) {"kind": "mul"}
           output %c""",
        """%b: f32[T,8] = unary(%x) {"kind": "silu"}
           output %b""",
    ),
    "elementwise ops need no expand": (
        """weight %w: f32[8] = source("w", f32[8])
           %a: f32[T,8] = expand(%w) {"shape": ["T", 8]}
           %b: f32[T,8] = binary(%x, %a) {"kind": "mul"}
           output %b""",
        """weight %w: f32[8] = source("w", f32[8])
           %b: f32[T,8] = binary(%x, %w) {"kind": "mul"}
           output %b""",
    ),
    "slices compose and pick parts": (
        """%a: f32[T,6] = slice(%x) {"axis": 1, "start": 1, "stop": 7, "step": 1}
           %b: f32[T,2] = slice(%a) {"axis": 1, "start": 2, "stop": 4, "step": 1}
           %c: f32[T,8] = concat(%a, %b) {"axis": 1}
           %d: f32[T,2] = slice(%c) {"axis": 1, "start": 6, "stop": 8, "step": 1}
           output %d""",
        """%b: f32[T,2] = slice(%x) {"axis": 1, "start": 3, "stop": 5, "step": 1}
           output %b""",
    ),
    "an outer product by matmul, transposed": (
        """constant %f: f32[4,1] = [1.0, 0.5, 0.25, 2.0]
           %a: f32[T] = cast(%positions) {"dtype": "f32"}
           %b: f32[1,T] = reshape(%a) {"shape": [1, "T"]}
           %c: f32[4,T] = matmul(%f, %b)
           %d: f32[T,4] = transpose(%c) {"axes": [1, 0]}
           output %d""",
        """constant %f: f32[4,1] = [1.0, 0.5, 0.25, 2.0]
           %a: f32[T] = cast(%positions) {"dtype": "f32"}
           %v: f32[1,4] = reshape(%f) {"shape": [1, 4]}
           %b: f32[T,1] = reshape(%a) {"shape": ["T", 1]}
           %d: f32[T,4] = binary(%v, %b) {"kind": "mul"}
           output %d""",
    ),
}


@pytest.mark.parametrize("case", CANONICAL)
def test_canonicalise(case: str) -> None:
    before, expected = CANONICAL[case]
    check(canonicalise.apply, X + before, X + expected if "%x" in expected else expected, bound=0)


def test_canonicalise_keeps_what_rounds() -> None:
    unchanged(
        canonicalise.apply,
        X
        + """
        %a: bf16[T,8] = cast(%x) {"dtype": "bf16"}
        %b: f32[T,8] = cast(%a) {"dtype": "f32"}
        output %b""",
    )


FOLDED = {
    "arithmetic on constants": (
        """constant %a: f32[2] = [1.5, 2.0]
           constant %b: f32[] = [2.0]
           %c: f32[2] = binary(%a, %b) {"kind": "mul"}
           %p: f32[T] = cast(%positions) {"dtype": "f32"}
           %q: f32[T,1] = reshape(%p) {"shape": ["T", 1]}
           %d: f32[T,2] = binary(%q, %c) {"kind": "mul"}
           output %d""",
        """constant %c: f32[2] = [3.0, 4.0]
           %p: f32[T] = cast(%positions) {"dtype": "f32"}
           %q: f32[T,1] = reshape(%p) {"shape": ["T", 1]}
           %d: f32[T,2] = binary(%q, %c) {"kind": "mul"}
           output %d""",
    ),
    "gemma's 1 + w": (
        """weight %w: bf16[8] = source("w", bf16[8])
           constant %one: f32[] = [1.0]
           %a: f32[8] = cast(%w) {"dtype": "f32"}
           %b: f32[8] = binary(%one, %a) {"kind": "add"}
           %c: f32[T,8] = binary(%x, %b) {"kind": "mul"}
           output %c""",
        """weight %w: f32[8] = add_scalar(cast(source("w", bf16[8]), f32), 1.0)
           %c: f32[T,8] = binary(%x, %w) {"kind": "mul"}
           output %c""",
    ),
    "a matmul with a stored matrix is a linear": (
        """weight %w: f32[8,3] = source("w", f32[8,3])
           %c: f32[T,3] = matmul(%x, %w)
           output %c""",
        """weight %w: f32[3,8] = permute(source("w", f32[8,3]), [1,0])
           %c: f32[T,3] = linear(%x, %w) {"bias": false}
           output %c""",
    ),
}


@pytest.mark.parametrize("case", FOLDED)
def test_fold_constants(case: str) -> None:
    before, expected = FOLDED[case]
    check(fold_constants.apply, X + before, X + expected if "%x" in expected else expected)


def test_squeeze_batch() -> None:
    check(
        squeeze_batch.apply,
        """
        weight %emb: f32[40,8] = source("emb", f32[40,8])
        weight %w: f32[6,8] = source("w", f32[6,8])
        %i: i32[1,T] = reshape(%token_ids) {"shape": [1, "T"]}
        %x: f32[1,T,8] = embedding(%i, %emb) {"dtype": "f32", "scale": 1.0}
        %m: f32[1,T,1] = reduce(%x) {"kind": "mean", "axes": [2], "keepdims": true}
        %n: f32[1,T,8] = binary(%x, %m) {"kind": "sub"}
        %y: f32[1,T,6] = linear(%n, %w) {"bias": false}
        %h: f32[1,T,2,3] = reshape(%y) {"shape": [1, "T", 2, 3]}
        %t: f32[1,2,T,3] = transpose(%h) {"axes": [0, 2, 1, 3]}
        %s: f32[1,2,T,1] = slice(%t) {"axis": -1, "start": 1, "stop": 2, "step": 1}
        %o: f32[1,2,T,4] = concat(%s, %t) {"axis": 3}
        output %o""",
        """
        weight %emb: f32[40,8] = source("emb", f32[40,8])
        weight %w: f32[6,8] = source("w", f32[6,8])
        %x: f32[T,8] = embedding(%token_ids, %emb) {"dtype": "f32", "scale": 1.0}
        %m: f32[T,1] = reduce(%x) {"kind": "mean", "axes": [1], "keepdims": true}
        %n: f32[T,8] = binary(%x, %m) {"kind": "sub"}
        %y: f32[T,6] = linear(%n, %w) {"bias": false}
        %h: f32[T,2,3] = reshape(%y) {"shape": ["T", 2, 3]}
        %t: f32[2,T,3] = transpose(%h) {"axes": [1, 0, 2]}
        %s: f32[2,T,1] = slice(%t) {"axis": 2, "start": 1, "stop": 2, "step": 1}
        %o: f32[2,T,4] = concat(%s, %t) {"axis": 2}
        %p: f32[1,2,T,4] = reshape(%o) {"shape": [1, 2, "T", 4]}
        output %p""",
        bound=0,
    )


def test_sink_transposes() -> None:
    check(
        sink_transposes.apply,
        X
        + """
        %h: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
        %t: f32[2,T,4] = transpose(%h) {"axes": [1, 0, 2]}
        %p: f32[T] = cast(%positions) {"dtype": "f32"}
        %q: f32[1,T,1] = reshape(%p) {"shape": [1, "T", 1]}
        %m: f32[2,T,4] = binary(%t, %q) {"kind": "mul"}
        %s: f32[2,T,2] = slice(%m) {"axis": 2, "start": 0, "stop": 2, "step": 1}
        %n: f32[2,T,2] = unary(%s) {"kind": "neg"}
        %o: f32[2,T,6] = concat(%n, %m) {"axis": -1}
        output %o""",
        X
        + """
        %h: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
        %p: f32[T] = cast(%positions) {"dtype": "f32"}
        %q: f32[T,1,1] = reshape(%p) {"shape": ["T", 1, 1]}
        %m: f32[T,2,4] = binary(%h, %q) {"kind": "mul"}
        %s: f32[T,2,2] = slice(%m) {"axis": 2, "start": 0, "stop": 2, "step": 1}
        %n: f32[T,2,2] = unary(%s) {"kind": "neg"}
        %o: f32[T,2,6] = concat(%n, %m) {"axis": 2}
        %r: f32[2,T,6] = transpose(%o) {"axes": [1, 0, 2]}
        output %r""",
        bound=0,
    )


def test_sink_transposes_never_adds_copies() -> None:
    """The other operand would have to be transposed instead."""
    unchanged(
        sink_transposes.apply,
        X
        + """
        %t: f32[8,T] = transpose(%x) {"axes": [1, 0]}
        %h: f32[2,4,T] = reshape(%t) {"shape": [2, 4, "T"]}
        %k: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
        %u: f32[2,4,T] = transpose(%k) {"axes": [1, 2, 0]}
        %m: f32[2,4,T] = binary(%h, %u) {"kind": "mul"}
        output %m""",
    )


def test_common_nodes() -> None:
    check(
        common_nodes.apply,
        X
        + """
        weight %tied: f32[40,8] = source("emb", f32[40,8])
        constant %a: f32[] = [0.5]
        constant %b: f32[] = [0.5]
        %p: f32[T,8] = binary(%x, %a) {"kind": "mul"}
        %q: f32[T,8] = binary(%x, %b) {"kind": "mul"}
        %l: f32[T,40] = linear(%p, %tied) {"bias": false}
        %m: f32[T,40] = linear(%q, %emb) {"bias": false}
        %o: f32[T,40] = binary(%l, %m) {"kind": "add"}
        output %o""",
        X
        + """
        constant %a: f32[] = [0.5]
        %p: f32[T,8] = binary(%x, %a) {"kind": "mul"}
        %l: f32[T,40] = linear(%p, %emb) {"bias": false}
        %o: f32[T,40] = binary(%l, %l) {"kind": "add"}
        output %o""",
        bound=0,
    )
