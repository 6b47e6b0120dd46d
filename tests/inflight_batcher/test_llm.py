"""LLM over the fake driver: prompts, outputs, streams, errors."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.inflight_batcher import ContextLengthError, SamplingParams
from pelton.inflight_batcher.llm import LLM
from pelton.inflight_batcher.loading import EngineParts, LateDetokenizer
from pelton.inflight_batcher.request import Request
from pelton.runtime.errors import EngineFormatError, PeltonError, RequestError

from .fake_driver import ROOT, FakeDriver, digest, logits_of, make_plan, raw_logprob
from .helpers import EOS, ByteDetokenizer, ByteTokenizer, make_llm, parts

LONG = {"max_seq_len": 512, "max_batch": 8}


def scripted(text: str | bytes, *, first: str = "p", eos: bool = False, **options) -> LLM:
    """An LLM whose answer to a prompt that begins with ``first`` is this text."""
    data = text.encode() if isinstance(text, str) else text
    script = {ord(first): [*data] + ([EOS] if eos else [])}
    return make_llm(driver={"script": script}, **options)


def test_prompt_forms_give_the_same() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=5, temperature=0)
    outputs = llm.generate(["hello", {"prompt": "hello"}, {"prompt_token_ids": [*b"hello"]}], params)
    assert [o.prompt for o in outputs] == ["hello", "hello", None]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert outputs[0].prompt_token_ids == [*b"hello"]
    assert all(o.finished for o in outputs)
    assert llm.generate("hello", params)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    llm.loop.check_integrity()


def test_default_params_are_the_models_generation_defaults() -> None:
    driver = FakeDriver(make_plan())
    llm = LLM(EngineParts(driver, ByteTokenizer(), generation_defaults={"temperature": 0.6, "top_p": 0.9}))
    assert llm.default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9)
    greedy = LLM(EngineParts(FakeDriver(make_plan()), generation_defaults={"do_sample": False}))
    assert greedy.default_sampling_params().greedy


def test_finish_reasons_and_metrics() -> None:
    llm = scripted("ab", eos=True)
    out = llm.generate("p", SamplingParams(max_tokens=10))[0]
    assert (out.outputs[0].text, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("ab", "stop", None)
    assert out.outputs[0].token_ids == [*b"ab", EOS]
    out = llm.generate("p", SamplingParams(max_tokens=2))[0]
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("ab", "length")
    out = llm.generate("p", SamplingParams(max_tokens=5, stop_token_ids=[ord("b")]))[0]
    assert (out.outputs[0].text, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("a", "stop", ord("b"))
    assert out.outputs[0].token_ids == [*b"ab"]
    metrics = out.metrics
    assert metrics.first_token is not None
    assert metrics.finish is not None
    assert metrics.ttft is not None
    assert metrics.arrival <= metrics.first_token <= metrics.finish
    assert metrics.ttft >= 0


def test_ignore_eos_and_min_tokens() -> None:
    llm = scripted("ab", eos=True)
    assert len(llm.generate("p", SamplingParams(max_tokens=7, ignore_eos=True))[0].outputs[0].token_ids) == 7
    out = llm.generate("p", SamplingParams(max_tokens=7, min_tokens=5))[0].outputs[0]
    assert out.token_ids[2] != EOS
    assert len(out.token_ids) >= 5
    out = llm.generate("p", SamplingParams(max_tokens=7, min_tokens=2))[0].outputs[0]
    assert out.token_ids == [*b"ab", EOS]


def test_stop_strings_count_only_from_min_tokens_on() -> None:
    llm = scripted("abcabcabc")
    out = llm.generate("p", SamplingParams(max_tokens=9, min_tokens=4, stop="bc"))[0].outputs[0]
    assert (out.text, out.stop_reason, len(out.token_ids)) == ("abca", "bc", 6)
    out = llm.generate("p", SamplingParams(max_tokens=9, min_tokens=3, stop="bc"))[0].outputs[0]
    assert (out.text, len(out.token_ids)) == ("a", 3)


def test_stream_is_generate_in_pieces_and_never_leaks_a_stop() -> None:
    llm = scripted("one two STOP three")
    params = SamplingParams(max_tokens=18, stop=["STOP"])
    seen = []
    for output in llm.stream("p", params):
        choice = output.outputs[0]
        seen.append(choice.delta)
        assert choice.text == "".join(seen)
        assert "S" not in choice.text
    assert "".join(seen) == "one two " == llm.generate("p", params)[0].outputs[0].text
    assert output.finished
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "STOP"


def test_false_start_of_a_stop_string_comes_out_in_the_end() -> None:
    llm = scripted("aSTaSTO")
    out = list(llm.stream("p", SamplingParams(max_tokens=7, stop=["STOP"])))
    assert [o.outputs[0].delta for o in out] == ["a", "", "", "STa", "", "", "STO"]


def test_utf8_over_tokens_and_a_cut_character() -> None:
    text = "é€😀 ö"
    llm = scripted(text)
    size = len(text.encode())
    outs = list(llm.stream("p", SamplingParams(max_tokens=size)))
    assert outs[-1].outputs[0].text == text
    assert all("\ufffd" not in o.outputs[0].text for o in outs)
    assert "".join(o.outputs[0].delta for o in outs) == text
    cut = llm.generate("p", SamplingParams(max_tokens=4))[0].outputs[0].text
    assert cut == "é\ufffd"
    out = llm.generate("p", SamplingParams(max_tokens=size, stop="😀"))[0].outputs[0]
    assert (out.text, out.stop_reason) == ("é€", "😀")


def test_two_streams_at_once_and_generate_in_between() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = [llm.generate(p, params)[0].outputs[0].token_ids for p in ("x", "y", "z")]
    x, y = llm.stream("x", params), llm.stream("y", params)
    got: dict[str, list[int]] = {"x": [], "y": []}
    got["x"] += next(x).outputs[0].delta_token_ids
    got["y"] += next(y).outputs[0].delta_token_ids
    assert llm.generate("z", params)[0].outputs[0].token_ids == alone[2]
    for name, stream in (("x", x), ("y", y)):
        for output in stream:
            got[name] += output.outputs[0].delta_token_ids
    assert [got["x"], got["y"]] == alone[:2]


def test_closing_a_stream_cancels_its_request() -> None:
    llm = make_llm()
    stream = llm.stream("x", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.loop.has_work
    stream.close()
    assert not llm.loop.has_work
    llm.loop.check_integrity()
    llm.stream("x")  # never started: nothing is queued
    assert not llm.loop.has_work


def test_logprobs() -> None:
    llm = make_llm()
    out = llm.generate("abc", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True))[0]
    choice = out.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 3
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert 1 <= len(entry) <= 3
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == 3
    chain = digest(digest(ROOT, 97), 98)
    assert out.prompt_logprobs[2] is not None
    assert out.prompt_logprobs[2][99].logprob == pytest.approx(raw_logprob(chain, 99))
    assert out.prompt_logprobs[2][99].decoded_token == "c"
    out = llm.generate("abc", SamplingParams(max_tokens=2, prompt_logprobs=3, ignore_eos=True))[0]
    assert out.prompt_logprobs is not None
    assert all(entry is None or 3 <= len(entry) <= 4 for entry in out.prompt_logprobs)
    assert out.outputs[0].logprobs is None
    assert llm.generate("a", SamplingParams(max_tokens=1, prompt_logprobs=3))[0].prompt_logprobs == [None]
    plain = llm.generate("abc", SamplingParams(max_tokens=3))[0]
    assert plain.outputs[0].logprobs is None
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
def test_prompt_scores_alone(length: int) -> None:
    """max_tokens = 0: only the prompt's log-probabilities, over several steps of at most 8 rows."""
    llm = make_llm({"rows": 8})
    prompt = [i % 256 for i in range(length)]
    out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert out.outputs[0].token_ids == []
    assert out.outputs[0].finish_reason == "length"
    chain = ROOT
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == length
    for token, entry in zip(prompt, out.prompt_logprobs, strict=True):
        if entry is not None:
            assert entry[token].logprob == pytest.approx(raw_logprob(chain, token))
        chain = digest(chain, token)
    assert llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=0))[0].finished


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256])
def test_logits_of_every_position(length: int) -> None:
    llm = make_llm({"rows": 8})
    ids = np.arange(length, dtype=np.int32)
    logits = llm.logits(ids)
    chain = ROOT
    for position in range(length):
        chain = digest(chain, position)
        np.testing.assert_array_equal(logits[position], logits_of(chain, 300))
    assert logits.dtype == np.float32
    assert logits.shape == (length, 300)


def test_n_choices_share_the_prompt_and_differ_by_seed() -> None:
    driver = FakeDriver(make_plan())
    llm = LLM(parts(driver))
    prompt = {"prompt_token_ids": list(range(40))}
    out = llm.generate(prompt, SamplingParams(n=4, seed=11, max_tokens=6, ignore_eos=True))[0]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 4
    assert driver.copied_blocks == 3  # 39 tokens: two full blocks shared, the third copied for each later choice
    assert sum(tokens for tokens, _, _ in driver.steps) < 2 * 40
    for i, choice in enumerate(out.outputs):
        alone = llm.generate(prompt, SamplingParams(seed=11 + i, max_tokens=6, ignore_eos=True))[0]
        assert alone.outputs[0].token_ids == choice.token_ids


def test_n_choices_with_a_repetition_penalty_run_apart() -> None:
    driver = FakeDriver(make_plan())
    llm = LLM(parts(driver))
    prompt = {"prompt_token_ids": list(range(40))}
    params = {"max_tokens": 6, "ignore_eos": True, "repetition_penalty": 1.3}
    out = llm.generate(prompt, SamplingParams(n=2, seed=11, **params))[0]
    assert driver.copied_blocks == 0
    for i, choice in enumerate(out.outputs):
        alone = llm.generate(prompt, SamplingParams(seed=11 + i, **params))[0]
        assert alone.outputs[0].token_ids == choice.token_ids


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed() -> None:
    def run(seed: int) -> list[list[int]]:
        outs = make_llm(seed=seed).generate(["q"] * 3, SamplingParams(max_tokens=4))
        return [o.outputs[0].token_ids for o in outs]

    assert run(0) == run(0) != run(1)
    assert len({tuple(ids) for ids in run(0)}) == 3


def test_bad_words() -> None:
    llm = scripted("abcabdabc")
    out = llm.generate("p", SamplingParams(max_tokens=9, bad_words=["abc", [ord("d")]]))[0].outputs[0]
    assert "abc" not in out.text
    assert "d" not in out.text
    assert out.text.startswith("abd") is False
    assert out.token_ids[:2] == [*b"ab"]


def test_logit_bias_reaches_the_driver_clamped() -> None:
    params = SamplingParams(logit_bias={5: 1000, 6: -1000.5, 7: 0.5})
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 0.5}
    make_llm().generate("p", SamplingParams(logit_bias={5: 3.0}, min_tokens=3))


def test_chat_renders_by_the_tokenizer() -> None:
    out = make_llm().chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    assert len(out) == 1
    assert bytes(out[0].prompt_token_ids) == b"user:hi\nassistant:"
    pair = [[{"role": "user", "content": c}] for c in "ab"]
    assert len(make_llm().chat(pair, SamplingParams(max_tokens=1))) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ({"prompt_token_ids": [1, 300]}, {}, r"prompt_token_ids\[1\] = 300 is outside the vocabulary of 300"),
        ({"prompt_token_ids": [-1]}, {}, r"prompt_token_ids\[0\] = -1"),
        ({"prompt_token_ids": [1.5]}, {}, "flat list of ids"),
        ({"prompt_token_ids": ["a"]}, {}, "flat list of ids"),
        ({"prompt_token_ids": [[1], [2]]}, {}, "flat list of ids"),
        ({"prompt_token_ids": [[1], [2, 3]]}, {}, "flat list of token ids"),
        ({"prompt_token_ids": [True]}, {}, "flat list of ids"),
        ({"prompt_token_ids": 2**70}, {}, "flat list"),
        ({"prompt_token_ids": [2**70]}, {}, "flat list"),
        ({"tokens": [1]}, {}, "prompt: got dict"),
        (7, {}, "prompt: got int"),
        ("x" * 250, {}, r"250 tokens and max_tokens is 16.*max_seq_len 256.*--max-seq-len 266"),
        ("x" * 256, {"max_tokens": None}, "--max-seq-len 257"),
        ("x", {"logprobs": 6}, "at most 5.*--max-logprobs 6"),
        ("x", {"prompt_logprobs": 9}, "--max-logprobs 9"),
        ("x", {"logit_bias": {300: 1}}, r"logit_bias: token ids \[300\] are outside"),
        ("x", {"stop_token_ids": [999]}, "stop_token_ids"),
        ("x", {"bad_words": [[1, 300]]}, "bad_words"),
    ],
)
def test_bad_requests(prompt, params, message) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt] if isinstance(prompt, int) else prompt, SamplingParams(**params))
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt, SamplingParams(**params))
    assert not llm.loop.has_work


def test_context_length_error_tells_the_numbers() -> None:
    with pytest.raises(ContextLengthError) as caught:
        make_llm().generate("x" * 300)
    assert (caught.value.prompt_tokens, caught.value.limit) == (300, 256)
    with pytest.raises(ContextLengthError):
        make_llm().logits(list(range(257)))


def test_exactly_the_range_is_served() -> None:
    out = make_llm().generate("x" * 250, SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(out.outputs[0].token_ids) == 6
    out = make_llm().generate("x" * 255, SamplingParams(max_tokens=1))[0]
    assert len(out.outputs[0].token_ids) == 1


def test_one_bad_prompt_of_many_starts_none() -> None:
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.generate(["fine", ""])
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert not llm.loop.has_work


def test_request_that_never_fits_the_pool_is_refused_at_once() -> None:
    llm = make_llm(max_kv_tokens=32)
    with pytest.raises(RequestError, match="needs 4 KV blocks of group group0, but the pool has 2"):
        llm.generate("x" * 40)
    assert len(llm.generate("x" * 17, SamplingParams(max_tokens=16, ignore_eos=True))[0].outputs[0].token_ids) == 16


def test_without_a_tokenizer() -> None:
    llm = LLM(EngineParts(FakeDriver(make_plan())))
    out = llm.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0))[0]
    assert len(out.outputs[0].token_ids) == 3
    assert out.outputs[0].text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop: there is no tokenizer"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"))


def test_driver_failure_cancels_everything_and_leaves_a_usable_loop() -> None:
    driver = FakeDriver(make_plan())
    llm = LLM(parts(driver))
    stream = llm.stream("abc", SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    driver.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate("def")
    assert not llm.loop.has_work
    last = list(stream)[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert llm.generate("def")[0].finished


def test_close() -> None:
    driver = FakeDriver(make_plan())
    with LLM(parts(driver)) as llm:
        llm.generate("x", SamplingParams(max_tokens=1))
    assert driver.closed
    llm.close()
    with pytest.raises(PeltonError, match="closed"):
        llm.generate("x")


def test_a_folder_is_not_an_engine(tmp_path) -> None:
    with pytest.raises(EngineFormatError, match="build it first with build-engine"):
        LLM(tmp_path)
    with pytest.raises(EngineFormatError):
        LLM(tmp_path / "absent.engine")


def test_a_stream_copies_nothing_that_grows() -> None:
    """Outputs share the prompt, and cut the answer when it is looked at, as it was then."""
    llm = make_llm()
    stream = llm.stream({"prompt_token_ids": list(range(1, 40))}, SamplingParams(max_tokens=20, logprobs=1))
    outputs = list(stream)
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1
    assert outputs[0].prompt_token_ids == list(range(1, 40))
    for output in outputs:
        assert not {"text", "token_ids", "logprobs"} & set(vars(output.outputs[0]))
    final = outputs[-1].outputs[0]
    text = ""
    for count, output in enumerate(outputs, start=1):
        choice = output.outputs[0]
        text += choice.delta
        assert choice.token_ids == final.token_ids[:count]
        assert choice.token_ids is choice.token_ids
        assert choice.logprobs == (final.logprobs or [])[:count]
        assert choice.text == text
        assert not hasattr(choice, "nothing_of_this_name")
    llm.close()


def test_open_requests_are_looked_at_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step: with many open requests that would take longer than the rest of the step's Python."""
    looks = 0
    finished = Request.finished.fget

    def counted(request: Request) -> bool:
        nonlocal looks
        looks += 1
        return finished(request)

    monkeypatch.setattr(Request, "finished", property(counted))
    llm = make_llm()
    outputs = llm.generate(["a", "b", "c", "d"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [100] * 4
    assert looks < 40


def test_a_late_detokenizer_is_made_with_the_first_token() -> None:
    made = []

    def make() -> ByteDetokenizer:
        made.append(1)
        return ByteDetokenizer(True)

    late = LateDetokenizer(make)
    assert late.flush() == ""
    assert made == []
    assert late.push(65) + late.push(66) + late.flush() == "AB"
    assert made == [1]
