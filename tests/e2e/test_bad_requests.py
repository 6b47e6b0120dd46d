"""A bad request to a loaded engine: a RequestError that names the field and what is allowed, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

import pelton
from pelton.runtime.errors import BuildError, DriverError, PeltonError, RequestError


@pytest.fixture(scope="module")
def llm(tiny: Any, engines: Any) -> Iterator[pelton.LLM]:
    with pelton.LLM(engines(tiny("llama")), threads=1) as loaded:
        yield loaded
        # Whatever was refused, the engine still works.
        assert len(loaded.generate({"prompt_token_ids": [5]}, greedy(3))[0].outputs[0].token_ids) == 3


def greedy(max_tokens: int) -> pelton.SamplingParams:
    return pelton.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def ids(value: Any) -> dict[str, Any]:
    return {"prompt_token_ids": value}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (ids([]), "the prompt is empty"),
        (ids([5] * 300), "300 tokens and max_tokens is 2: .*--max-seq-len 302"),
        (ids([1, 300]), r"prompt_token_ids\[1\] = 300 is outside the vocabulary of 300"),
        (ids([-1]), r"prompt_token_ids\[0\] = -1 is outside"),
        (ids([1.0]), "flat list of ids"),
        (ids([True]), "flat list of ids"),
        (ids([2**70]), "flat list of ids"),
        (ids([[1], [1, 2]]), "flat list"),
        (ids("12"), "flat list of ids"),
        (ids(None), "flat list of ids"),
        ({}, "prompt: got dict; allowed: a string"),
        ({"prompt": 3}, "prompt: got dict; allowed"),
        (3, "prompt: got int; allowed"),
        (None, "prompt: got NoneType; allowed"),
        ([1, 2], "prompt: got int; allowed"),
        ("\ud800", "whole characters"),
    ],
)
def test_prompts(llm: pelton.LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, greedy(2))


@pytest.mark.parametrize("token_ids", [[], [300], [-1], [0.5], "12", None, [5] * 257])
def test_logits(llm: pelton.LLM, token_ids: Any) -> None:
    with pytest.raises(RequestError):
        llm.logits(token_ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 1000}, "the prompt has 1 token and max_tokens is 1000: .*--max-seq-len 1001"),
        ({"temprature": 0}, "SamplingParams has no 'temprature'; did you mean 'temperature'"),
        ({"max_new_tokens": 4}, "no 'max_new_tokens'; did you mean 'max_tokens'"),
        ({"zzz": 4}, "no 'zzz'; it has n, temperature, .*, detokenize"),
        ({"logprobs": 21}, "logprobs: got 21, .*--max-logprobs 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: got 21"),
        ({"stop_token_ids": [300]}, r"stop_token_ids: token ids \[300\] are outside"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias: token ids"),
        ({"bad_words": [[300]]}, "bad_words: token ids"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"temperature": 1e300}, "temperature: got 1e[+]300"),
        ({"repetition_penalty": 1e300}, "repetition_penalty: got"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: got"),
        ({"top_k": 10**12}, "top_k: got 1000000000000"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"min_p": -0.1}, "min_p: got"),
        ({"n": 0}, "n: got 0"),
        ({"n": 10**6}, "n: got 1000000; .*at most 256"),
        ({"seed": "x"}, "seed: got 'x'"),
        ({"stop": [""]}, "stop: got"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: got 5"),
        ({"max_tokens": 2.5}, "max_tokens: got 2.5"),
    ],
)
def test_sampling(llm: pelton.LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(ids([5]), pelton.SamplingParams(**params))


@pytest.mark.parametrize("params", [3, "greedy", {"temperature": 0}, [{}], []])
def test_what_are_not_sampling_params(llm: pelton.LLM, params: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="sampling.params"):
            call(ids([5]), params)


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, "hello", 3, [[]], ["hello"], {"role": "user", "content": "x"}),
        *([{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}]),
        [{"role": "user", "content": object()}],
    ],
)
def test_messages(llm: pelton.LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages|the chat template fails"):
        llm.chat(messages, greedy(1))


def test_template_variables(llm: pelton.LLM) -> None:
    """One that the template does not read changes nothing; one that is not data is refused."""
    messages = [{"role": "user", "content": "x"}]
    plain, other = (llm.chat(messages, greedy(1), **more)[0] for more in ({}, {"banana": True}))
    assert plain.prompt_token_ids == other.prompt_token_ids
    with pytest.raises(RequestError, match="banana is object"):
        llm.chat(messages, greedy(1), banana=object())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, DriverError, "1 to 64 workers, not 0"),
        ({"threads": 1.5}, DriverError, "threads: got 1.5"),
        ({"threads": "2"}, DriverError, "threads: got '2'"),
        ({"max_kv_tokens": 0}, RequestError, "max_kv_tokens: got 0"),
        ({"max_kv_tokens": "64"}, RequestError, "max_kv_tokens: got '64'"),
        ({"max_kv_tokens": 10**15}, RequestError, "max_kv_tokens: got 1000000000000000; allowed: at most"),
        ({"kv_cache_bytes": 1}, RequestError, "kv_cache_bytes: got 1"),
        ({"thread": 2}, RequestError, "LLM has no 'thread'; did you mean 'threads'"),
        ({"gpu": 2}, RequestError, "LLM has no 'gpu'; it has model, .*threads, .*public_key"),
        ({"max_kv_tokens": 64, "kv_cache_bytes": 1 << 20}, RequestError, "give one of them"),
    ],
)
def test_loading(tiny: Any, engines: Any, options: dict[str, Any], error: type[PeltonError], message: str) -> None:
    with pytest.raises(error, match=message):
        pelton.LLM(engines(tiny("llama")), **options)


def test_an_unknown_option_is_refused_before_a_checkpoint_is_built(tiny: Any, tmp_path: Any) -> None:
    with pytest.raises(RequestError, match="did you mean 'threads'"):
        pelton.LLM(tiny("llama"), thread=2)
    with pytest.raises(BuildError, match="build has no 'max_batchsize'; did you mean 'max_batch_size'"):
        pelton.build(tiny("llama"), tmp_path / "m", max_batchsize=4)
    assert not any(tmp_path.iterdir())


def test_a_closed_engine_says_so(tiny: Any, engines: Any) -> None:
    llm = pelton.LLM(engines(tiny("llama")), threads=1)
    llm.close()
    for call in (lambda: llm.generate(ids([5])), lambda: llm.logits([5]), lambda: llm.tokenizer):
        with pytest.raises(PeltonError, match="closed"):
            call()
