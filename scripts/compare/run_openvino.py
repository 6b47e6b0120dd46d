"""One measured process of OpenVINO GenAI, whose Python runs this file.

    python run_openvino.py JOB.json

See jobs.py for the job and the result. Settings: paged (its continuous batching with paged attention, else one
stateful model), hint (LATENCY or THROUGHPUT).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from placement import Probe, load_probe


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    pipeline = open_pipeline(job)
    probe = load_probe(job["probe"])
    run(pipeline, probe, job["warmup_prompts"], job["warmup_tokens"])
    runs = [run(pipeline, probe, each, job["new_tokens"]) for each in job["repeats"]]
    result = {
        "versions": {"openvino": openvino.get_version(), "openvino-genai": genai.__version__},
        "system": ", ".join(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        "times": [times for times, _, _ in runs],
        "round_trips": [trips for _, trips, _ in runs],
        "tokens": runs[0][2],
        "logprobs": None,
    }
    Path(job["output"]).write_text(json.dumps(result))
    return 0


def open_pipeline(job: dict[str, Any]) -> Any:
    """bf16 everywhere, the KV cache too; all prompts fit one step."""
    setting = job["setting"]
    config: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "PERFORMANCE_HINT": setting["hint"],
        "INFERENCE_NUM_THREADS": job["threads"],
        "ATTENTION_BACKEND": "PA" if setting["paged"] else "SDPA",
    }
    if setting["paged"]:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        config["scheduler_config"] = scheduler
    return genai.LLMPipeline(job["model"], "CPU", **config)


def run(
    pipeline: Any, probe: Probe, prompts: list[list[int]], new_tokens: int
) -> tuple[list[float], list[float | None], list[int]]:
    """Greedy tokens for all prompts at once: seconds (to the first, from there to the last), round trips before and
    after (between, nobody can look), and the first tokens."""
    config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
    config.apply_chat_template = False
    ids = np.asarray(prompts, np.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    before = probe()
    result = pipeline.generate(inputs, config)
    after = probe()
    if any(len(tokens) != new_tokens for tokens in result.tokens):
        raise SystemExit("OpenVINO GenAI gave fewer tokens than asked for")
    # Its own clock, which leaves out what it does around the steps: microseconds, and milliseconds of each step's end.
    metrics = result.perf_metrics.raw_metrics
    first, ends = max(metrics.m_times_to_first_token) / 1e6, metrics.m_new_token_times
    return [first, (ends[-1] - ends[0]) / 1e3], [before, None, after], [tokens[0] for tokens in result.tokens]


if __name__ == "__main__":
    sys.exit(main())
