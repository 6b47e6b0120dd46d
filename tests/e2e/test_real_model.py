"""SmolLM2 against transformers in fp32: greedy text, logits of every position, and what bf16 costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pelton import LLM, SamplingParams
from tests.e2e.conftest import ESSAY

PROMPT_LENGTHS = (1, 15, 16, 17, 100, 600)
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def essay_ids(smollm2: Path) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(smollm2)(ESSAY)["input_ids"])


@pytest.fixture(scope="module")
def fp32(smollm2: Path, engines: Callable[..., Path]) -> Any:
    with LLM(engines(smollm2, dtype="float32")) as llm:
        yield llm


@pytest.fixture(scope="module")
def bf16(smollm2: Path, engines: Callable[..., Path]) -> Any:
    with LLM(engines(smollm2, dtype="bfloat16")) as llm:
        yield llm


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_equals_transformers(fp32: Any, reference: Any, essay_ids: list[int], length: int) -> None:
    """Teacher-forced: one forward over prompt and our answer tells where transformers would have chosen otherwise."""
    prompt = essay_ids[:length]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    (output,) = fp32.generate([{"prompt_token_ids": prompt}], params)
    answer = list(output.outputs[0].token_ids)
    assert len(answer) == NEW_TOKENS
    logits = reference_logits(reference, prompt + answer[:-1])[length - 1 :]
    chosen = logits.argmax(axis=1)
    parted = np.flatnonzero(chosen != answer)
    if parted.size:
        best = np.sort(logits[parted[0]])[::-1]
        assert best[0] - best[1] < 1e-3, f"parts at token {parted[0]} although the gap there is {best[0] - best[1]}"


def test_logits_at_each_position(fp32: Any, reference: Any, essay_ids: list[int]) -> None:
    ids = essay_ids[:600]
    ours, theirs = fp32.logits(ids), reference_logits(reference, ids)
    error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
    assert ours.shape == theirs.shape
    assert error.max() < 1e-4


def test_bf16_is_close(bf16: Any, reference: Any, essay_ids: list[int]) -> None:
    ids = essay_ids[:1000]
    ours = torch.log_softmax(torch.from_numpy(bf16.logits(ids)), dim=1)
    theirs = torch.log_softmax(torch.from_numpy(reference_logits(reference, ids)), dim=1)
    divergence = (theirs.exp() * (theirs - ours)).sum(dim=1).mean().item()
    agreement = (ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean().item()
    assert divergence < 5e-4
    assert agreement >= 0.99


def test_answers_sensibly(bf16: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    (output,) = bf16.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert "Paris" in output.outputs[0].text
