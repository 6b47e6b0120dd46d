"""SamplingParams: vLLM's names and defaults; bad values are refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pelton.inflight_batcher import SamplingParams
from pelton.runtime.errors import RequestError


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.stop_strings == ()
    assert not params.greedy
    assert SamplingParams() == SamplingParams(stop=[], stop_token_ids=(), logit_bias={}, bad_words=[])


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1}])
def test_greedy(greedy: dict[str, Any]) -> None:
    assert SamplingParams(**greedy).greedy


def test_forms_are_unified() -> None:
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"]) == SamplingParams(stop=("x",))
    assert SamplingParams(bad_words=["a", [1, 2]]).bad_words == ("a", (1, 2))
    assert SamplingParams(max_tokens=int(np.int64(3)), top_k=-1, seed=-1).top_k == -1
    assert SamplingParams(stop_token_ids=[np.int32(3)]).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (0, -1, 1.5, True, "2", None)],
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, "1", None, True)],
        *[("top_k", v) for v in (-2, 1.0)],
        *[("top_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("min_p", v) for v in (-0.1, 1.1)],
        *[("repetition_penalty", v) for v in (0, -1, math.inf)],
        *[("presence_penalty", v) for v in (-2.1, 2.1)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("seed", v) for v in (1.5, 2**64, -(2**63) - 1, "1")],
        *[("stop", v) for v in (1, [1], [""], "", {"a": 1})],
        *[("stop_token_ids", v) for v in ("1", [-1], [1.5], 5, [True])],
        *[("ignore_eos", v) for v in (1, None, "yes")],
        *[("min_tokens", v) for v in (-1, 17, 1.0)],
        *[("max_tokens", v) for v in (-1, 2.5, "9")],
        *[("logprobs", v) for v in (-1, 1.5, True)],
        *[("prompt_logprobs", v) for v in (-1, "1")],
        *[("logit_bias", v) for v in ([1], {"1": 1.0}, {-1: 1.0}, {1: "x"}, {1: math.nan}, {1.5: 1.0})],
        *[("bad_words", v) for v in ("word", [""], [[]], [1], [[-1]], 3)],
        *[("detokenize", v) for v in (0, "no")],
        *[("skip_special_tokens", v) for v in (1,)],
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "allowed:" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop="x", detokenize=False)
