"""What the machine allows at this moment: the time that reading and products would take at its roofs.

    python run_limit.py JOB.json

See jobs.py for the job (its model is pelton's engine) and the result, which has no tokens. A step takes at least its
bytes over the rate of a streaming read and its operations over the peak of the dot product; which of the two, the
sizes say. Activations, and the step's other work, count as nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pelton.inflight_batcher.bench.costs import CostModel, StepShape, main_compute
from pelton.runtime.drivers.cpu.host import select_target
from pelton.runtime.drivers.cpu.roofs import RoofMeter
from pelton.runtime.format.engine_reader import EngineFile
from scripts.compare.placement import load_probe


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    probe, meter = load_probe(job["probe"]), RoofMeter(job["threads"])
    before = probe()
    roofs = meter.sample()
    after = probe()
    with EngineFile.open(job["model"], verify_weights="off") as engine:
        plan = engine.plan(select_target(engine.manifest.targets).key)
    costs = CostModel(plan)
    kind, peak = roofs.peak_of(main_compute(plan))
    count, length = len(job["prompts"]), len(job["prompts"][0])

    def seconds(start: int, tokens: int) -> float:
        cost = costs.step(StepShape((start,) * count, (tokens,) * count, count))
        return max(cost.read_bytes / roofs.read, cost.flops / peak)

    rest = sum(seconds(length + i, 1) for i in range(job["new_tokens"] - 1))
    result: dict[str, Any] = {
        "versions": {},
        "system": f"streaming read {roofs.read / 1e9:.1f} GB/s, {kind} {peak / 1e9:.0f} GFLOP/s",
        "times": [[seconds(0, length), rest]],
        "round_trips": [[before, None, after]],
        "tokens": [],
        "logprobs": None,
    }
    Path(job["output"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
