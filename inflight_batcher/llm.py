"""``LLM``: an engine behind a Python call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import PeltonError, RequestError
from ..runtime.memory import available_memory
from ..runtime.names import refuse_unknown
from .kv_sizing import num_kv_blocks
from .loading import EngineParts, TextTokenizer, load_engine
from .output import RequestOutput, TokenEvent
from .request import Request, make_request
from .sampling_params import SamplingParams
from .scheduler import SchedulerConfig
from .step_loop import StepLoop

if TYPE_CHECKING:
    from ..runtime.drivers.cpu.weights import WeightPlace
    from ..runtime.format.engine_reader import EngineFile, Trust, VerifyWeights


class TextPrompt(TypedDict):
    """A prompt as text, which the engine's tokenizer encodes."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are."""

    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Generates text with one engine. Not thread-safe; several streams of one thread may be open at once.

    engine: path of an engine file; an open ``EngineFile`` (which stays the caller's); or ``EngineParts`` with any
      driver.
    threads: size of the CPU thread team; None takes all CPUs this process may use.
    max_kv_tokens / kv_cache_bytes: size of the KV cache; default: see ``kv_sizing.num_kv_blocks``.
    scheduler: policies and limits. seed: from which requests without a seed get theirs, in order of arrival.
    weights: "background" starts on the file and moves to huge pages while it runs, "copy" moves before, "map" stays.
    verify_weights: "background", "before" (raises here) or "off". trust: "any", or "signed" with the signer's
      public_key (PEM bytes or a file).

    Raises EngineFormatError, TrustError, TargetMismatchError when the engine cannot be used here, RequestError for an
    option that is not among these.
    """

    def __new__(cls, *given: object, **options: object) -> Self:
        """Only refuses what is no option, before anything is built or loaded."""
        if options:
            signatures = (inspect.signature(function) for function in (cls.__init__, LLM.__init__))
            known = (p for signature in signatures for p in signature.parameters.values())
            names = [p.name for p in known if p.kind is not p.VAR_KEYWORD and p.name != "self"]
            refuse_unknown(cls.__name__, options, dict.fromkeys(names), RequestError)
        return super().__new__(cls)

    def __init__(
        self,
        engine: str | Path | EngineFile | EngineParts,
        *,
        threads: int | None = None,
        max_kv_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        scheduler: SchedulerConfig | None = None,
        seed: int = 0,
        weights: WeightPlace = "background",
        verify_weights: VerifyWeights = "background",
        trust: Trust = "any",
        public_key: str | Path | bytes | None = None,
    ) -> None:
        self._listeners: dict[str, list[TokenEvent]] = {}
        self._count = 0
        if isinstance(engine, EngineParts):
            self._parts: EngineParts | None = engine
        else:
            self._parts = load_engine(
                engine,
                threads=threads,
                weights=weights,
                trust=trust,
                verify_weights=verify_weights,
                public_key=public_key,
            )
        parts = self._parts
        try:
            plan = parts.driver.plan
            config = (scheduler or SchedulerConfig()).resolve(plan.ranges)
            num_blocks = num_kv_blocks(
                parts.driver,
                config,
                max_kv_tokens=max_kv_tokens,
                kv_cache_bytes=kv_cache_bytes,
                available_bytes=max(0, available_memory() - parts.moving_bytes),
            )
            self._loop = StepLoop(
                parts.driver,
                num_blocks,
                eos_token_ids=parts.eos_token_ids,
                detokenizer=parts.detokenizer,
                decode_token=_token_decoder(parts),
                config=config,
                seed=seed,
            )
        except BaseException:
            parts.close()
            raise
        self._ranges, self._vocab_size = plan.ranges, plan.vocab_size

    # --- generating -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; outputs in the order of the prompts.

        ``sampling_params``: for all prompts, or one for each; default ``default_sampling_params()``. RequestError for
        any bad prompt or parameter is raised before anything runs.
        """
        if not isinstance(prompts, Iterable):
            raise _bad_prompt(prompts)
        batch = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = self._params_for(len(batch), sampling_params)
        requests = [self._request(each, param) for each, param in zip(batch, params, strict=True)]
        self._run(requests)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt step by step: each output has all text so far, and in ``delta`` what is new.

        A bad prompt or parameter raises RequestError here. The request starts with the first ``next`` and is
        cancelled when the iterator is closed early.
        """
        return self._stream(self._request(prompt, self._params_for(1, sampling_params)[0]))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, rendered by the model's own chat template.

        ``template_arguments``: tools, add_generation_prompt (default true), and whatever the template reads.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError(
                f"messages: got {messages!r:.80}; allowed: a list of messages, or a list of such lists, not empty"
            )
        single = isinstance(messages[0], Mapping)
        conversations = [cast(Messages, messages)] if single else cast("Sequence[Messages]", messages)
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.tokenizer.encode_chat(each, **template_arguments)} for each in conversations
        ]
        return self.generate(prompts, sampling_params)

    def logits(self, token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
        """Raw fp32 logits after each position, [len(token_ids), vocab_size]; computed by ordinary steps."""
        params = SamplingParams(max_tokens=0, detokenize=False)
        request = make_request(self._new_id(), token_ids, params, self._ranges, self._vocab_size, want_logits=True)
        self._run([request])
        if request.logits is None:
            raise PeltonError("the driver returned no logits although the step asked for them")
        return request.logits

    def default_sampling_params(self) -> SamplingParams:
        """The model's own generation defaults (temperature, top_p, ...) where its checkpoint names some.

        A checkpoint that says ``do_sample: false`` is greedy.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        defaults: Mapping[str, Any] = self._open_parts().generation_defaults
        chosen = {name: defaults[name] for name in names if name in defaults}
        if defaults.get("do_sample") is False:
            chosen["temperature"] = 0.0
        return SamplingParams(**chosen)

    # --- the engine -------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> TextTokenizer:
        """The engine's tokenizer; RequestError when there is none."""
        tokenizer = self._open_parts().text()
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer: give prompts as {'prompt_token_ids': [...]}")
        return tokenizer

    @property
    def generation_defaults(self) -> Mapping[str, float | int | bool]:
        """Sampling fields that the checkpoint's generation config names, as they stand there."""
        return self._open_parts().generation_defaults

    @property
    def loop(self) -> StepLoop:
        """The step loop, for those who schedule by themselves."""
        return self._loop

    def close(self) -> None:
        """Cancel what runs and give memory and threads back. Closing twice is harmless."""
        if self._parts is not None:
            self._loop.abort_all()
            self._parts.close()
            self._parts = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- inner parts ------------------------------------------------------------------------------------------

    def _open_parts(self) -> EngineParts:
        if self._parts is None:
            raise PeltonError("this LLM is closed")
        return self._parts

    def _new_id(self) -> str:
        self._count += 1
        return f"request-{self._count}"

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in given):
            raise RequestError(
                f"sampling_params: got {given!r:.80}; allowed: SamplingParams, or a list of them, one for each prompt"
            )
        if len(given) != count:
            raise RequestError(f"there are {count} prompts but {len(given)} sampling params: give one, or one for each")
        return given

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check a prompt; whatever is wrong with it is raised here."""
        text: str | None = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            text = cast(TextPrompt, prompt)["prompt"]
        elif not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise _bad_prompt(prompt)
        ids = self.tokenizer.encode(text) if text is not None else cast(TokensPrompt, prompt)["prompt_token_ids"]
        if params.stop_strings and self._open_parts().detokenizer is None:
            raise RequestError("stop: there is no tokenizer, so stop strings cannot be found; use stop_token_ids")
        bad_words = self._bad_words(params)
        request = make_request(
            self._new_id(), ids, params, self._ranges, self._vocab_size, prompt=text, bad_words=bad_words
        )
        self._loop.scheduler.check_fits(request.stored_tokens)
        return request

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as token ids: as at the start of a text, and as after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            if isinstance(word, str):
                for text in (word, " " + word.lstrip()):
                    words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
            else:
                words[tuple(word)] = None
        return tuple(word for word in words if word)

    def _run(self, requests: Sequence[Request]) -> None:
        """Step until these are finished; all of them are cancelled when something goes wrong."""
        self._open_parts()
        try:
            for request in requests:
                self._loop.add(request)
            open_requests = list(requests)
            while open_requests:
                if self._step():
                    open_requests = [request for request in open_requests if not request.finished]
        except BaseException:
            for request in requests:
                self._loop.abort(request.request_id)
            raise

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        self._open_parts()
        news: list[TokenEvent] = []
        self._listeners[request.request_id] = news
        try:
            self._loop.add(request)
            while True:
                while not news and not request.finished:
                    self._step()
                output = request.output()
                for event in news:
                    choice = output.outputs[event.index]
                    choice.delta += event.text
                    choice.delta_token_ids += event.token_ids
                news.clear()
                yield output
                if output.finished:
                    return
        finally:
            del self._listeners[request.request_id]
            self._loop.abort(request.request_id)

    def _step(self) -> bool:
        """One turn of the loop; returns whether anything has ended with it."""
        ended = False
        for event in self._loop.step():
            ended |= event.finish_reason is not None
            listener = self._listeners.get(event.request_id)
            if listener is not None:
                listener.append(event)
        return ended


def _bad_prompt(prompt: object) -> RequestError:
    return RequestError(
        f"prompt: got {type(prompt).__name__}; allowed: a string, {{'prompt': string}} or "
        "{'prompt_token_ids': list of ids}"
    )


def _token_decoder(parts: EngineParts) -> Callable[[int], str] | None:
    """Text of single tokens, for log-probabilities."""
    if parts.tokenizer is None and parts.load_tokenizer is None:
        return None

    def decode(token: int) -> str:
        tokenizer = parts.text()
        return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    return lru_cache(maxsize=65536)(decode)
