"""When each request's tokens came, and the sections of a report that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .report import DatasetInfo, Performance, RequestInfo, StreamingMetrics
from .stats import Percentiles, percentiles


@dataclass
class Timeline:
    """One request. Times in seconds; ``tokens`` has one for each output token."""

    arrival: float
    input_tokens: int
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.tokens[-1] - self.arrival

    @property
    def generation(self) -> float:
        """From the first token to the last."""
        return self.tokens[-1] - self.tokens[0]

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


def request_info(timelines: Sequence[Timeline], seconds: float) -> RequestInfo:
    """``seconds``: from the first arrival to the last token."""
    count = len(timelines)
    return RequestInfo(
        num_requests=count,
        avg_num_concurrent_requests=sum(t.latency for t in timelines) / seconds,
        avg_input_length=sum(t.input_tokens for t in timelines) / count,
        avg_output_length=sum(len(t.tokens) for t in timelines) / count,
    )


def performance(timelines: Sequence[Timeline], seconds: float) -> Performance:
    """Throughput of ``seconds``, and request latencies."""
    count, outputs = len(timelines), sum(len(t.tokens) for t in timelines)
    inputs = sum(t.input_tokens for t in timelines)
    return Performance(
        total_latency_ms=seconds * 1e3,
        avg_request_latency_ms=sum(t.latency for t in timelines) / count * 1e3,
        request_throughput_req_s=count / seconds,
        system_output_throughput_tok_s=outputs / seconds,
        system_total_throughput_tok_s=(inputs + outputs) / seconds,
        output_throughput_per_user_tok_s=sum(len(t.tokens) / t.latency for t in timelines) / count,
        request_latency_percentiles_ms=percentiles([t.latency for t in timelines], 1e3),
    )


def streaming_metrics(timelines: Sequence[Timeline]) -> StreamingMetrics:
    """Latencies of tokens."""
    long = [t for t in timelines if t.generation > 0]
    speeds = [(len(t.tokens) - 1) / t.generation for t in long]
    tpots = [t.generation / (len(t.tokens) - 1) for t in long]
    ttfts = [t.ttft for t in timelines]
    return StreamingMetrics(
        token_output_speed_tok_s=sum(speeds) / len(speeds) if speeds else None,
        avg_ttft_ms=sum(ttfts) / len(ttfts) * 1e3,
        avg_tpot_ms=sum(tpots) / len(tpots) * 1e3 if tpots else None,
        ttft_percentiles=percentiles(ttfts, 1e3),
        itl_percentiles=percentiles([gap for t in timelines for gap in t.itl], 1e3),
        tpot_percentiles=percentiles(tpots, 1e3),
        gen_tps_percentiles=percentiles(speeds),
        generation_latency_percentiles=percentiles([t.generation for t in long], 1e3),
    )


def dataset_info(source: str, timelines: Sequence[Timeline]) -> DatasetInfo:
    """Lengths of what ran."""

    def stats(values: list[int]) -> Percentiles | None:
        return percentiles(values)

    return DatasetInfo(
        source=source,
        num_requests=len(timelines),
        isl_stats=stats([t.input_tokens for t in timelines]),
        osl_stats=stats([len(t.tokens) for t in timelines]),
        seq_len_stats=stats([t.input_tokens + len(t.tokens) for t in timelines]),
    )
