"""Percentiles and timelines against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.inflight_batcher.bench.costs import StepShape
from pelton.inflight_batcher.bench.recorder import RecordingDriver, StepRecord, gaps_us
from pelton.inflight_batcher.bench.stats import median, percentiles
from pelton.inflight_batcher.bench.timeline import (
    Timeline,
    dataset_info,
    performance,
    request_info,
    streaming_metrics,
)


def test_percentiles_lie_between_neighbours() -> None:
    p = percentiles([4.0, 1.0, 3.0, 2.0, 5.0], scale=10.0)
    assert p is not None
    assert (p.minimum, p.maximum, p.average, p.p50) == (10.0, 50.0, 30.0, 30.0)
    assert p.p90 == pytest.approx(46.0)  # 0.9 of the way from index 0 to index 4 is 3.6
    assert p.p95 == pytest.approx(48.0)
    assert p.p99 == pytest.approx(49.6)


def test_of_one_value_and_of_none() -> None:
    one = percentiles([7.0])
    assert one is not None
    assert {one.minimum, one.maximum, one.average, one.p50, one.p99} == {7.0}
    assert percentiles([]) is None
    assert median([]) is None
    assert median([3.0, 1.0, 2.0, 4.0]) == 2.5


# Arrives at 1, first token at 3, then 4 and 6; and one that arrives at 2 and has one token at 4.
TIMELINES = [Timeline(1.0, 10, [3.0, 4.0, 6.0]), Timeline(2.0, 20, [4.0])]


def test_latencies_of_tokens() -> None:
    metrics = streaming_metrics(TIMELINES)
    assert metrics.avg_ttft_ms == 2000.0
    assert metrics.avg_tpot_ms == 1500.0  # of the only request with more than one token
    assert metrics.token_output_speed_tok_s == pytest.approx(2 / 3)
    assert metrics.itl_percentiles is not None
    assert metrics.itl_percentiles.p50 == 1500.0
    assert metrics.itl_percentiles.maximum == 2000.0
    assert metrics.generation_latency_percentiles is not None
    assert metrics.generation_latency_percentiles.average == 3000.0


def test_throughput() -> None:
    speed, info = performance(TIMELINES, 5.0), request_info(TIMELINES, 5.0)
    assert speed.total_latency_ms == 5000.0
    assert speed.request_throughput_req_s == pytest.approx(0.4)
    assert speed.system_output_throughput_tok_s == pytest.approx(0.8)
    assert speed.system_total_throughput_tok_s == pytest.approx(6.8)
    assert speed.avg_request_latency_ms == 3500.0
    assert speed.output_throughput_per_user_tok_s == pytest.approx((3 / 5 + 1 / 2) / 2)
    assert (info.num_requests, info.avg_input_length, info.avg_output_length) == (2, 15.0, 2.0)
    assert info.avg_num_concurrent_requests == pytest.approx(7 / 5)


def test_lengths() -> None:
    info = dataset_info("somewhere", TIMELINES)
    assert info.isl_stats is not None
    assert info.osl_stats is not None
    assert info.seq_len_stats is not None
    assert (info.isl_stats.average, info.osl_stats.maximum, info.seq_len_stats.minimum) == (15.0, 3.0, 13.0)


def test_single_tokens_have_no_generation() -> None:
    metrics = streaming_metrics(TIMELINES[1:])
    assert metrics.itl_percentiles is None
    assert metrics.avg_tpot_ms is None
    assert metrics.token_output_speed_tok_s is None


def test_gaps_leave_the_recording_out() -> None:
    shape = StepShape((0,), (1,), 1)
    records = [
        StepRecord(0, 1000, 1500, shape),
        StepRecord(4500, 9000, 9100, shape),
        StepRecord(10100, 11000, 11000, shape),
    ]
    assert gaps_us(records) == [3.0, 1.0]
    assert gaps_us(records[:1]) == []


def test_gaps_count_the_drivers_own_python() -> None:
    shape = StepShape((0,), (1,), 1)
    records = [
        StepRecord(0, 1000, 1500, shape, native=(200, 900)),
        StepRecord(4500, 9000, 9100, shape, native=(4800, 8800)),
    ]
    assert gaps_us(records) == [3.4]  # 3000 between the driver's calls, 100 and 300 inside of it


def test_the_recorder_notes_shapes() -> None:
    class Inner:
        plan = None

        def execute(self, inputs: object) -> str:
            return "handle"

    class Step:
        query_start = np.asarray([0, 3, 4], np.int32)
        positions = np.asarray([5, 6, 7, 0], np.int32)
        num_rows = 2

    recorder = RecordingDriver(Inner())  # type: ignore[arg-type]
    assert recorder.execute(Step()) == "handle"  # type: ignore[arg-type, comparison-overlap]
    (record,) = recorder.take()
    assert record.shape == StepShape((5, 0), (3, 1), 2)
    assert record.begin <= record.end <= record.resume
    assert not record.decodes_only
    assert recorder.take() == []
