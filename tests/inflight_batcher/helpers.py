"""Small parts that several serving tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pelton.inflight_batcher import EngineParts, SamplingParams, SchedulerConfig, StepLoop
from pelton.inflight_batcher.llm import LLM
from pelton.inflight_batcher.request import Request, make_request

from .fake_driver import FakeDriver, make_plan

EOS = 256


class ByteTokenizer:
    """Ids 0-255 are bytes; from 256 on they are special tokens without text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join(special if i > 255 else chr(i) if i < 128 else "?" for i in ids)

    def encode_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return self.encode(text + "assistant:" * add_generation_prompt)


class ByteDetokenizer:
    """Whole UTF-8 characters only; bytes that can never be one come out as U+FFFD."""

    def __init__(self, skip_special_tokens: bool = True) -> None:
        self.kept = b""
        self.skip = skip_special_tokens

    def push(self, token_id: int) -> str:
        if token_id > 255:
            return self.flush() + ("" if self.skip else "<s>")
        self.kept += bytes([token_id])
        text = self.kept.decode(errors="replace")
        partial = len(self.kept) < 4 and text.endswith("\ufffd")
        if partial:
            return ""
        self.kept = b""
        return text

    def flush(self) -> str:
        text, self.kept = self.kept.decode(errors="replace"), b""
        return text


def parts(driver: FakeDriver) -> EngineParts:
    """An engine around a fake driver, with text as bytes."""
    return EngineParts(driver, ByteTokenizer(), ByteDetokenizer, (EOS,))


def make_llm(plan: dict[str, Any] | None = None, driver: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An LLM over a fake driver."""
    return LLM(parts(FakeDriver(make_plan(**(plan or {})), **(driver or {}))), **options)


def make_loop(
    blocks: int | tuple[int, ...] = 64,
    *,
    config: SchedulerConfig | None = None,
    depth: int = 1,
    eos: tuple[int, ...] = (EOS,),
    script: dict[int, list[int]] | None = None,
    **plan: Any,
) -> StepLoop:
    """A step loop over a fake driver with so many KV blocks."""
    driver = FakeDriver(make_plan(**plan), lazy=depth > 1, script=script)
    counts = blocks if isinstance(blocks, tuple) else tuple(blocks for _ in driver.plan.kv_groups)
    return StepLoop(driver, counts, eos_token_ids=eos, detokenizer=ByteDetokenizer, config=config, depth=depth)


def add(
    loop: StepLoop, name: str, prompt: Sequence[int], params: SamplingParams | None = None, priority: float = 0.5
) -> Request:
    """Check and queue a request; bad words must be given as token ids."""
    plan, params = loop.driver.plan, params or SamplingParams()
    request = make_request(
        name,
        prompt,
        params,
        plan.ranges,
        plan.vocab_size,
        priority=priority,
        bad_words=tuple(tuple(word) for word in params.bad_words or () if not isinstance(word, str)),
    )
    loop.add(request)
    return request


def run(loop: StepLoop, limit: int = 5000) -> int:
    """Step until idle, checking integrity after each; returns the number of steps."""
    steps = 0
    while loop.has_work:
        loop.step()
        loop.check_integrity()
        steps += 1
        assert steps < limit, "the loop does not come to an end"
    pools = [group.pool for group in loop.scheduler.kv.groups]
    assert all(pool.num_free == pool.num_blocks for pool in pools)
    return steps


def results_of(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    depth: int = 1,
    config: SchedulerConfig | None = None,
    script: dict[int, list[int]] | None = None,
) -> list[list[int]]:
    """Output tokens of each prompt, all added at once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    loop = make_loop(config=config, depth=depth, script=script)
    requests = [add(loop, str(i), *item) for i, item in enumerate(zip(prompts, each, strict=True))]
    run(loop)
    return [request.sequences[0].values.token_ids for request in requests]
