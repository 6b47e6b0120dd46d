"""Fusion: gated_mlp, merge_qkv, linear_to_gemm, gemm_prologue, gemm_epilogue, fuse_qkv_rope_write, norm_residual."""

from __future__ import annotations

import pytest

from pelton.builder.passes import (
    fuse_qkv_rope_write,
    gated_mlp,
    gemm_epilogue,
    gemm_prologue,
    linear_to_gemm,
    merge_qkv,
    norm_residual,
)
from tests.builder.passes.rewrites import check, unchanged

X = """
weight %emb: f32[40,8] = source("emb", f32[40,8])
%x: f32[T,8] = embedding(%token_ids, %emb) {"dtype": "f32", "scale": 1.0}
"""

DEFAULTS = {
    "out_features": 6,
    "compute": '"f32"',
    "dtype": '"f32"',
    "prologue": '"none"',
    "eps": 0.0,
    "bias": "false",
    "activation": '"none"',
    "gated": "false",
    "softcap": "null",
    "scale": 1.0,
    "residual": "false",
}
GATE_UP = 'pack(interleave(16, source("g", f32[20,8]), source("u", f32[20,8])), panel16)'


def gemm(**changes: object) -> str:
    return "{" + ", ".join(f'"{k}": {v}' for k, v in (DEFAULTS | changes).items()) + "}"


MLP = (
    X
    + """
weight %mlp.gate_proj.weight: f32[20,8] = source("g", f32[20,8])
weight %mlp.up_proj.weight: f32[20,8] = source("u", f32[20,8])
%g: f32[T,20] = linear(%x, %mlp.gate_proj.weight) {"bias": false}
%a: f32[T,20] = unary(%g) {"kind": "ACT"}
%u: f32[T,20] = linear(%x, %mlp.up_proj.weight) {"bias": false}
%y: f32[T,20] = binary(ORDER) {"kind": "mul"}
output %y"""
)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu_erf", "relu"])
@pytest.mark.parametrize("order", ["%a, %u", "%u, %a"])
def test_gated_mlp(act: str, order: str) -> None:
    attributes = gemm(out_features=20, activation=f'"{act}"', gated="true")
    check(
        gated_mlp.apply,
        MLP.replace("ACT", act).replace("ORDER", order),
        X
        + f"""
        weight %mlp.gate_up_proj: f32[64,8]@panel16 = {GATE_UP}
        %y: f32[T,20] = gemm(%x, %mlp.gate_up_proj) {attributes}
        output %y""",
    )


def test_gated_mlp_with_biases() -> None:
    check(
        gated_mlp.apply,
        X
        + """
        weight %mlp.gate_proj.weight: f32[20,8] = source("g", f32[20,8])
        weight %mlp.up_proj.weight: f32[20,8] = source("u", f32[20,8])
        weight %mlp.gate_proj.bias: f32[20] = source("gb", f32[20])
        weight %mlp.up_proj.bias: f32[20] = source("ub", f32[20])
        %g: f32[T,20] = linear(%x, %mlp.gate_proj.weight, %mlp.gate_proj.bias) {"bias": true}
        %a: f32[T,20] = unary(%g) {"kind": "silu"}
        %u: f32[T,20] = linear(%x, %mlp.up_proj.weight, %mlp.up_proj.bias) {"bias": true}
        %y: f32[T,20] = binary(%a, %u) {"kind": "mul"}
        output %y""",
        X
        + f"""
        weight %mlp.gate_up_proj: f32[64,8]@panel16 = {GATE_UP}
        weight %mlp.gate_up_proj.bias: f32[64] = interleave(16, source("gb", f32[20]), source("ub", f32[20]))
        %y: f32[T,20] = gemm(%x, %mlp.gate_up_proj, %mlp.gate_up_proj.bias) {
            gemm(out_features=20, bias="true", activation='"silu"', gated="true")
        }
        output %y""".replace("\n                                                                               ", " "),
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output %y", "output %y\noutput %g"),  # the gate is read elsewhere
        ('{"kind": "silu"}', '{"kind": "exp"}'),  # no activation that a GEMM knows
        ("linear(%x, %mlp.up_proj.weight)", "linear(%x, %mlp.gate_proj.weight)"),
    ],
)
def test_what_is_no_gated_mlp(old: str, new: str) -> None:
    text = MLP.replace("ACT", "silu").replace("ORDER", "%a, %u").replace(old, new)
    if "up_proj" in old:
        text = text.replace('weight %mlp.up_proj.weight: f32[20,8] = source("u", f32[20,8])\n', "")
        graph = check(lambda g: gated_mlp.apply(g), text, merged_with_itself())
        assert len(graph.nodes) == 2
        return
    unchanged(gated_mlp.apply, text)


def merged_with_itself() -> str:
    """Two linears of one weight are still a gated pair (common_nodes would have made them one)."""
    attributes = gemm(out_features=20, activation='"silu"', gated="true")
    return (
        X
        + f"""
    weight %mlp.gate_gate_proj: f32[64,8]@panel16 = {GATE_UP.replace('"u"', '"g"')}
    %y: f32[T,20] = gemm(%x, %mlp.gate_gate_proj) {attributes}
    output %y"""
    )


STATES = "kv_group full window null\nstate kv.0 paged_kv f32 [1,4] group 0 layout rows\n"
PAGED = (
    '{"state": "kv.0", "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5, "window": null, "softcap": null,'
    ' "compute": "f32", "kv_dtype": "f32", "dtype": "f32"}'
)
WRITE = '{"state": "kv.0", "kv_heads": 1, "head_dim": 4, "dtype": "f32"}'
TABLE = """
constant %f: f32[2] = [1.0, 0.25]
%c: f32[T,2], %s: f32[T,2] = rope_table(%positions, %f) {"scale": 1.0}
"""
ATTEND = f"""
%qr: f32[T,2,4] = rope(%qh, %c, %s) {{"rotary_dim": 4, "interleaved": false}}
%kr: f32[T,1,4] = rope(%kh, %c, %s) {{"rotary_dim": 4, "interleaved": false}}
%w: token[] = kv_write(%kr, %vh) {WRITE}
%o: f32[T,8] = paged_attention(%qr, %w) {PAGED}
output %o"""
VIEWS = """
%qh: f32[T,2,4] = reshape(%q) {"shape": ["T", 2, 4]}
%kh: f32[T,1,4] = reshape(%k) {"shape": ["T", 1, 4]}
%vh: f32[T,1,4] = reshape(%v) {"shape": ["T", 1, 4]}
"""
SLICES = """
%q: f32[T,8] = slice(%qkv) {"axis": 1, "start": 0, "stop": 8, "step": 1}
%k: f32[T,4] = slice(%qkv) {"axis": 1, "start": 8, "stop": 12, "step": 1}
%v: f32[T,4] = slice(%qkv) {"axis": 1, "start": 12, "stop": 16, "step": 1}
"""


STACKED = 'concat(source("q", f32[8,8]), source("k", f32[4,8]), source("v", f32[4,8]))'


@pytest.mark.parametrize("order", ["qkv", "vkq"])
def test_merge_qkv(order: str) -> None:
    parts = {
        "q": ("f32[8,8]", "f32[8]", "f32[T,8]"),
        "k": ("f32[4,8]", "f32[4]", "f32[T,4]"),
        "v": ("f32[4,8]", "f32[4]", "f32[T,4]"),
    }
    before = STATES + X + TABLE
    for n, (matrix, vector, out) in ((n, parts[n]) for n in order):
        before += f'weight %attn.{n}_proj.weight: {matrix} = source("{n}", {matrix})\n'
        before += f'weight %attn.{n}_proj.bias: {vector} = source("{n}b", {vector})\n'
        before += f'%{n}: {out} = linear(%x, %attn.{n}_proj.weight, %attn.{n}_proj.bias) {{"bias": true}}\n'
    stacked = """
    weight %attn.qkv_proj.weight: f32[16,8] = STACKED
    weight %attn.qkv_proj.bias: f32[16] = concat(source("qb", f32[8]), source("kb", f32[4]), source("vb", f32[4]))
    %qkv: f32[T,16] = linear(%x, %attn.qkv_proj.weight, %attn.qkv_proj.bias) {"bias": true}
    """
    check(
        merge_qkv.apply,
        before + VIEWS + ATTEND,
        STATES + X + TABLE + stacked.replace("STACKED", STACKED) + SLICES + VIEWS + ATTEND,
        bound=0,
    )


def test_projections_of_different_inputs_stay_apart() -> None:
    unchanged(
        merge_qkv.apply,
        STATES
        + X
        + TABLE
        + """
        weight %q_proj: f32[8,8] = source("q", f32[8,8])
        weight %k_proj: f32[4,8] = source("k", f32[4,8])
        weight %v_proj: f32[4,8] = source("v", f32[4,8])
        %z: f32[T,8] = unary(%x) {"kind": "neg"}
        %q: f32[T,8] = linear(%x, %q_proj) {"bias": false}
        %k: f32[T,4] = linear(%z, %k_proj) {"bias": false}
        %v: f32[T,4] = linear(%x, %v_proj) {"bias": false}
        """
        + VIEWS
        + ATTEND,
    )


AFTER = (
    X
    + """
weight %w: f32[8] = source("w", f32[8])
%n: f32[T,8] = rms_norm(%x, %w) {"eps": 0.0009765625, "dtype": "f32", "residual": false}
"""
)


@pytest.mark.parametrize("order", ["%x, %n", "%n, %x"])
def test_norm_residual(order: str) -> None:
    before = AFTER + f'%y: f32[T,8] = binary({order}) {{"kind": "add"}}\noutput %y'
    fused = (
        X
        + """
    weight %w: f32[8] = source("w", f32[8])
    %y: f32[T,8] = rms_norm(%x, %w, %x) {"eps": 0.0009765625, "dtype": "f32", "residual": true}
    output %y"""
    )
    check(norm_residual.apply, before, fused, bound=0)


@pytest.mark.parametrize(
    "rest",
    [
        '%y: f32[T,8] = binary(%x, %n) {"kind": "sub"}\noutput %y',
        '%y: f32[T,8] = binary(%n, %n) {"kind": "add"}\noutput %y',
        '%y: f32[T,8] = binary(%n, %w) {"kind": "add"}\noutput %y',  # another shape
        '%y: f32[T,8] = binary(%x, %n) {"kind": "add"}\noutput %y\noutput %n',  # the norm is read elsewhere
    ],
)
def test_what_is_no_residual_of_a_norm(rest: str) -> None:
    unchanged(norm_residual.apply, AFTER + rest)


FUSED = (
    '{"state": "kv.0", "heads": 2, "kv_heads": 1, "head_dim": 4, "rotary_dim": 4, "interleaved": false,'
    ' "qk_norm": NORM, "qk_eps": EPS, "compute": "f32", "kv_dtype": "f32"}'
)
QKV = """
weight %qkv_proj: f32[16,8] = source("w", f32[16,8])
%qkv: f32[T,16] = linear(%x, %qkv_proj) {"bias": false}
"""


def test_fuse_qkv_rope_write() -> None:
    fused = f"""
    %q: f32[T,2,4], %t: token[] = qkv_rope_write(%qkv, %c, %s) {FUSED.replace("NORM", "false").replace("EPS", "0.0")}
    %o: f32[T,8] = paged_attention(%q, %t) {PAGED}
    output %o"""
    check(
        fuse_qkv_rope_write.apply,
        STATES + X + TABLE + QKV + SLICES + VIEWS + ATTEND,
        STATES + X + TABLE + QKV + fused,
        bound=0,
    )


NORMS = """
weight %qn: f32[4] = source("qn", f32[4])
weight %kn: f32[4] = source("kn", f32[4])
%qi: f32[T,2,4] = rms_norm(%qh, %qn) {"eps": 0.001953125, "dtype": "f32", "residual": false}
%ki: f32[T,1,4] = rms_norm(%kh, %kn) {"eps": KEPS, "dtype": "f32", "residual": false}
"""


def test_fuse_qkv_rope_write_with_norms() -> None:
    attributes = FUSED.replace("NORM", "true").replace("EPS", "0.001953125")
    fused = f"""
    weight %qn: f32[4] = source("qn", f32[4])
    weight %kn: f32[4] = source("kn", f32[4])
    %q: f32[T,2,4], %t: token[] = qkv_rope_write(%qkv, %c, %s, %qn, %kn) {attributes}
    %o: f32[T,8] = paged_attention(%q, %t) {PAGED}
    output %o"""
    before = STATES + X + TABLE + QKV + SLICES + VIEWS + NORMS.replace("KEPS", "0.001953125")
    attend = ATTEND.replace("%qh", "%qi").replace("%kh", "%ki")
    check(fuse_qkv_rope_write.apply, before + attend, STATES + X + TABLE + QKV + fused, bound=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rope(%qh", "rope(%qx"),  # q is not a plain slice
        ("\noutput %o", "\noutput %o\noutput %qr"),  # the rotated q is read elsewhere
        ("kv_write(%kr, %vh)", "kv_write(%kr, %kr)"),  # v comes from elsewhere
        ('start": 12, "stop": 16', 'start": 8, "stop": 12'),  # k and v overlap
    ],
)
def test_what_does_not_fuse_with_kv_write(old: str, new: str) -> None:
    extra = '%qx: f32[T,2,4] = unary(%qh) {"kind": "neg"}\n' if "qx" in new else ""
    text = STATES + X + TABLE + QKV + SLICES + VIEWS + extra + ATTEND
    assert old in text
    unchanged(fuse_qkv_rope_write.apply, text.replace(old, new))


def test_different_norms_do_not_fuse() -> None:
    text = STATES + X + TABLE + QKV + SLICES + VIEWS + NORMS.replace("KEPS", "0.5")
    unchanged(fuse_qkv_rope_write.apply, text + ATTEND.replace("%qh", "%qi").replace("%kh", "%ki"))


def test_linear_to_gemm_ties_the_embedding() -> None:
    check(
        linear_to_gemm.apply,
        X
        + """
        weight %b: f32[40] = source("b", f32[40])
        %y: f32[T,40] = linear(%x, %emb, %b) {"bias": true}
        output %y""",
        f"""
        weight %emb: f32[40,8]@panel16 = pack(source("emb", f32[40,8]), panel16)
        weight %b: f32[40] = source("b", f32[40])
        %x: f32[T,8] = embedding(%token_ids, %emb) {{"dtype": "f32", "scale": 1.0}}
        %y: f32[T,40] = gemm(%x, %emb, %b) {gemm(out_features=40, bias="true")}
        output %y""",
    )


def test_linear_of_two_activations_stays_generic() -> None:
    unchanged(
        linear_to_gemm.apply,
        X
        + """
        constant %m: f32[2,8] = [1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1]
        %y: f32[T,2] = linear(%x, %m) {"bias": false}
        output %y""",
    )


GEMM = (
    X
    + """
weight %w: f32[6,8]@panel16 = pack(source("w", f32[6,8]), panel16)
weight %n: f32[8] = source("n", f32[8])
"""
)


def test_gemm_prologue_is_done_by_each_reader() -> None:
    check(
        gemm_prologue.apply,
        GEMM
        + f"""
        %i: f32[T,8] = rms_norm(%x, %n) {{"eps": 0.5, "dtype": "f32", "residual": false}}
        %y: f32[T,6] = gemm(%i, %w) {gemm()}
        %z: f32[T,6] = gemm(%i, %w) {gemm(scale=2.0)}
        %o: f32[T,6] = binary(%y, %z) {{"kind": "add"}}
        output %o""",
        GEMM
        + f"""
        %y: f32[T,6] = gemm(%x, %w, %n) {gemm(prologue='"rms_norm"', eps=0.5)}
        %z: f32[T,6] = gemm(%x, %w, %n) {gemm(prologue='"rms_norm"', eps=0.5, scale=2.0)}
        %o: f32[T,6] = binary(%y, %z) {{"kind": "add"}}
        output %o""",
        bound=0,
    )


def test_norm_with_another_reader_is_stored() -> None:
    unchanged(
        gemm_prologue.apply,
        GEMM
        + f"""
        %i: f32[T,8] = rms_norm(%x, %n) {{"eps": 0.5, "dtype": "f32", "residual": false}}
        %y: f32[T,6] = gemm(%i, %w) {gemm()}
        output %y
        output %i""",
    )


EPILOGUES = {
    "bias, activation, cap, scale, residual": (
        f"""
        weight %b: f32[6] = source("b", f32[6])
        constant %cap: f32[] = [30.0]
        constant %two: f32[] = [2.0]
        %r: f32[T,6] = slice(%x) {{"axis": 1, "start": 0, "stop": 6, "step": 1}}
        %y: f32[T,6] = gemm(%x, %w) {gemm()}
        %a: f32[T,6] = binary(%b, %y) {{"kind": "add"}}
        %c: f32[T,6] = unary(%a) {{"kind": "silu"}}
        %d: f32[T,6] = binary(%c, %cap) {{"kind": "div"}}
        %e: f32[T,6] = unary(%d) {{"kind": "tanh"}}
        %f: f32[T,6] = binary(%cap, %e) {{"kind": "mul"}}
        %g: f32[T,6] = binary(%f, %two) {{"kind": "mul"}}
        %o: f32[T,6] = binary(%r, %g) {{"kind": "add"}}
        output %o""",
        """
        weight %b: f32[6] = source("b", f32[6])
        %r: f32[T,6] = slice(%x) {"axis": 1, "start": 0, "stop": 6, "step": 1}
        %o: f32[T,6] = gemm(%x, %w, %b, %r) """
        + gemm(bias="true", activation='"silu"', softcap="30.0", scale=2.0, residual="true")
        + "\noutput %o",
    ),
    "two products added: the later one takes the sum": (
        f"""
        %y: f32[T,6] = gemm(%x, %w) {gemm()}
        %z: f32[T,6] = gemm(%x, %w) {gemm(scale=3.0)}
        %o: f32[T,6] = binary(%y, %z) {{"kind": "add"}}
        output %o""",
        f"""
        %z: f32[T,6] = gemm(%x, %w) {gemm(scale=3.0)}
        %o: f32[T,6] = gemm(%x, %w, %z) {gemm(residual="true")}
        output %o""",
    ),
    "an activation after the scale stays outside": (
        f"""
        constant %two: f32[] = [2.0]
        %y: f32[T,6] = gemm(%x, %w) {gemm()}
        %g: f32[T,6] = binary(%y, %two) {{"kind": "mul"}}
        %o: f32[T,6] = unary(%g) {{"kind": "relu"}}
        output %o""",
        f"""
        %y: f32[T,6] = gemm(%x, %w) {gemm(scale=2.0)}
        %o: f32[T,6] = unary(%y) {{"kind": "relu"}}
        output %o""",
    ),
}


@pytest.mark.parametrize("case", EPILOGUES)
def test_gemm_epilogue(case: str) -> None:
    before, expected = EPILOGUES[case]
    base = GEMM.replace('weight %n: f32[8] = source("n", f32[8])\n', "")
    check(gemm_epilogue.apply, base + before, base + expected, bound=1e-6)


def test_results_with_two_readers_are_stored() -> None:
    base = GEMM.replace('weight %n: f32[8] = source("n", f32[8])\n', "")
    unchanged(
        gemm_epilogue.apply,
        base
        + f"""
        %y: f32[T,6] = gemm(%x, %w) {gemm()}
        %o: f32[T,6] = unary(%y) {{"kind": "silu"}}
        %p: f32[T,6] = binary(%o, %y) {{"kind": "mul"}}
        output %p""",
    )


def test_a_write_without_attention_stays() -> None:
    """Ops with effects survive when nobody reads their results."""
    text = STATES + X + TABLE + QKV + SLICES + VIEWS + f"%w: token[] = kv_write(%kh, %vh) {WRITE}\noutput %qkv"
    unchanged(fuse_qkv_rope_write.apply, text)
