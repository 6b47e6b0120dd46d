"""bf16 weights in 12 bits: the same tokens and logits, bit for bit, from a smaller file; refit; several targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pelton
from pelton.builder.target import CPU_SKUS
from pelton.cli import build_engine_main, main
from pelton.runtime.errors import BuildError
from pelton.runtime.format.container import EngineFile
from tests.e2e.conftest import ESSAY
from tests.kernels.harness import host_skus

PARAMS = pelton.SamplingParams(temperature=0.9, seed=3, max_tokens=24, logprobs=5, ignore_eos=True)
SKU = "x86-64-v4+vnni+bf16"


def weights(engine: Path) -> list[bytes]:
    with EngineFile.open(engine) as opened:
        return [opened.tensor(name).tobytes() for name in opened.tensors]


def layouts(engine: Path) -> set[str]:
    """Of all matrices."""
    with EngineFile.open(engine) as opened:
        return {spec.layout for spec in opened.tensors.values() if len(spec.shape) == 2}


def answers(engine: Path, prompts: list[list[int]]) -> list[Any]:
    with pelton.LLM(engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS)
    return [
        (choice.token_ids, [sorted((t, e.logprob) for t, e in step.items()) for step in choice.logprobs])
        for choice in (output.outputs[0] for output in outputs)
    ]


def test_the_real_model_says_the_same_from_three_quarters_of_the_bytes(
    smollm2: Path, engines: Callable[..., Path]
) -> None:
    packed = engines(smollm2, dtype="bfloat16")
    plain = engines(smollm2, dtype="bfloat16", weight_packing="off")
    assert layouts(packed) == {"packed12"}
    assert layouts(plain) == {"panel16"}
    assert packed.stat().st_size < 0.77 * plain.stat().st_size
    with pelton.LLM(plain) as llm:
        ids = list(llm.tokenizer.encode(ESSAY))
    prompts = [ids[i : i + 1 + 11 * i] for i in range(20)]
    assert answers(packed, prompts) == answers(plain, prompts)
    assert answers(packed, prompts[7:8]) == answers(plain, prompts[7:8])
    assert main(["verify", str(packed)]) == 0


def test_all_targets_of_a_file_read_the_same_weights(tiny: Callable[..., Path], engines: Callable[..., Path]) -> None:
    folder = tiny("llama", dtype="bfloat16", tie_word_embeddings=True)
    several = engines(folder, target=(*CPU_SKUS, "reference"))
    assert layouts(several) == {"packed12"}
    assert weights(several) == weights(engines(folder, target=SKU))
    plain = engines(folder, target=tuple(CPU_SKUS), weight_packing="off")
    assert answers(several, [[5, 6, 7]]) == answers(plain, [[5, 6, 7]])


@pytest.mark.parametrize("sku", host_skus())
def test_every_target_says_the_same(sku: str, tiny: Callable[..., Path], engines: Callable[..., Path]) -> None:
    folder = tiny("qwen3", dtype="bfloat16")
    prompts = [[5, 6, 7, 8], [9], list(range(20, 60))]
    packed, plain = engines(folder, target=sku), engines(folder, target=sku, weight_packing="off")
    assert layouts(packed) >= {"packed12"}
    assert answers(packed, prompts) == answers(plain, prompts)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_stay(dtype: str, tiny: Callable[..., Path], engines: Callable[..., Path]) -> None:
    assert "packed12" not in layouts(engines(tiny("llama"), target="x86-64-v3", dtype=dtype))


def test_the_flag(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = tiny("llama", dtype="bfloat16"), tmp_path / "off.engine"
    assert build_engine_main([str(folder), "-o", str(out), "--weight-packing", "off", "--no-golden", "-q"]) == 0
    assert "packed12" not in layouts(out)
    with pytest.raises(BuildError, match="--weight-packing 'on' is not one of auto, off"):
        pelton.build(folder, out, weight_packing="on")


def test_inspect_says_what_was_saved(
    tiny: Callable[..., Path], engines: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines(tiny("llama", dtype="bfloat16", tie_word_embeddings=True))
    assert main(["inspect", str(engine)]) == 0
    assert "in 12 bits an element" in capsys.readouterr().out


def test_refit(tiny: Callable[..., Path], engines: Callable[..., Path], tmp_path: Path) -> None:
    """Other weights go in as a build would have stored them; such as do not fit are refused, the engine left alone."""
    engine = engines(tiny("llama", dtype="bfloat16", tie_word_embeddings=True))
    other = tiny("llama", dtype="bfloat16", tie_word_embeddings=True, seed=11)
    assert main(["refit", str(engine), str(other), "-o", str(tmp_path / "refitted.engine")]) == 0
    prompt = [[5, 6, 7, 8]]
    assert answers(tmp_path / "refitted.engine", prompt) == answers(engines(other), prompt)

    odd = tmp_path / "odd"
    odd.mkdir()
    for path in other.iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    weights = load_file(odd / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    patterns = np.random.default_rng(0).integers(0x2000, 0x3C00, weights[name].shape, np.uint16)
    weights[name] = patterns.view(weights[name].dtype)
    save_file(weights, odd / "model.safetensors", {"format": "pt"})
    before = engine.read_bytes()
    assert main(["refit", str(engine), str(odd), "-o", str(engine)]) != 0
    assert engine.read_bytes() == before
    assert layouts(engines(odd)) == {"packed12", "panel16"}
