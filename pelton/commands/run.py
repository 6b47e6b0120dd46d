"""`pelton run`: one answer from an engine, streamed to stdout; rates on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..api import LLM
    from ..inflight_batcher import SamplingParams

HELP = "Ask an engine (or a checkpoint, which is built once into the cache) and stream its answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file; or a checkpoint folder or .gguf file")
    parser.add_argument("prompt", help="the user's message; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="complete the prompt as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default 256)")
    sampling = parser.add_argument_group("sampling (default: what the model's checkpoint says, else greedy)")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 = greedy")
    sampling.add_argument("--top-k", type=int, metavar="N", help="of the N likeliest tokens; 0 = of all")
    sampling.add_argument("--top-p", type=float, metavar="X", help="of the likeliest, together this probability")
    sampling.add_argument("--min-p", type=float, metavar="X", help="of those with this share of the best probability")
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="over 1: tokens seen before become less likely"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may repeat")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="size of the thread team (default: every CPU this process may use)"
    )
    parser.add_argument(
        "--trust", choices=["any", "signed"], default="any", help="signed: only with a good signature (default any)"
    )
    parser.add_argument("--public-key", type=Path, metavar="PEM", help="the signer's key, for --trust signed")
    parser.add_argument(
        "--verify-weights",
        choices=["background", "before", "off"],
        default="background",
        help="when the weights' hashes are checked (default background: while the engine runs)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="the answer only")


def execute(arguments: argparse.Namespace) -> int:
    from ..api import LLM

    started = time.perf_counter()
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with LLM(
        arguments.engine,
        threads=arguments.threads,
        trust=arguments.trust,
        public_key=arguments.public_key,
        verify_weights=arguments.verify_weights,
    ) as llm:
        ids = _prompt_ids(llm, text, arguments)
        loaded = time.perf_counter()
        count, first, finished, reason = _stream(llm, ids, _params(llm, arguments))
    if not arguments.quiet:
        decode = (count - 1) / (finished - first) if count > 1 and finished > first else 0.0
        print(
            f"load {loaded - started:.2f} s | prompt {_tokens(len(ids))}, {len(ids) / (first - loaded):.0f} tokens/s | "
            f"decode {_tokens(count)}, {decode:.1f} tokens/s | ended by {reason}",
            file=sys.stderr,
        )
    return 0


def _tokens(count: int) -> str:
    """A count with its noun."""
    return f"{count} token{'s' * (count != 1)}"


def _prompt_ids(llm: LLM, text: str, arguments: argparse.Namespace) -> list[int]:
    """The prompt as token ids: through the chat template when the model has one and --raw is not given."""
    if arguments.raw or llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode(text)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return llm.tokenizer.encode_chat(messages)


def _params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "max_tokens")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if "temperature" not in llm.generation_defaults:
        given.setdefault("temperature", 0.0)
    return dataclasses.replace(llm.default_sampling_params(), **given)


def _stream(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[int, float, float, str]:
    """Print the answer as it comes; returns (tokens, time of the first, time of the last, why it ended)."""
    first = 0.0
    count, reason = 0, "nothing"
    try:
        for output in llm.stream({"prompt_token_ids": ids}, params):
            first = first or time.perf_counter()
            choice = output.outputs[0]
            sys.stdout.write(choice.delta)
            sys.stdout.flush()
            count += len(choice.delta_token_ids)
            reason = choice.finish_reason or reason
    except BaseException:
        if first:  # what is said about it starts on a line of its own
            print(flush=True)
        raise
    finished = time.perf_counter()
    print(flush=True)
    return count, first, finished, reason
