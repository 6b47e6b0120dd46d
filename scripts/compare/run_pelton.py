"""One measured process of pelton.

    python run_pelton.py JOB.json

See jobs.py for the job and the result. No settings; with "reference" in the job, log-probabilities are returned too.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pelton import LLM, SamplingParams
from pelton.inflight_batcher.request import Request, make_request
from scripts.compare.placement import Probe, load_probe

CANDIDATES = 20


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    prompts, probe = job["prompts"], load_probe(job["probe"])
    room = sum(-(-(len(prompt) + job["new_tokens"]) // 256) * 256 for prompt in prompts)
    with LLM(job["model"], threads=job["threads"], max_kv_tokens=room, weights="copy", verify_weights="off") as llm:
        run(llm, probe, job["warmup_prompts"], job["warmup_tokens"])
        logprobs = CANDIDATES if job.get("reference") else None
        runs = [run(llm, probe, each, job["new_tokens"], logprobs) for each in job["repeats"]]
    firsts = [request.output().outputs[0] for request in runs[0][2]]
    result = {
        "versions": {"pelton": _version()},
        "system": "",
        "times": [times for times, _, _ in runs],
        "round_trips": [trips for _, trips, _ in runs],
        "tokens": [output.token_ids[0] for output in firsts],
        "logprobs": [
            None if output.logprobs is None else {i: value.logprob for i, value in output.logprobs[0].items()}
            for output in firsts
        ],
    }
    Path(job["output"]).write_text(json.dumps(result))
    return 0


def run(
    llm: LLM, probe: Probe, prompts: list[list[int]], new_tokens: int, logprobs: int | None = None
) -> tuple[list[float], list[float], list[Request]]:
    """Greedy tokens for all prompts at once: seconds (to the first tokens, from there to the last), round trips before,
    between and after, the requests."""
    plan: Any = llm.loop.driver.plan
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    requests = [make_request(f"{i}", each, params, plan.ranges, plan.vocab_size) for i, each in enumerate(prompts)]
    before, start = probe(), time.perf_counter()
    for request in requests:
        llm.loop.add(request)
    if len(llm.loop.step()) != len(prompts):
        raise SystemExit("the prompts did not fit one step; build the engine with a larger --max-num-tokens")
    first = time.perf_counter() - start
    between, begin = probe(), time.perf_counter()
    while llm.loop.has_work:
        llm.loop.step()
    rest = time.perf_counter() - begin
    return [first, rest], [before, between, probe()], requests


def _version() -> str:
    try:
        return version("pelton")
    except PackageNotFoundError:
        return "of this folder"


if __name__ == "__main__":
    sys.exit(main())
