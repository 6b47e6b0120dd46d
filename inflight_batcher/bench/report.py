"""Reports as data: sections and names as in trtllm-bench's JSON, and what it has no name for beside them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from ...runtime.drivers.cpu.host import host_features
from ...runtime.drivers.cpu.roofs import Roofs, instructions
from ...runtime.version import VERSION
from .session import Session
from .stats import Percentiles

#: Features worth naming in a report: those that kernels are chosen by.
_TELLING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "asimd", "sve")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    engine: str
    identity: str
    version: str
    backend: str  # target key
    dtype: str  # of products
    kv_cache_dtype: str
    weight_bytes: int
    max_batch_size: int
    max_num_tokens: int
    max_sequence_length: int
    scheduling_policy: str


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # CPU model
    cpus: int  # that this process may use
    threads: int  # that ran the engine
    memory_bytes: int
    features: tuple[str, ...]
    system: str
    python: str


class RoofInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of what the machine did at most, measured in turns with the runs."""

    read_gb_s: float
    core_round_trip_ns: float  # of a cache line between the CPUs; 0 with one thread
    peaks_gop_s: dict[str, float]
    instructions: dict[str, str]
    compute_peak: str  # the one that the engine's products are held against


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    avg_num_concurrent_requests: float
    avg_input_length: float
    avg_output_length: float


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    total_latency_ms: float
    avg_request_latency_ms: float
    request_throughput_req_s: float
    system_output_throughput_tok_s: float
    system_total_throughput_tok_s: float
    output_throughput_per_user_tok_s: float
    request_latency_percentiles_ms: Percentiles | None


class StreamingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """None where no request had a second token."""

    token_output_speed_tok_s: float | None  # of one user after the first token, on average
    avg_ttft_ms: float
    avg_tpot_ms: float | None
    ttft_percentiles: Percentiles | None  # ms
    itl_percentiles: Percentiles | None  # ms, between neighbouring tokens
    tpot_percentiles: Percentiles | None  # ms, a request's mean
    gen_tps_percentiles: Percentiles | None  # tokens/s of a request after its first token
    generation_latency_percentiles: Percentiles | None  # ms from the first token to the last


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    num_requests: int
    isl_stats: Percentiles | None  # tokens
    osl_stats: Percentiles | None
    seq_len_stats: Percentiles | None


class PhaseRates(msgspec.Struct, frozen=True, kw_only=True):
    """A phase beside the roofs. Bytes are weights and K/V that must be read; shares come from the roofs measured just
    before and after each run (medians of those), so they may differ from the quotient of the medians shown."""

    steps: int  # of one run
    tokens_per_s: float
    read_gb_s: float
    gflop_s: float
    share_of_read: float
    share_of_peak: float


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Runs between which the CPUs lay alike, by their round trips; medians of these runs."""

    core_round_trip_ns: float
    runs: int
    read_gb_s: float  # the roof
    prefill: PhaseRates | None
    decode: PhaseRates | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """``moved_runs``: how many the CPUs moved in. They are left out of everything, unless they moved in all: then all
    count, and there are no placements."""

    prefill: PhaseRates | None
    decode: PhaseRates | None  # steps in which all sequences decode
    python_between_steps_us: float | None
    roofs: RoofInfo
    moved_runs: int
    placements: tuple[Placement, ...]  # nearest CPUs first


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``kind`` is latency or throughput; ``roofline`` is of latency runs."""

    kind: str
    engine: EngineInfo
    machine: MachineInfo
    request_info: RequestInfo
    performance: Performance
    streaming_metrics: StreamingMetrics
    dataset: DatasetInfo
    roofline: Roofline | None = None


def engine_info(session: Session) -> EngineInfo:
    manifest, plan = session.engine.manifest, session.plan
    kv = sorted({state.dtype.value for state in plan.states if state.kind == "paged_kv"})
    return EngineInfo(
        model=manifest.model.name,
        engine=str(session.path),
        identity=session.engine.identity,
        version=VERSION,
        backend=session.target,
        dtype=session.compute.value,
        kv_cache_dtype=",".join(kv),
        weight_bytes=sum(spec.nbytes for spec in session.engine.tensors.values()),
        max_batch_size=plan.ranges.max_batch_size,
        max_num_tokens=plan.ranges.max_num_tokens,
        max_sequence_length=plan.ranges.max_seq_len,
        scheduling_policy=session.loop.scheduler.config.capacity_policy.value,
    )


def machine_info(threads: int) -> MachineInfo:
    return MachineInfo(
        name=_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        threads=threads,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        features=tuple(name for name in _TELLING if name in host_features()),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def roof_info(roofs: Roofs, compute_peak: str) -> RoofInfo:
    return RoofInfo(
        read_gb_s=roofs.read / 1e9,
        core_round_trip_ns=roofs.round_trip * 1e9,
        peaks_gop_s={kind: rate / 1e9 for kind, rate in roofs.peaks.items()},
        instructions=instructions(),
        compute_peak=compute_peak,
    )


def moved_text(line: Roofline) -> str:
    """What there is to say of runs in which the CPUs moved; "" of none."""
    if line.moved_runs and not line.placements:
        return "CPUs moved in every run: all count"
    return f"left out, as CPUs moved: {line.moved_runs} of the runs" if line.moved_runs else ""


def to_json(document: Any) -> bytes:
    """Indented JSON of a report or a list of them."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def sweep_document(reports: list[Report]) -> Any:
    """One report as it is; of several, engine and machine once and the rest under "sweep"."""
    if len(reports) == 1:
        return reports[0]
    points = [msgspec.to_builtins(report) for report in reports]
    common = {"kind": "sweep", "engine": points[0]["engine"], "machine": points[0]["machine"]}
    return common | {"sweep": [{k: v for k, v in p.items() if k not in ("engine", "machine")} for p in points]}
