"""`pelton profile`: where a step's time goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .measuring import check_outputs, number, percent, roof_text, write

if TYPE_CHECKING:
    from ..inflight_batcher.bench.profile import Profile, Row

HELP = "Show time by kernel and by layer beside what this machine can do."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file")
    parser.add_argument("--phase", choices=["prefill", "decode"], default="decode", help="default: decode")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens (default 128)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="decode steps, or prefills (default 10)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the CPUs this process may use")
    parser.add_argument("--max-kv-tokens", type=int, metavar="N", help="size of the KV cache")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts (default 0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables for programs")


def execute(arguments: argparse.Namespace) -> int:
    from ..inflight_batcher.bench.profile import ProfileOptions, measure_profile
    from ..inflight_batcher.bench.report import to_json
    from ..inflight_batcher.bench.session import Session
    from ..inflight_batcher.bench.trace import encode_trace, trace_events

    check_outputs(arguments.trace, arguments.json)
    options = ProfileOptions(
        arguments.phase, arguments.batch_size, arguments.input_len, arguments.steps, arguments.seed
    )
    with Session(arguments.engine, threads=arguments.threads, max_kv_tokens=arguments.max_kv_tokens) as session:
        profile, steps = measure_profile(session, options)
        write(arguments.trace, lambda: encode_trace(trace_events(session, steps)))
    _print(profile)
    write(arguments.json, lambda: to_json(profile))
    return 0


def _print(profile: Profile) -> None:
    from .console import print_line, print_table, stdout_console

    console = stdout_console()
    what = f"{profile.phase}, batch {profile.batch_size}, {profile.input_len} tokens of prompt"
    one = "step" if profile.phase == "decode" else "prefill of the batch"
    line = (
        f"one {one}: {profile.turn_us:.1f} µs in the driver, of it {profile.outside_launches_us:.1f} outside launches"
    )
    if profile.python_between_steps_us is not None:
        line += f"; Python between steps {profile.python_between_steps_us:.1f} µs"
    threads = profile.machine.threads
    print_line(console, f"{profile.engine.model}: {what}; {threads} threads, medians of {profile.turns}\n{line}")
    print_table(console, "by kernel", _COLUMNS, map(_cells, [*profile.kernels, profile.total]), numbers=True)
    print_table(console, "by layer", _COLUMNS, map(_cells, profile.layers), numbers=True)
    print_line(console, f"roofs: {roof_text(profile.roofs)}")


_COLUMNS = (
    "", "launches", "µs", "share", "waiting µs", "weights, KV GB/s", "of reading", "activations GB/s",
    "GFLOP/s", "of peak",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    cells = [row.launches, row.time_us, percent(row.share), row.wait_us, row.read_gb_s, percent(row.share_of_read)]
    return [row.name, *map(number, [*cells, row.activation_gb_s, row.gflop_s, percent(row.share_of_peak)])]
