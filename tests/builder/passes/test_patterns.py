"""Recognition: rms_norm, rope, split_attention, gather_rows, embedding_scale; each with near misses."""

from __future__ import annotations

import pytest

from pelton.builder.passes import embedding_scale, gather_rows, rms_norm, rope, split_attention
from pelton.builder.verifier import verify
from pelton.runtime.errors import GraphError
from tests.builder.passes.rewrites import check, unchanged
from tests.builder.snippets import snippet

X = """
weight %emb: f32[40,8] = source("emb", f32[40,8])
%x: f32[T,8] = embedding(%token_ids, %emb) {"dtype": "f32", "scale": 1.0}
"""

NORM = (
    X
    + """
weight %w: f32[8] = source("w", f32[8])
constant %eps: f32[] = [0.0009765625]
%s: f32[T,8] = unary(%x) {"kind": "square"}
%m: f32[T,1] = reduce(%s) {"kind": "mean", "axes": [-1], "keepdims": true}
%a: f32[T,1] = binary(MEAN) {"kind": "add"}
"""
)
NORMED = (
    X
    + """
weight %w: f32[8] = source("w", f32[8])
%y: f32[T,8] = rms_norm(%x, %w) {"eps": 0.0009765625, "dtype": "f32", "residual": false}
output %y"""
)
NORM_FORMS = {
    "weight * (x * rsqrt)": (
        "%m, %eps",
        """%r: f32[T,1] = unary(%a) {"kind": "rsqrt"}
           %n: f32[T,8] = binary(%x, %r) {"kind": "mul"}
           %y: f32[T,8] = binary(%w, %n) {"kind": "mul"}
           output %y""",
    ),
    "(rsqrt * x) * weight": (
        "%eps, %m",
        """%r: f32[T,1] = unary(%a) {"kind": "rsqrt"}
           %n: f32[T,8] = binary(%r, %x) {"kind": "mul"}
           %y: f32[T,8] = binary(%n, %w) {"kind": "mul"}
           output %y""",
    ),
    "x / sqrt": (
        "%m, %eps",
        """%r: f32[T,1] = unary(%a) {"kind": "sqrt"}
           %n: f32[T,8] = binary(%x, %r) {"kind": "div"}
           %y: f32[T,8] = binary(%n, %w) {"kind": "mul"}
           output %y""",
    ),
}


@pytest.mark.parametrize("form", NORM_FORMS)
def test_rms_norm(form: str) -> None:
    mean, rest = NORM_FORMS[form]
    check(rms_norm.apply, NORM.replace("MEAN", mean) + rest, NORMED)


NEAR_NORMS = {
    "no weight": """%r: f32[T,1] = unary(%a) {"kind": "rsqrt"}
        %n: f32[T,8] = binary(%x, %r) {"kind": "mul"}
        %y: f32[T,8] = binary(%n, %x) {"kind": "mul"}
        output %y""",
    "another x": """%r: f32[T,1] = unary(%a) {"kind": "rsqrt"}
        %n: f32[T,8] = binary(%s, %r) {"kind": "mul"}
        %y: f32[T,8] = binary(%n, %w) {"kind": "mul"}
        output %y""",
    "sqrt instead of rsqrt": """%r: f32[T,1] = unary(%a) {"kind": "sqrt"}
        %n: f32[T,8] = binary(%x, %r) {"kind": "mul"}
        %y: f32[T,8] = binary(%n, %w) {"kind": "mul"}
        output %y""",
}


@pytest.mark.parametrize("case", NEAR_NORMS)
def test_what_is_no_rms_norm(case: str) -> None:
    unchanged(rms_norm.apply, NORM.replace("MEAN", "%m, %eps") + NEAR_NORMS[case])


def test_sum_is_no_mean() -> None:
    text = NORM.replace("MEAN", "%m, %eps").replace('"mean"', '"sum"') + NORM_FORMS["x / sqrt"][1]
    unchanged(rms_norm.apply, text)


HEADS = X + '%h: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}\n'
ANGLES = """
constant %f: f32[2] = [1.0, 0.25]
%p: f32[T] = cast(%positions) {"dtype": "f32"}
%q: f32[T,1] = reshape(%p) {"shape": ["T", 1]}
%g: f32[T,2] = binary(%q, %f) {"kind": "mul"}
"""
TABLES = """
%gg: f32[T,4] = concat(%g, %g) {"axis": -1}
%c1: f32[T,4] = unary(%gg) {"kind": "cos"}
%s1: f32[T,4] = unary(%gg) {"kind": "sin"}
"""
HALVES = """
%lo: f32[T,2,2] = slice(%h) {"axis": 2, "start": 0, "stop": 2, "step": 1}
%hi: f32[T,2,2] = slice(%h) {"axis": 2, "start": 2, "stop": 4, "step": 1}
%ng: f32[T,2,2] = unary(%hi) {"kind": "neg"}
%tu: f32[T,2,4] = concat(%ng, %lo) {"axis": 2}
"""
APPLY = """
%c3: f32[T,1,4] = reshape(COS) {"shape": ["T", 1, 4]}
%s3: f32[T,1,4] = reshape(SIN) {"shape": ["T", 1, 4]}
%a: f32[T,2,4] = binary(%h, %c3) {"kind": "mul"}
%b: f32[T,2,4] = binary(%tu, %s3) {"kind": "mul"}
%y: f32[T,2,4] = binary(%a, %b) {"kind": "add"}
output %y"""
ROPE = """
constant %f: f32[2] = [1.0, 0.25]
%c: f32[T,2], %s: f32[T,2] = rope_table(%positions, %f) {"scale": SCALE} from "rope"
"""


def roped(scale: str = "1.0") -> str:
    head = ROPE.replace("SCALE", scale)
    return head + HEADS + '%y: f32[T,2,4] = rope(%h, %c, %s) {"rotary_dim": 4, "interleaved": false}\noutput %y'


def test_rope() -> None:
    check(rope.apply, HEADS + ANGLES + TABLES + HALVES + APPLY.replace("COS", "%c1").replace("SIN", "%s1"), roped())


def test_rope_with_attention_scaling() -> None:
    scaled = """
    constant %k: f32[] = [1.125]
    %c2: f32[T,4] = binary(%c1, %k) {"kind": "mul"}
    %s2: f32[T,4] = binary(%s1, %k) {"kind": "mul"}
    """
    text = HEADS + ANGLES + TABLES + scaled + HALVES + APPLY.replace("COS", "%c2").replace("SIN", "%s2")
    check(rope.apply, text, roped("1.125"))


def test_rope_with_tables_made_of_halves() -> None:
    halves = """
    %c0: f32[T,2] = unary(%g) {"kind": "cos"}
    %s0: f32[T,2] = unary(%g) {"kind": "sin"}
    %c1: f32[T,4] = concat(%c0, %c0) {"axis": 1}
    %s1: f32[T,4] = concat(%s0, %s0) {"axis": 1}
    """
    check(rope.apply, HEADS + ANGLES + halves + HALVES + APPLY.replace("COS", "%c1").replace("SIN", "%s1"), roped())


def test_rope_of_a_part() -> None:
    part = """
    %z: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
    %h: f32[T,2,2] = slice(%z) {"axis": 2, "start": 0, "stop": 2, "step": 1}
    %t: f32[T,2,2] = slice(%z) {"axis": 2, "start": 2, "stop": 4, "step": 1}
    constant %f: f32[1] = [0.5]
    %p: f32[T] = cast(%positions) {"dtype": "f32"}
    %q: f32[T,1] = reshape(%p) {"shape": ["T", 1]}
    %g: f32[T,1] = binary(%q, %f) {"kind": "mul"}
    %gg: f32[T,2] = concat(%g, %g) {"axis": -1}
    %c1: f32[T,2] = unary(%gg) {"kind": "cos"}
    %s1: f32[T,2] = unary(%gg) {"kind": "sin"}
    %lo: f32[T,2,1] = slice(%h) {"axis": 2, "start": 0, "stop": 1, "step": 1}
    %hi: f32[T,2,1] = slice(%h) {"axis": 2, "start": 1, "stop": 2, "step": 1}
    %ng: f32[T,2,1] = unary(%hi) {"kind": "neg"}
    %tu: f32[T,2,2] = concat(%ng, %lo) {"axis": 2}
    %c3: f32[T,1,2] = reshape(%c1) {"shape": ["T", 1, 2]}
    %s3: f32[T,1,2] = reshape(%s1) {"shape": ["T", 1, 2]}
    %a: f32[T,2,2] = binary(%h, %c3) {"kind": "mul"}
    %b: f32[T,2,2] = binary(%tu, %s3) {"kind": "mul"}
    %y: f32[T,2,2] = binary(%a, %b) {"kind": "add"}
    %o: f32[T,2,4] = concat(%y, %t) {"axis": -1}
    output %o
    """
    expected = """
    constant %f: f32[1] = [0.5]
    %c: f32[T,1], %s: f32[T,1] = rope_table(%positions, %f) {"scale": 1.0} from "rope"
    """
    expected += (
        X
        + """
    %z: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
    %y: f32[T,2,4] = rope(%z, %c, %s) {"rotary_dim": 2, "interleaved": false}
    output %y
    """
    )
    check(rope.apply, X + part, expected)


NEAR_ROPES = {
    "sin where cos belongs": APPLY.replace("COS", "%s1").replace("SIN", "%c1"),
    "cos twice": APPLY.replace("COS", "%c1").replace("SIN", "%c1"),
}


@pytest.mark.parametrize("case", NEAR_ROPES)
def test_what_is_no_rope(case: str) -> None:
    unchanged(rope.apply, HEADS + ANGLES + TABLES + HALVES + NEAR_ROPES[case])


def test_rotation_the_other_way_is_no_rope() -> None:
    turned = HALVES.replace("unary(%hi)", "unary(%lo)").replace("concat(%ng, %lo)", "concat(%hi, %ng)")
    text = HEADS + ANGLES + TABLES + turned + APPLY.replace("COS", "%c1").replace("SIN", "%s1")
    unchanged(rope.apply, text)


def test_angles_must_come_from_the_positions() -> None:
    text = HEADS + ANGLES.replace("%positions", "%token_ids") + TABLES + HALVES
    unchanged(rope.apply, text + APPLY.replace("COS", "%c1").replace("SIN", "%s1"))


STATES = "kv_group full window null\nstate kv.0 paged_kv f32 [1,4] group 0 layout rows\n"
ATTENTION = (
    X
    + """
%h: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
%t: f32[2,T,4] = transpose(%h) {"axes": [1, 0, 2]}
%q: f32[1,2,T,4] = reshape(%t) {"shape": [1, 2, "T", 4]}
%k: f32[T,1,4] = slice(%h) {"axis": 1, "start": 0, "stop": 1, "step": 1}
%l: f32[1,1,T,4] = reshape(%k) {"shape": [1, 1, "T", 4]}
%a: f32[1,T,2,4] = attention(%q, %l, %l) {"layer": 0, "mask": "causal", "window": WINDOW, "scale": 0.5}
%o: f32[T,8] = reshape(%a) {"shape": ["T", 8]}
output %o"""
)
PAGED = (
    X
    + """
%h: f32[T,2,4] = reshape(%x) {"shape": ["T", 2, 4]}
%k: f32[T,1,4] = slice(%h) {"axis": 1, "start": 0, "stop": 1, "step": 1}
%w: token[] = kv_write(%k, %k) {"state": "kv.0", "kv_heads": 1, "head_dim": 4, "dtype": "f32"}
%a: f32[T,8] = paged_attention(%h, %w) {"state": "kv.0", "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5,$
 "window": WINDOW, "softcap": null, "compute": "f32", "kv_dtype": "f32", "dtype": "f32"}
%b: f32[1,T,2,4] = reshape(%a) {"shape": [1, "T", 2, 4]}
%o: f32[T,8] = reshape(%b) {"shape": ["T", 8]}
output %o"""
).replace("$\n", "")


@pytest.mark.parametrize(("window", "group"), [("null", "full"), ("3", "window3")])
def test_split_attention(window: str, group: str) -> None:
    expected = STATES.replace("full window null", f"{group} window {window}") + PAGED.replace("WINDOW", window)
    check(split_attention.apply, STATES + ATTENTION.replace("WINDOW", window), expected, bound=0)


def test_windows_make_groups() -> None:
    layers = [(0, "8"), (1, "null"), (2, "8"), (3, "4")]
    text = "kv_group full window null\n" + "".join(
        f"state kv.{n} paged_kv f32 [1,4] group 0 layout rows\n" for n, _ in layers
    )
    text += ATTENTION[: ATTENTION.index("%a:")]
    for layer, window in layers:
        text += f'%a{layer}: f32[1,T,2,4] = attention(%q, %l, %l) {{"layer": {layer}, "mask": "causal",'
        text += f' "window": {window}, "scale": 0.5}}\n'
    graph = snippet(text + "output %a3")
    split_attention.apply(graph)
    verify(graph)
    assert [(g.name, g.window) for g in graph.kv_groups] == [("full", None), ("window4", 4), ("window8", 8)]
    assert [s.group for s in graph.states] == [2, 0, 2, 1]


def test_too_many_windows_are_refused() -> None:
    text = "kv_group full window null\n" + "".join(
        f"state kv.{n} paged_kv f32 [1,4] group 0 layout rows\n" for n in range(5)
    )
    text += ATTENTION[: ATTENTION.index("%a:")]
    for layer in range(5):
        text += f'%a{layer}: f32[1,T,2,4] = attention(%q, %l, %l) {{"layer": {layer}, "mask": "causal",'
        text += f' "window": {layer + 1}, "scale": 0.5}}\n'
    with pytest.raises(GraphError, match="5 different windows"):
        split_attention.apply(snippet(text + "output %a4"))


def test_gather_rows() -> None:
    graph = snippet(
        X
        + """
        weight %w: f32[8] = source("w", f32[8])
        weight %head: f32[5,8] = source("head", f32[5,8])
        %y: f32[T,8] = unary(%x) {"kind": "silu"}
        %n: f32[T,8] = rms_norm(%y, %w) {"eps": 1e-05, "dtype": "f32", "residual": false}
        %l: f32[T,5] = linear(%n, %head) {"bias": false}
        %o: f32[1,T,5] = reshape(%l) {"shape": [1, "T", 5]}
        output %o"""
    )
    gather_rows.apply(graph)
    verify(graph)
    names = [(node.op.name, str(node.outputs[0].type)) for node in graph.nodes]
    assert names[:5] == [
        ("embedding", "f32[T,8]"),
        ("gather_rows", "f32[C,8]"),
        ("unary", "f32[C,8]"),
        ("rms_norm", "f32[C,8]"),
        ("linear", "f32[C,5]"),
    ]
    assert [str(v.type) for v in graph.outputs] == ["f32[C,5]"]


#: A normed input whose heads are written as keys and values.
NORM_AND_KEYS = (
    STATES
    + X
    + """
weight %w: f32[8] = source("w", f32[8])
%n: f32[T,8] = rms_norm(%x, %w) {"eps": 1e-05, "dtype": "f32", "residual": false}
%h: f32[T,2,4] = reshape(%n) {"shape": ["T", 2, 4]}
%k: f32[T,1,4] = slice(%h) {"axis": 1, "start": 0, "stop": 1, "step": 1}
%t: token[] = kv_write(%k, %k) {"state": "kv.0", "kv_heads": 1, "head_dim": 4, "dtype": "f32"}
"""
)


def test_rows_are_picked_before_the_last_layers_products() -> None:
    """Up to attention, through both operands of a residual; what attention reads stays whole."""
    graph = snippet(
        NORM_AND_KEYS
        + """
        weight %o_proj: f32[8,8] = source("o", f32[8,8])
        %a: f32[T,8] = paged_attention(%h, %t) ATTENTION
        %p: f32[T,8] = linear(%a, %o_proj) {"bias": false}
        %r: f32[T,8] = binary(%x, %p) {"kind": "add"}
        output %r""".replace(
            "ATTENTION",
            '{"state": "kv.0", "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5, "window": null, '
            '"softcap": null, "compute": "f32", "kv_dtype": "f32", "dtype": "f32"}',
        )
    )
    gather_rows.apply(graph)
    verify(graph)
    assert [(n.op.name, str(n.outputs[0].type)) for n in graph.nodes][-5:] == [
        ("paged_attention", "f32[T,8]"),
        ("gather_rows", "f32[C,8]"),
        ("linear", "f32[C,8]"),
        ("gather_rows", "f32[C,8]"),
        ("binary", "f32[C,8]"),
    ]


def test_rows_read_elsewhere_stay_whole() -> None:
    """The norm feeds attention too: all its rows are needed."""
    graph = snippet(
        NORM_AND_KEYS
        + """
        %l: f32[T,5] = slice(%n) {"axis": 1, "start": 0, "stop": 5, "step": 1}
        output %l"""
    )
    gather_rows.apply(graph)
    verify(graph)
    assert [n.op.name for n in graph.nodes][-2:] == ["gather_rows", "slice"]
    assert str(next(n for n in graph.nodes if n.op.name == "rms_norm").outputs[0].type) == "f32[T,8]"


def test_embedding_scale() -> None:
    before = (
        X
        + """
    constant %k: f32[] = [2.5]
    %y: f32[T,8] = binary(%x, %k) {"kind": "mul"}
    output %y"""
    )
    expected = X.replace('"scale": 1.0', '"scale": 2.5') + "output %x"
    check(embedding_scale.apply, before, expected, bound=0)
    unchanged(embedding_scale.apply, before.replace("output %y", "output %y\noutput %x"))
