"""One measured process of llama.cpp, through the low-level interface of llama-cpp-python, whose Python runs this file.

    python run_llama_cpp.py JOB.json

See jobs.py for the job and the result. Settings: flash_attn, bf16_kv, mmap, unified (booleans; see SETTINGS there).
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from placement import Probe, load_probe

GGML_TYPE_F16, GGML_TYPE_BF16 = 1, 30
UBATCH = 512


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    setting = job["setting"]
    llama.llama_log_set(_SILENT, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.use_mmap = setting["mmap"]
    model = llama.llama_model_load_from_file(job["model"].encode(), model_params)
    prompts = job["prompts"]
    context = llama.llama_init_from_model(model, context_params(job, len(prompts), len(prompts[0])))
    if not context:
        raise SystemExit("llama.cpp made no context")
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    probe = load_probe(job["probe"])
    run(context, vocab, probe, job["warmup_prompts"], job["warmup_tokens"])
    runs = [run(context, vocab, probe, each, job["new_tokens"]) for each in job["repeats"]]
    result = {
        "versions": {"llama-cpp-python": version("llama-cpp-python")},
        "system": llama.llama_print_system_info().decode(),
        "times": [times for times, _, _, _ in runs],
        "round_trips": [trips for _, trips, _, _ in runs],
        "tokens": runs[0][2],
        "logprobs": runs[0][3],
    }
    Path(job["output"]).write_text(json.dumps(result))
    return 0


_SILENT: Any = llama.llama_log_callback(lambda level, text, data: None)


def context_params(job: dict[str, Any], count: int, length: int) -> Any:
    """Room for every sequence, and all prompts in one logical batch, split into micro-batches of 512 tokens."""
    setting = job["setting"]
    params = llama.llama_context_default_params()
    params.n_seq_max = count
    per_sequence = -(-(length + job["new_tokens"]) // 256) * 256
    params.n_ctx = count * per_sequence
    params.n_batch = max(2048, count * length)
    params.n_ubatch = UBATCH
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn_type = 1 if setting["flash_attn"] else 0
    params.type_k = params.type_v = GGML_TYPE_BF16 if setting["bf16_kv"] else GGML_TYPE_F16
    params.kv_unified = setting["unified"]
    params.no_perf = True
    return params


def run(
    context: Any, vocab: int, probe: Probe, prompts: list[list[int]], new_tokens: int
) -> tuple[list[float], list[float], list[int], Any]:
    """Greedy tokens for all prompts at once: seconds (to the first tokens, from there to the last), round trips before,
    between and after, the first tokens, and their most likely candidates as {id: log-probability}."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    count, length = len(prompts), len(prompts[0])
    batch = llama.llama_batch_init(count * length, 0, 1)
    for sequence, prompt in enumerate(prompts):
        for i, token in enumerate(prompt):
            put(batch, sequence * length + i, token, i, sequence, i == length - 1)
    batch.n_tokens = count * length
    rows = [(sequence + 1) * length - 1 for sequence in range(count)]
    before, start = probe(), time.perf_counter()
    tokens = step(context, batch, rows, vocab)
    first = time.perf_counter() - start
    firsts, candidates = tokens, [best(context, row, vocab) for row in rows]
    between, begin = probe(), time.perf_counter()
    for position in range(length, length + new_tokens - 1):
        for sequence, token in enumerate(tokens):
            put(batch, sequence, token, position, sequence, True)
        batch.n_tokens = count
        tokens = step(context, batch, range(count), vocab)
    rest = time.perf_counter() - begin
    llama.llama_batch_free(batch)
    return [first, rest], [before, between, probe()], firsts, candidates


def put(batch: Any, i: int, token: int, position: int, sequence: int, wanted: bool) -> None:
    batch.token[i] = token
    batch.pos[i] = position
    batch.n_seq_id[i] = 1
    batch.seq_id[i][0] = sequence
    batch.logits[i] = wanted


def step(context: Any, batch: Any, rows: Any, vocab: int) -> list[int]:
    """The most likely token of each row, once the step is complete."""
    if llama.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    return [int(logits(context, row, vocab).argmax()) for row in rows]


def logits(context: Any, row: int, vocab: int) -> Any:
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, row), shape=(vocab,))


def best(context: Any, row: int, vocab: int) -> dict[int, float]:
    values = logits(context, row, vocab).astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return {int(i): float(values[i]) for i in np.argsort(-values)[:20]}


if __name__ == "__main__":
    sys.exit(main())
