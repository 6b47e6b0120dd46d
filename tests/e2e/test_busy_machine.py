"""Others keep every CPU busy: an engine is slower then, and its answers are the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pelton

_BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """A busy process on each CPU that this one may use, and a busy thread in this one, which wants the GIL."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    processes = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(cpu)], stdout=subprocess.PIPE)
        for cpu in sorted(os.sched_getaffinity(0))
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is bound to its CPU now
        thread.start()
        yield
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.communicate()
        if thread.ident is not None:
            thread.join()


def answers(engine: Path, threads: int) -> list[tuple[list[int], list[float]]]:
    """Token ids and their logprobs: prompts of several lengths at once, so that steps mix prefill and decode."""
    params = pelton.SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=0, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [5 + i % 90 for i in range(length)]} for length in (1, 7, 40)]
    with pelton.LLM(engine, threads=threads) as llm:
        choices = [output.outputs[0] for output in llm.generate(prompts, params)]
    found = []
    for choice in choices:
        assert choice.logprobs is not None
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        found.append((list(choice.token_ids), [position[token].logprob for token, position in pairs]))
    return found


def test_the_same_bits_beside_busy_threads(tiny: Any, engines: Any) -> None:
    engine = engines(tiny("llama"))
    quiet = answers(engine, 1)
    with busy_machine():
        for threads in (1, 2, 3):
            assert answers(engine, threads) == quiet
