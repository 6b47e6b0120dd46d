"""What callgrind watches: one prompt of PROMPT tokens and some new ones, on one thread. Usage: ENGINE PROMPT NEW"""

from __future__ import annotations

import sys

from pelton.inflight_batcher import LLM, SamplingParams


def main() -> None:
    engine, prompt, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    with LLM(engine, threads=1, verify_weights="off", max_kv_tokens=1024) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [3 + i % 50 for i in range(prompt)]}], params)
    if len(output.outputs[0].token_ids) != new:
        sys.exit("the run gave fewer tokens than asked for")


main()
