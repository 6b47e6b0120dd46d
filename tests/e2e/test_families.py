"""Every family on the CPU target: logits against transformers, fed in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pelton import LLM, SamplingParams
from pelton.inflight_batcher import SchedulerConfig

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kv_heads": 1}),
    ("llama", {"kv_heads": 2}),
    ("llama", {"kv_heads": "all"}),
    ("llama-llama3", {"kv_heads": 2}),
    ("llama-yarn", {"kv_heads": 2}),
    ("llama-linear", {"kv_heads": 2}),
    ("llama-dynamic", {"kv_heads": 2}),
    ("qwen2", {"kv_heads": 2}),
    ("qwen3", {"kv_heads": 1}),
    ("mistral", {"kv_heads": 2}),
    ("gemma", {"kv_heads": 1}),
    ("gemma2", {"kv_heads": 2}),
    ("gemma3", {"kv_heads": 1}),
]
LENGTH = 100  # = max_seq_len, so that dynamic rope scaling has one factor on both sides


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]['kv_heads']}")
def model(request: pytest.FixtureRequest, tiny: Callable[..., Path], engines: Callable[..., Path]) -> Any:
    family, options = request.param
    checkpoint = tiny(family, **options)
    hf = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = [int(i) for i in np.random.default_rng(0).integers(3, hf.config.vocab_size, LENGTH)]
    with torch.no_grad():
        logits = hf(torch.tensor([ids])).logits[0].numpy()
    return engines(checkpoint, dtype="float32", max_seq_len=LENGTH), ids, logits


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits(model: Any, chunk: int) -> None:
    engine, ids, expected = model
    with LLM(engine, scheduler=SchedulerConfig(max_num_tokens=chunk)) as llm:
        got = llm.logits(ids)
    error = np.abs(got - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < 1e-4


def test_ragged_batch_scores_like_alone(model: Any) -> None:
    """Prompt logprobs of ragged mates in one packed batch equal transformers' log-softmax."""
    engine, ids, expected = model
    lengths = (99, 1, 17, 32, 5)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = torch.log_softmax(torch.from_numpy(expected), dim=1).numpy()
    with LLM(engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids[:n]} for n in lengths], params)
    for output, length in zip(outputs, lengths, strict=True):
        entries = output.prompt_logprobs
        assert len(entries) == length
        assert entries[0] is None
        for position in range(1, length):
            got = entries[position][ids[position]].logprob
            assert abs(got - logprobs[position - 1, ids[position]]) < 2e-3
