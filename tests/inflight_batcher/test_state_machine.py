"""Requests come, are cancelled and finish in any order; state stays sound and everything comes to an end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pelton.inflight_batcher import CapacityPolicy, SamplingParams, SchedulerConfig, StepLoop
from pelton.inflight_batcher.request import Request
from pelton.runtime.errors import RequestError

from .helpers import add, make_loop, run


class Serving(RuleBasedStateMachine):
    """Random traffic on a small pool."""

    loop: StepLoop

    @initialize(
        blocks=st.integers(3, 20),
        policy=st.sampled_from(CapacityPolicy),
        tokens=st.integers(1, 24),
        batch=st.integers(1, 4),
        depth=st.integers(1, 2),
        windows=st.sampled_from([(None,), (10,), (None, 5)]),
    )
    def start(self, blocks, policy, tokens, batch, depth, windows) -> None:
        config = SchedulerConfig(capacity_policy=policy, max_num_tokens=tokens, max_batch_size=batch)
        self.loop = make_loop(blocks, config=config, depth=depth, windows=windows, block=4, max_seq_len=96)
        self.live: dict[str, Request] = {}
        self.count = 0

    @rule(
        length=st.integers(1, 40),
        tokens=st.integers(0, 30),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0.2, 0.5, 0.5, 0.9]),
        scored=st.sampled_from([None, None, 1]),
        stop=st.sampled_from([None, ["a", "bc"]]),
    )
    def add_request(self, length, tokens, n, priority, scored, stop) -> None:
        self.count += 1
        name = str(self.count)
        params = SamplingParams(n=n, max_tokens=tokens, prompt_logprobs=scored, stop=stop)
        prompt = [(self.count * 7 + i) % 256 for i in range(length)]
        try:
            self.live[name] = add(self.loop, name, prompt, params, priority)
        except RequestError as error:
            assert "KV blocks" in str(error)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            events = self.loop.step()
            assert all(event.request_id in self.live for event in events)
            for name in [name for name, request in self.live.items() if request.finished]:
                del self.live[name]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(name)
        self.loop.abort(name)
        assert request.finished
        assert all(seq.slot == -1 for seq in request.sequences)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "loop"):
            self.loop.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        run(self.loop)
        for request in self.live.values():
            assert request.finished
            for seq in request.sequences:
                assert seq.values.finish_reason in ("stop", "length")
                if seq.values.finish_reason == "length":
                    assert len(seq.values.token_ids) == request.max_tokens
            if request.params.prompt_logprobs is not None:
                assert request.prompt_logprobs is not None
                assert len(request.prompt_logprobs) == seq.prompt_len


Serving.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, print_blob=True
)
TestServing = Serving.TestCase
