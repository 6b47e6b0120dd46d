"""Ops: types accepted and refused, and reference meanings against formulas written another way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pelton.builder.ops import OPS, StepContext, op_from_attributes
from pelton.builder.ops.base import Op
from pelton.builder.ops.elementwise import BINARY, UNARY, Binary, Cast, Unary, Where
from pelton.builder.ops.fused import (
    Embedding,
    GatherRows,
    Gemm,
    KVWrite,
    PagedAttention,
    QKVRopeWrite,
    ResolveTokens,
    RMSNorm,
    Rope,
    RopeTable,
    Sample,
)
from pelton.builder.ops.generic import (
    Attention,
    Concat,
    Expand,
    Gather,
    Linear,
    MatMul,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    Transpose,
)
from pelton.runtime.errors import DriverError, EngineFormatError, GraphError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import parse_type
from pelton.runtime.step import StepInputs, greedy_sampling

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
RNG = np.random.Generator(np.random.PCG64(11))
GEMM = Gemm(32, F32, F32)
QKV = QKVRopeWrite("kv.0", 4, 2, 8, 8, False, False, 0.0, BF16, BF16)
PAGED = PagedAttention("kv.0", 4, 2, 8, 0.5, None, None, BF16, BF16, BF16)

#: op, operand types, result types (or the message of the refusal).
TYPES: list[tuple[Op, str, str]] = [
    (Reshape(("T", 2, 4)), "f32[T,8]", "f32[T,2,4]"),
    (Reshape(("T", 3)), "f32[T,8]", "cannot view"),
    (Reshape(("C", 8)), "f32[T,8]", "cannot view"),
    (Reshape((-1, 8)), "f32[T,8]", "not a dim"),
    (Reshape((32, 8)), "f32[8,32]@panel16", "layout rows"),
    (Transpose((1, 0, 2)), "f32[T,2,4]", "f32[2,T,4]"),
    (Transpose((1, 1, 2)), "f32[T,2,4]", "do not permute"),
    (Expand(("T", 8)), "f32[8]", "f32[T,8]"),
    (Expand((3, 8)), "f32[2,8]", "do not broadcast"),
    (Slice(-1, 2, 8, 3), "f32[T,8]", "f32[T,2]"),
    (Slice(0, 0, 1), "f32[T,8]", "symbolic dim T"),
    (Slice(1, 0, 9), "f32[T,8]", "does not fit axis 1"),
    (Slice(2, 0, 1), "f32[T,8]", "axis 2 is outside"),
    (Concat(-1), "f32[T,2] f32[T,3]", "f32[T,5]"),
    (Concat(1), "f32[T,2] bf16[T,3]", "does not fit"),
    (Concat(1), "", "at least one"),
    (Gather(0), "f32[10,4] i32[T]", "f32[T,4]"),
    (Gather(1), "f32[3,10] i32[T,2]", "f32[3,T,2]"),
    (Gather(0), "f32[10,4] f32[T]", "i32 or i64"),
    (Reduce("mean", (-1,), True), "f32[T,8]", "f32[T,1]"),
    (Reduce("sum", (1, 2), False), "f32[T,2,4]", "f32[T]"),
    (Reduce("sum", (0,), False), "f32[T,8]", "symbolic dim T"),
    (Reduce("median", (1,), False), "f32[T,8]", "unknown kind"),
    (Reduce("max", (1,), False), "f32[T,0]", "empty"),
    (Reduce("sum", (1, -1), False), "f32[T,8]", "repeat"),
    (Softmax(1), "f32[T,8]", "f32[T,8]"),
    (Softmax(0), "f32[T,8]", "symbolic"),
    (MatMul(), "f32[2,T,4] f32[1,4,3]", "f32[2,T,3]"),
    (MatMul(), "f32[T,4] f32[5,3]", "do not fit"),
    (MatMul(), "f32[4] f32[4,3]", "dims"),
    (Linear(True), "f32[1,T,8] f32[3,8] f32[3]", "f32[1,T,3]"),
    (Linear(True), "f32[T,8] f32[3,8]", "takes 3 operands"),
    (Linear(), "f32[T,8] f32[3,7]", "does not fit"),
    (Attention(0, "causal", None, 1.0), "f32[1,4,T,8] f32[1,2,T,8] f32[1,2,T,8]", "f32[1,T,4,8]"),
    (Attention(0, "causal", None, 1.0), "f32[1,4,T,8] f32[1,3,T,8] f32[1,3,T,8]", "do not divide"),
    (Attention(0, "bidirectional", None, 1.0), "f32[1,4,T,8] f32[1,2,T,8] f32[1,2,T,8]", "not understood"),
    (Unary("exp"), "bf16[T,8]", "bf16[T,8]"),
    (Unary("gamma"), "f32[T,8]", "unknown kind"),
    (Binary("add"), "f32[T,8] f32[8]", "f32[T,8]"),
    (Binary("lt"), "f32[T,8] f32[8]", "bool[T,8]"),
    (Binary("add"), "f32[T,8] bf16[8]", "cast first"),
    (Binary("add"), "f32[T,8] f32[C,8]", "do not broadcast"),
    (Where(), "bool[T,1] f32[8] f32[]", "f32[T,8]"),
    (Where(), "f32[T,1] f32[8] f32[]", "where"),
    (Cast(BF16), "f32[T]", "bf16[T]"),
    (ResolveTokens(), "i32[T]", "i32[T]"),
    (ResolveTokens(), "i64[T]", "must be i32"),
    (Embedding(F32), "i32[1,T] bf16[40,8]@panel16", "f32[1,T,8]"),
    (Embedding(F32), "f32[T] f32[40,8]", "i32 or i64"),
    (RMSNorm(1e-5, BF16), "f32[T,2,8] f32[8]", "bf16[T,2,8]"),
    (RMSNorm(1e-5, F32), "f32[T,8] f32[4]", "shape [8]"),
    (RMSNorm(1e-5, F32), "i32[T,8] f32[8]", "float"),
    (RMSNorm(1e-5, F32, residual=True), "bf16[T,8] f32[8] f32[T,8]", "f32[T,8]"),
    (RMSNorm(1e-5, F32, residual=True), "f32[T,8] f32[8] f32[8]", "shape [T,8]"),
    (RMSNorm(1e-5, F32, residual=True), "f32[T,8] f32[8]", "3"),
    (RopeTable(), "i32[T] f32[4]", "f32[T,4] f32[T,4]"),
    (RopeTable(), "f32[T] f32[4]", "must be i32"),
    (Rope(8), "f32[T,2,8] f32[T,4] f32[T,4]", "f32[T,2,8]"),
    (Rope(7), "f32[T,2,8] f32[T,4] f32[T,4]", "even"),
    (Rope(4), "f32[T,2,8] f32[T,4] f32[T,4]", "cos must have shape [T,2]"),
    (KVWrite("kv.0", 2, 8, BF16), "f32[T,2,8] f32[T,2,8]", "token[]"),
    (KVWrite("kv.0", 2, 8, BF16), "f32[T,2,8] f32[T,2,4]", "v must have shape"),
    (QKV, "f32[T,64] f32[T,4] f32[T,4]", "bf16[T,4,8] token[]"),
    (QKV, "f32[T,60] f32[T,4] f32[T,4]", "shape [T,64]"),
    (replace(QKV, rotary_dim=12), "f32[T,64] f32[T,6] f32[T,6]", "rotary_dim"),
    (replace(QKV, qk_norm=True), "f32[T,64] f32[T,4] f32[T,4]", "takes 5 operands"),
    (PAGED, "bf16[T,4,8] token[]", "bf16[T,32]"),
    (PAGED, "f32[T,4,8] token[]", "must be bf16"),
    (PAGED, "bf16[T,4,8] f32[]", "must be a token"),
    (GEMM, "f32[T,8] f32[32,8]@panel16", "f32[T,32]"),
    (GEMM, "f32[T,8] f32[32,8]", "panel16"),
    (GEMM, "f32[T,8] bf16[32,8]@panel16", "must be f32"),
    (GEMM, "f32[T,8] f32[48,8]@panel16", "must have 32 rows"),
    (replace(GEMM, out_features=20, gated=True), "f32[T,8] f32[64,8]@panel16", "f32[T,20]"),
    (replace(GEMM, out_features=20, gated=True), "f32[T,8] f32[40,8]@panel16", "must have 64 rows"),
    (replace(GEMM, residual=True), "f32[C,8] f32[32,8]@panel16 f32[T,32]", "residual must have shape [C,32]"),
    (replace(GEMM, bias=True, prologue="rms_norm"), "f32[T,8] f32[32,8]@panel16 f32[8] f32[32]", "f32[T,32]"),
    (replace(GEMM, activation="exp"), "f32[T,8] f32[32,8]@panel16", "unknown activation"),
    (GatherRows(), "f32[T,8]", "f32[C,8]"),
    (GatherRows(), "f32[C,8]", "must be [T,H]"),
    (Sample(40, 2), "f32[C,40]", "token[]"),
    (Sample(40, 2), "f32[C,41]", "shape [C,40]"),
]


@pytest.mark.parametrize(("op", "inputs", "expected"), TYPES, ids=lambda v: v.name if isinstance(v, Op) else v)
def test_infer(op: Op, inputs: str, expected: str) -> None:
    types = [parse_type(t) for t in inputs.split()]
    try:
        parse_type(expected.split()[0])
    except EngineFormatError:
        with pytest.raises(GraphError) as caught:
            op.infer(*types)
        assert expected in str(caught.value)
        assert str(caught.value).startswith(op.name) or "broadcast" in expected
        return
    assert " ".join(map(str, op.infer(*types))) == expected


def test_every_op_is_covered() -> None:
    assert {type(op).name for op, _, _ in TYPES} == set(OPS)


@pytest.mark.parametrize("op", {str(op): op for op, _, _ in TYPES}.values(), ids=str)
def test_attributes_round_trip(op: Op) -> None:
    assert op_from_attributes(op.name, op.attributes()) == op


def context(lengths: Sequence[int] = (1,), done: Sequence[int] | None = None, blocks: int = 8) -> StepContext:
    """A step of sequences with these new tokens after ``done`` earlier ones; blocks of 16 in falling order."""
    done = done or [0] * len(lengths)
    table = np.full((len(lengths), 2), -1, np.int32)
    for s, (new, old) in enumerate(zip(lengths, done, strict=True)):
        needed = -(-(new + old) // 16)
        table[s, :needed] = blocks - 1 - 2 * s - np.arange(needed)
    total = sum(lengths)
    step = StepInputs(
        token_ids=np.zeros(total, np.int32),
        positions=np.concatenate([np.arange(o, o + n) for n, o in zip(lengths, done, strict=True)]).astype(np.int32),
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        seq_slots=np.arange(len(lengths), dtype=np.int32),
        block_tables=(table,),
        logits_rows=np.arange(total, dtype=np.int32),
        row_seq=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        sampling=greedy_sampling(total),
    )
    return StepContext(step, {}, {"kv.0": 0}, 16, 0, total)


def storage(dtype: DType, heads: int = 2, dim: int = 8, blocks: int = 8) -> np.ndarray:
    return np.full((blocks, 16, 2, heads, dim), np.nan, dtype.numpy)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def one(op: Op, *inputs: np.ndarray, ctx: StepContext | None = None) -> np.ndarray:
    return op.reference(ctx or context(), *inputs)[0]


@pytest.mark.parametrize("kind", UNARY)
def test_unary(kind: str) -> None:
    x = np.abs(floats(3, 5)) + 0.5
    exact = {
        "neg": lambda v: -v,
        "abs": abs,
        "exp": math.exp,
        "log": math.log,
        "sqrt": math.sqrt,
        "rsqrt": lambda v: v**-0.5,
        "reciprocal": lambda v: 1 / v,
        "square": lambda v: v * v,
        "sin": math.sin,
        "cos": math.cos,
        "tanh": math.tanh,
        "erf": math.erf,
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "silu": lambda v: v / (1 + math.exp(-v)),
        "relu": lambda v: max(v, 0.0),
        "gelu_erf": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "floor": math.floor,
        "not": lambda v: not v,
    }[kind]
    for values in (x, -x) if kind not in ("log", "sqrt", "rsqrt", "not") else (x,):
        operand = values > 1 if kind == "not" else values
        expected = np.array([exact(float(v)) for v in operand.reshape(-1)]).reshape(3, 5)
        np.testing.assert_allclose(one(Unary(kind), operand), expected, rtol=2e-6, atol=1e-7)


def test_binary_kinds_broadcast_and_round() -> None:
    a, b = np.abs(floats(3, 1)) + 1, np.abs(floats(4)) + 1
    for kind, meaning in BINARY.items():
        x, y = (a > 1.5, b > 1.5) if kind in ("and", "or") else (a, b)
        np.testing.assert_array_equal(one(Binary(kind), x, y), meaning(x, y))
    h = one(Binary("add"), a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16))
    assert h.dtype == ml_dtypes.bfloat16
    integers = one(Binary("mul"), np.array([3], np.int32), np.array([5], np.int32))
    assert integers.dtype == np.int32


def test_views() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    ctx = context([2])
    np.testing.assert_array_equal(one(Reshape(("T", 12)), x, ctx=ctx), x.reshape(2, 12))
    np.testing.assert_array_equal(one(Transpose((2, 0, 1)), x, ctx=ctx), np.einsum("abc->cab", x))
    np.testing.assert_array_equal(one(Expand(("T", 5, 4)), x[:, :1], ctx=ctx), np.tile(x[:, :1], (1, 5, 1)))
    np.testing.assert_array_equal(one(Slice(2, 0, 4, 3), x, ctx=ctx), x[:, :, [0, 3]])
    np.testing.assert_array_equal(one(Concat(1), x, x[:, :1], ctx=ctx), x[:, [0, 1, 2, 0]])
    np.testing.assert_array_equal(one(Gather(1), x, np.array([[2], [0]]), ctx=ctx), x[:, [[2], [0]]])


def test_reduce_adds_in_index_order() -> None:
    x = np.array([[1e8, 1.0, -1e8, 1.0]], np.float32)
    assert one(Reduce("sum", (1,), False), x) == 1.0  # pairwise or in fp64 it would be 0 or 2
    y = floats(2, 3, 5)
    np.testing.assert_allclose(one(Reduce("mean", (0, 2), True), y), y.mean((0, 2), keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(one(Reduce("max", (-1,), False), y), y.max(-1))
    assert one(Reduce("sum", (0,), False), np.array([2, 3], np.int32)) == 5


def test_softmax_and_products() -> None:
    x = floats(4, 6) * 30
    e = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64))
    np.testing.assert_allclose(one(Softmax(-1), x), e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(one(Softmax(0), np.ascontiguousarray(x.T)), one(Softmax(1), x).T)
    a, b = floats(2, 1, 4, 6), floats(3, 6, 5)
    np.testing.assert_allclose(one(MatMul(), a, b), a @ b, rtol=1e-5, atol=1e-5)
    w, bias = floats(7, 6), floats(7)
    np.testing.assert_allclose(one(Linear(True), x, w, bias), x @ w.T + bias, rtol=1e-4, atol=1e-4)


def test_where_and_cast() -> None:
    x = np.array([1.5, -2.5, np.nan], np.float32)
    np.testing.assert_array_equal(one(Where(), x > 0, x, np.float32(7)), np.array([1.5, 7, 7], np.float32))
    np.testing.assert_array_equal(one(Cast(DType.I32), x[:2]), np.array([1, -2], np.int32))
    tie = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # halfway between two bf16 numbers: to even
    np.testing.assert_array_equal(one(Cast(BF16), tie).astype(np.float32), np.array([1, 1 + 2**-6], np.float32))


def test_embedding() -> None:
    table = floats(10, 4).astype(ml_dtypes.bfloat16)
    got = one(Embedding(F32, 3.0), np.array([[7, 0]], np.int32), table)
    np.testing.assert_array_equal(got, table[[[7, 0]]].astype(np.float32) * np.float32(3))
    for bad in (-1, 10):
        with pytest.raises(DriverError, match="10 rows"):
            one(Embedding(F32), np.array([bad], np.int32), table)


def test_rms_norm() -> None:
    x, w = floats(5, 3, 16) * 4, floats(16)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * w
    np.testing.assert_allclose(one(RMSNorm(1e-3, F32), x, w), expected, rtol=2e-6)
    assert one(RMSNorm(1e-3, BF16), x, w).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(one(RMSNorm(1e-3, F32, residual=True), x, w, x), one(RMSNorm(1e-3, F32), x, w) + x)


def test_rope_table_rounds_the_angle_to_fp32() -> None:
    positions, inv_freq = np.array([0, 3, 4001], np.int32), np.array([1.0, 0.3, 0.0007], np.float32)
    cos, sin = RopeTable(2.0).reference(context(), positions, inv_freq)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    np.testing.assert_allclose(cos, 2 * np.cos(angle), atol=5e-7)
    np.testing.assert_allclose(sin, 2 * np.sin(angle), atol=5e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rope_is_a_complex_rotation(interleaved: bool, rotary: int) -> None:
    x, angle = floats(3, 2, 8), floats(3, rotary // 2)
    got = one(Rope(rotary, interleaved), x, np.cos(angle), np.sin(angle))
    pick = np.arange(rotary).reshape(-1, 2).T if interleaved else np.arange(rotary).reshape(2, -1)
    turned = (x[..., pick[0]] + 1j * x[..., pick[1]]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(got[..., pick[0]], turned.real, atol=1e-6)
    np.testing.assert_allclose(got[..., pick[1]], turned.imag, atol=1e-6)
    np.testing.assert_array_equal(got[..., rotary:], x[..., rotary:])


def test_gemm_with_everything() -> None:
    x, w, norm = floats(3, 24), floats(64, 24), floats(24)
    bias, residual = floats(64), floats(3, 20)
    op = Gemm(20, BF16, F32, "rms_norm", 1e-5, True, "silu", True, 5.0, 0.5, True)
    got = one(op, x, w.astype(ml_dtypes.bfloat16), norm, bias, residual)

    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * norm
    low = [v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (normed, w)]
    acc = low[0] @ low[1].T + bias
    gate = np.concatenate([acc[:, 0:16], acc[:, 32:36]], 1)
    up = np.concatenate([acc[:, 16:32], acc[:, 48:52]], 1)
    y = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(got, 5 * np.tanh(y / 5) * 0.5 + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "gelu_erf"])
def test_gemm_activations(activation: str) -> None:
    x, w = floats(3, 8), floats(6, 8)
    got = one(Gemm(6, F16, F16, activation=activation), x, w.astype(np.float16))
    assert got.dtype == np.float16
    acc = (x.astype(np.float16).astype(np.float64) @ w.astype(np.float16).astype(np.float64).T).astype(np.float32)
    expected = acc if activation == "none" else UNARY[activation](acc)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2e-3, atol=1e-3)


def test_rows_do_not_depend_on_their_number() -> None:
    x, w = floats(67, 100), floats(37, 100)
    for op in (Gemm(37, F32, F32), Gemm(37, F32, F32, "rms_norm", 1e-5)):
        extra = [floats(100)] if op.prologue != "none" else []
        all_rows = one(op, x, w, *extra)
        for row in (0, 1, 15, 66):
            np.testing.assert_array_equal(one(op, x[row : row + 1].copy(), w, *extra), all_rows[row : row + 1])


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, cap: float | None
) -> np.ndarray:
    """Causal attention of one whole sequence [T,H,D] in fp64."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for h in range(heads):
        scores = q[:, h].astype(np.float64) @ k[:, h // group].astype(np.float64).T * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        t, j = np.indices(scores.shape)
        hidden = (j > t) if window is None else (j > t) | (j <= t - window)
        p = np.exp(np.where(hidden, -np.inf, scores))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // group].astype(np.float64)
    return out


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (16, 3.0), (1, None)])
def test_paged_attention(window: int | None, cap: float | None) -> None:
    q, k, v = floats(23, 4, 8), floats(23, 2, 8), floats(23, 2, 8)
    expected = dense(q, k, v, 0.5, window, cap)
    op = PagedAttention("kv.0", 4, 2, 8, 0.5, window, cap, F32, F32, F32)
    states = {"kv.0": storage(F32)}
    for start, stop in ((0, 9), (9, 10), (10, 23)):
        ctx = context([stop - start], [start])
        ctx.states = states
        KVWrite("kv.0", 2, 8, F32).reference(ctx, k[start:stop], v[start:stop])
        got = one(op, q[start:stop], np.zeros(()), ctx=ctx)
        np.testing.assert_allclose(got, expected[start:stop].reshape(-1, 32), atol=2e-6)


def test_blocks_before_the_window_are_never_read() -> None:
    q, k, v = floats(20, 4, 8), floats(20, 2, 8), floats(20, 2, 8)
    op = PagedAttention("kv.0", 4, 2, 8, 0.5, 3, None, F32, F32, F32)
    ctx = context([20])
    ctx.states = {"kv.0": storage(F32)}
    KVWrite("kv.0", 2, 8, F32).reference(ctx, k, v)
    full = one(op, q, np.zeros(()), ctx=ctx)
    later = context([1], [19])
    later.states = ctx.states
    later.step.block_tables[0][0, 0] = -1
    np.testing.assert_array_equal(one(op, q[19:], np.zeros(()), ctx=later), full[19:])
    with pytest.raises(DriverError, match="position 0, which has no KV block"):
        one(replace(op, window=None), q[19:], np.zeros(()), ctx=later)
    later.step.block_tables[0][0, 1] = -1
    with pytest.raises(DriverError, match="position 19 has no KV block"):
        KVWrite("kv.0", 2, 8, F32).reference(later, k[:1], v[:1])


def test_attention_is_write_then_read() -> None:
    q, k, v = floats(1, 4, 6, 8), floats(1, 2, 6, 8), floats(1, 2, 6, 8)
    ctx = context([4, 2])
    ctx.states = {"kv.0": storage(F32)}
    got = one(Attention(0, "causal", None, 0.3), q, k, v, ctx=ctx)
    for part in (slice(0, 4), slice(4, 6)):
        q1, k1, v1 = (np.moveaxis(x[0, :, part], 0, 1) for x in (q, k, v))
        np.testing.assert_allclose(got[0, part], dense(q1, k1, v1, 0.3, None, None), atol=2e-6)


@pytest.mark.parametrize("norms", [False, True])
def test_qkv_rope_write_is_its_parts(norms: bool) -> None:
    qkv, angle = floats(5, 64), floats(5, 3)
    cos, sin = np.cos(angle), np.sin(angle)
    weights = [floats(8), floats(8)] if norms else []
    op = QKVRopeWrite("kv.0", 4, 2, 8, 6, False, norms, 1e-5, BF16, BF16)
    fused, parts = context([3, 2]), context([3, 2])
    fused.states, parts.states = {"kv.0": storage(BF16)}, {"kv.0": storage(BF16)}
    q, _ = op.reference(fused, qkv, cos, sin, *weights)

    heads = [qkv[:, a:b].reshape(5, -1, 8) for a, b in ((0, 32), (32, 48), (48, 64))]
    if norms:
        heads[:2] = [one(RMSNorm(1e-5, F32), x, w) for x, w in zip(heads, weights, strict=False)]
    turned = [one(Rope(6), x, cos, sin) for x in heads[:2]]
    KVWrite("kv.0", 2, 8, BF16).reference(parts, turned[1], heads[2])
    np.testing.assert_array_equal(q, turned[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(fused.states["kv.0"].view(np.uint16), parts.states["kv.0"].view(np.uint16))
    assert q.dtype == ml_dtypes.bfloat16


def test_gather_rows_reads_the_chunk() -> None:
    x, ctx = floats(6, 4), context([6])
    ctx.step.logits_rows[:] = [5, 0, 3, 3, 1, 2]
    ctx.row_start, ctx.row_count = 2, 3
    np.testing.assert_array_equal(one(GatherRows(), x, ctx=ctx), x[[3, 3, 1]])
