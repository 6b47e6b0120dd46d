"""The same bits whether weights are on the file, in memory, or on their way from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pelton import LLM, SamplingParams
from pelton.runtime.errors import RequestError

PROMPTS = [[5 + (i * 7 + n) % 200 for i in range(n)] for n in (1, 9, 70)]


def answers(engine: Path, new_tokens: int, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of every prompt, sampled."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
    with LLM(engine, threads=2, max_kv_tokens=2048, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    result = []
    for output in outputs:
        (choice,) = output.outputs
        scores = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs or [], strict=True)]
        result.append((list(choice.token_ids), scores))
    return result


@pytest.mark.parametrize("verify", ["background", "before", "off"])
def test_tiny_model(tiny: Callable[..., Path], engines: Callable[..., Path], verify: str) -> None:
    engine = engines(tiny("llama"))
    expected = answers(engine, 24, weights="map", verify_weights="off")
    for place in ("map", "background", "copy"):
        assert answers(engine, 24, weights=place, verify_weights=verify) == expected


@pytest.mark.parametrize("name", ["weights", "verify_weights", "trust"])
def test_choices_that_do_not_exist(name: str, tiny: Callable[..., Path], engines: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=f"{name}: got 'hugepages'; allowed: .*, "):
        LLM(engines(tiny("llama")), **{name: "hugepages"})


def test_real_model_while_its_weights_move(smollm2: Path, engines: Callable[..., Path]) -> None:
    engine = engines(smollm2, dtype="bfloat16")
    expected = answers(engine, 40, weights="map", verify_weights="off")
    assert answers(engine, 40, weights="background", verify_weights="background") == expected
    assert answers(engine, 40, weights="copy", verify_weights="off") == expected
