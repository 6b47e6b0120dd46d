"""Bytes and operations of launches and steps, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.builder.ops import base, elementwise, fused, generic  # noqa: F401  (fills OPS)
from pelton.inflight_batcher.bench.costs import FLOPS, Cost, CostModel, StepShape, main_compute
from pelton.runtime.errors import EngineFormatError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.plan import KernelSpec, KVGroup, Launch, Operand, Plan, Ranges, StateSpec, WeightRef

H, V, HEADS, KV_HEADS, D = 32, 100, 4, 2, 8
RANGES = Ranges(
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=128,
    opt_num_tokens=16,
    max_logits_rows=8,
    logits_chunk=2,
    tokens_per_block=16,
    max_logprobs=0,
)
ATTENTION = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": D, "kv_dtype": "bf16", "window": None}
QKV = ATTENTION | {"rotary_dim": D, "qk_norm": False}


def kernel(op: str, inputs: str, outputs: str, **attributes: Any) -> KernelSpec:
    return KernelSpec(
        symbol=op,
        kernel=f"cpu.{op}",
        op=op,
        attributes=attributes,
        input_types=tuple(inputs.split()),
        output_types=tuple(outputs.split()),
    )


def launch(index: int, inputs: str, outputs: str = "b0") -> Launch:
    """Operands by letter: b0 buffer, w0 weight, i0 input, n none."""
    space = {"b": "buffer", "w": "weight", "i": "input", "n": "none"}

    def operands(text: str) -> tuple[Operand, ...]:
        return tuple(Operand(space[word[0]], int(word[1:] or 0)) for word in text.split())  # type: ignore[arg-type]

    return Launch(kernel=index, inputs=operands(inputs), outputs=operands(outputs))


def plan(kernels: list[KernelSpec], launches: list[Launch], tail_start: int) -> Plan:
    table = WeightRef(name="embed", dtype=DType.BF16, shape=(V, H), layout="panel16")
    up = WeightRef(name="up", dtype=DType.BF16, shape=(64, H), layout="panel16")
    return Plan(
        ranges=RANGES,
        kv_groups=(KVGroup(name="full", window=None),),
        states=(StateSpec(name="kv.0", kind="paged_kv", dtype=DType.BF16, shape=(KV_HEADS, D)),),
        weights=(table, up),
        buffers=(),
        arena_bytes=0,
        kernels=tuple(kernels),
        launches=tuple(launches),
        tail_start=tail_start,
        vocab_size=V,
    )


@pytest.fixture
def model() -> CostModel:
    """Embedding, a gated product, K/V write, attention; then the tied head in chunks of two rows, and sampling."""
    kernels = [
        kernel("embedding", f"i32[T] bf16[{V},{H}]@panel16", f"f32[T,{H}]"),
        kernel("gemm", f"f32[T,{H}] bf16[64,{H}]@panel16", "bf16[T,30]", compute="bf16", out_features=30, gated=True),
        kernel(
            "qkv_rope_write", f"f32[T,{(HEADS + 2 * KV_HEADS) * D}] f32[T,4] f32[T,4]", "bf16[T,4,8] token[]", **QKV
        ),
        kernel("paged_attention", "bf16[T,4,8] token[]", "bf16[T,32]", **ATTENTION),
        kernel("gather_rows", f"f32[T,{H}]", f"f32[C,{H}]"),
        kernel("gemm", f"f32[C,{H}] bf16[{V},{H}]@panel16", f"f32[C,{V}]", compute="bf16", out_features=V, gated=False),
        kernel("sample", f"f32[C,{V}]", "token[]"),
    ]
    launches = [
        launch(0, "i0 w0"),
        launch(1, "b0 w1"),
        launch(2, "b0 b1 b2", "b0 n"),
        launch(3, "b0 n"),
        launch(4, "b0"),
        launch(5, "b0 w0"),
        launch(6, "b0", "n"),
    ]
    return CostModel(plan(kernels, launches, 4))


# Two sequences: 3 tokens at positions 5, 6, 7, and one at position 0; three rows.
SHAPE = StepShape((5, 0), (3, 1), 3)


def test_embedding_reads_its_rows_only(model: CostModel) -> None:
    assert model.launch(0, SHAPE) == Cost(weight_bytes=4 * H * 2, activation_bytes=4 * 4 + 4 * H * 4)


def test_a_product_counts_two_operations_a_weight_and_row(model: CostModel) -> None:
    cost = model.launch(1, SHAPE)
    assert cost == Cost(weight_bytes=64 * H * 2, activation_bytes=4 * H * 4 + 4 * 30 * 2, flops=2 * 4 * 64 * H)


def test_a_panel_counts_its_padding(model: CostModel) -> None:
    assert model.launch(5, SHAPE).weight_bytes == 112 * H * 2  # 100 outputs in panels of 16


def test_attention_counts_each_pair_and_each_key_once(model: CostModel) -> None:
    cost = model.launch(3, SHAPE)
    assert cost.flops == 4 * HEADS * D * (6 + 7 + 8 + 1)
    assert cost.kv_read_bytes == (8 + 1) * 2 * KV_HEADS * D * 2
    assert cost.activation_bytes == 4 * 32 * 2 + 4 * 32 * 2


def test_the_kv_write(model: CostModel) -> None:
    cost = model.launch(2, SHAPE)
    assert cost.kv_write_bytes == 4 * 2 * KV_HEADS * D * 2
    assert cost.flops == 4 * (HEADS + KV_HEADS) * 3 * D


def test_a_turn_of_the_tail_counts_its_rows(model: CostModel) -> None:
    assert model.launch(5, SHAPE, 0).flops == 2 * 2 * V * H
    assert model.launch(5, SHAPE, 2).flops == 2 * 1 * V * H
    assert model.launch(4, SHAPE, 2).activation_bytes == 2 * H * 4
    assert model.launch(6, SHAPE, 0) == Cost(activation_bytes=2 * V * 4, flops=3 * 2 * V)


def test_a_step_reads_every_weight_once(model: CostModel) -> None:
    step = model.step(SHAPE)
    assert step.weight_bytes == 4 * H * 2 + 64 * H * 2 + 112 * H * 2  # the head's two turns read the same
    assert step.flops == 2 * 4 * 64 * H + 4 * 6 * 24 + 4 * HEADS * D * 22 + 3 * (2 * V * H) + 3 * 3 * V
    assert step.read_bytes == step.weight_bytes + 9 * 64
    assert model.step(StepShape((5, 0), (3, 1), 0)).weight_bytes == 4 * H * 2 + 64 * H * 2  # no rows, no head


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
@pytest.mark.parametrize("start, count", [(0, 1), (0, 9), (4, 3), (6, 2), (7, 1), (20, 5)])
def test_windows(window: int | None, start: int, count: int) -> None:
    shape = StepShape((start,), (count,), 1)
    seen = [set(range(max(0, p + 1 - (window or 10**9)), p + 1)) for p in range(start, start + count)]
    assert shape.attended(window) == sum(map(len, seen))
    assert shape.keys(window) == len(set().union(*seen))


def test_every_op_has_a_cost() -> None:
    # "attention" never reaches a plan: it becomes a write and a paged_attention.
    assert set(base.OPS) - {"attention"} <= set(FLOPS)


def test_an_unknown_op_is_an_error() -> None:
    model = CostModel(plan([kernel("levitate", "f32[T,4]", "f32[T,4]")], [launch(0, "b0")], 1))
    with pytest.raises(EngineFormatError, match="levitate"):
        model.launch(0, SHAPE)


def test_main_compute_goes_by_weights() -> None:
    kernels = [
        kernel("gemm", "f32[T,4] f32[16,4]@panel16", "f32[T,16]", compute="f32"),
        kernel("gemm", "f32[T,64] bf16[64,64]@panel16", "f32[T,64]", compute="bf16"),
    ]
    assert main_compute(plan(kernels, [launch(0, "b0 w0"), launch(1, "b0 w1")], 2)) is DType.BF16
    assert main_compute(plan(kernels, [], 0)) is DType.F32
