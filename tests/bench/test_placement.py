"""Runs in which the CPUs moved are repeated and left out; the others stand beside runs of their placement."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pelton.cli import main
from pelton.commands.measuring import roof_text
from pelton.inflight_batcher.bench import latency
from pelton.inflight_batcher.bench.latency import LatencyOptions, LatencyResult, Run, measure_latency
from pelton.inflight_batcher.bench.report import RoofInfo, Roofline
from pelton.inflight_batcher.bench.session import Session
from pelton.runtime.drivers.cpu.roofs import Roofs

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench_limits"


class Meter:
    """Samples with these round trips (ns), one after the other; CPUs apart read 60 GB/s together, near ones 36."""

    def __init__(self, trips: list[float]) -> None:
        self.trips = trips

    def sample(self, passes: int = 9) -> Roofs:
        trip = self.trips.pop(0)
        return Roofs(2, 60e9 if trip > 150 else 36e9, {"fma_f32": 1e12}, trip * 1e-9)


@pytest.fixture(scope="module")
def session(engine: Path) -> Iterator[Session]:
    with Session(engine, threads=1, roof_bytes=1 << 20) as session:
        yield session


class Measured:
    """A measurement of ``iterations`` runs between samples with ``trips``; ``all_runs`` has the left-out ones too.

    Tokens of run ``late`` come 1000 s late.
    """

    def __init__(
        self, session: Session, monkeypatch: pytest.MonkeyPatch, trips: list[float], iterations: int, late: int = -1
    ) -> None:
        self.all_runs: list[Run] = []
        self.said: list[str] = []
        self.meter = Meter(trips)
        original = latency.run_once

        def run_once(session: Session, options: LatencyOptions, index: int) -> Run:
            run = original(session, options, index)
            for timeline in run.timelines if index == late else ():
                timeline.tokens = [at + 1000 for at in timeline.tokens]
            self.all_runs.append(run)
            return run

        monkeypatch.setattr(latency, "run_once", run_once)
        monkeypatch.setattr(session, "meter", self.meter)
        self.result: LatencyResult = measure_latency(
            session, LatencyOptions(2, 8, 4, iterations, warmup=0), self.said.append
        )

    @property
    def roofline(self) -> Roofline:
        line = self.result.report.roofline
        assert line is not None
        return line

    @property
    def counted(self) -> list[int]:
        """Which of all runs count."""
        return [index for index, run in enumerate(self.all_runs) if any(run is one for one in self.result.runs)]


def test_steady_runs_all_count(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(session, monkeypatch, [50, 56, 48, 52], 3)
    assert measured.counted == [0, 1, 2]
    assert measured.said[-1].startswith("run 3 of 3")
    assert not any("moved" in line for line in measured.said)
    line = measured.roofline
    assert line.moved_runs == 0
    (place,) = line.placements
    # Means of two samples are 53, 52 and 50.
    assert (place.core_round_trip_ns, place.runs, place.read_gb_s) == (pytest.approx(52), 3, pytest.approx(36))
    assert (place.prefill, place.decode) == (line.prefill, line.decode)
    assert line.roofs.core_round_trip_ns == pytest.approx(52)


def test_a_run_that_moved_is_repeated_and_left_out(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(session, monkeypatch, [50, 52, 300, 302, 306], 3, late=1)
    assert measured.meter.trips == []
    assert len(measured.all_runs) == 4
    assert measured.counted == [0, 2, 3]
    assert [line.partition(":")[0] for line in measured.said] == [
        "run 1 of 3",
        "a run is left out",
        "run 2 of 3",
        "run 3 of 3",
    ]
    assert measured.said[1].endswith("CPUs moved (round trip 52 to 300 ns)")
    report, line = measured.result.report, measured.roofline
    assert report.request_info.num_requests == report.dataset.num_requests == 6
    assert report.performance.total_latency_ms < 1e6
    for percentiles in (report.streaming_metrics.ttft_percentiles, report.performance.request_latency_percentiles_ms):
        assert percentiles is not None
        assert percentiles.maximum < 1e6
    assert line.prefill is not None
    assert line.prefill.tokens_per_s > 16 / 1000
    assert line.moved_runs == 1


def test_runs_stand_by_placement(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steady in three placements, the farthest first; the last two runs go with the first.
    measured = Measured(session, monkeypatch, [300, 304, 52, 54, 20, 22, 310, 314, 320], 5)
    assert measured.counted == [0, 2, 4, 6, 7]
    line = measured.roofline
    places = [(place.core_round_trip_ns, place.runs, place.read_gb_s) for place in line.placements]
    expected = [(21, 1, 36), (53, 1, 36), (312, 3, 60)]
    assert places == [pytest.approx(place) for place in expected]
    assert line.roofs.read_gb_s == pytest.approx(60)
    for place in line.placements:
        for rates in (place.prefill, place.decode):
            assert rates is not None
            # Every run of a placement stands beside the same roof.
            assert rates.share_of_read == pytest.approx(rates.read_gb_s / place.read_gb_s)
            assert rates.share_of_peak == pytest.approx(rates.gflop_s / 1e3)
    rates = [place.decode.tokens_per_s for place in line.placements if place.decode is not None]
    assert line.decode is not None
    assert min(rates) <= line.decode.tokens_per_s <= max(rates)
    assert len(set(rates)) == 3


def test_too_few_steady_runs_are_enough(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(session, monkeypatch, [50, 300, 50, 51, 300, 50, 300], 3)
    assert measured.meter.trips == []
    assert len(measured.all_runs) == 6
    assert measured.counted == [2]
    assert measured.roofline.moved_runs == 5
    assert [place.runs for place in measured.roofline.placements] == [1]
    assert measured.result.report.request_info.num_requests == 2


def test_all_count_where_none_was_steady(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(session, monkeypatch, [50, 300, 50, 300, 50], 2)
    assert measured.counted == [0, 1, 2, 3]
    assert measured.said[-1] == "CPUs moved in every run: all count"
    line = measured.roofline
    assert (line.moved_runs, line.placements) == (4, ())
    assert line.roofs.read_gb_s == pytest.approx(48)
    assert line.decode is not None
    assert measured.result.report.request_info.num_requests == 8


LATENCY = ["bench", "latency", "{}", "--input-len", "8", "--output-len", "3", "--warmup", "0", "--threads", "1"]


@pytest.mark.parametrize(
    "trips, iterations, shown, not_shown",
    [
        ([50, 52, 300, 302], 2, ["2 runs", "left out, as CPUs moved: 1 of the runs", "51 ns", "301 ns"], []),
        ([50, 52, 54], 2, ["2 runs", "round trip 52 ns"], ["left out", "where the CPUs were"]),
        ([50, 300, 50], 1, ["2 runs", "CPUs moved in every run"], ["where the CPUs were"]),
        ([50, 300, 302, 50, 300], 2, ["1 runs", "left out, as CPUs moved: 3 of the runs"], ["where the CPUs were"]),
    ],
)
def test_what_is_printed(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trips: list[float],
    iterations: int,
    shown: list[str],
    not_shown: list[str],
) -> None:
    monkeypatch.setattr("pelton.inflight_batcher.bench.session.RoofMeter", lambda *_, **__: Meter(list(trips)))
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    run = [*(argument.format(engine) for argument in LATENCY), "--iterations", str(iterations)]
    assert main([*run, *files]) == 0
    out, err = capsys.readouterr()
    for text in shown:
        assert text in out
    for text in not_shown:
        assert text not in out
    line = json.loads((tmp_path / "a.json").read_bytes())["roofline"]
    page = (tmp_path / "a.html").read_text()
    assert line["roofs"]["core_round_trip_ns"] > 0
    assert "round trip" in page
    assert ("CPUs moved" in page) == ("CPUs moved" in err) == (line["moved_runs"] > 0)
    rows = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td><td>(\d+)</td>", page.partition("round trip, ns")[2])
    expected = [("51", "1", "36"), ("301", "1", "60")] if len(line["placements"]) > 1 else []
    assert rows[: len(expected) or None] == expected


def test_roofs_of_one_thread_have_no_round_trip() -> None:
    def text(trip: float) -> str:
        return roof_text(
            RoofInfo(read_gb_s=33.0, core_round_trip_ns=trip, peaks_gop_s={}, instructions={}, compute_peak="")
        )

    assert "33.0 GB/s, CPUs' round trip 52 ns;" in text(52.4)
    assert "round trip" not in text(0.0)


# -- scripts/bench_limits -----------------------------------------------------------------------------


def place(trip: float, runs: int, rate: float | None) -> dict[str, Any]:
    decode = None if rate is None else {"tokens_per_s": rate}
    return {"core_round_trip_ns": trip, "runs": runs, "prefill": None, "decode": decode}


@pytest.mark.parametrize(
    "places, rate, trip",
    [
        ([place(52.2, 5, 1.0)], "40.0", "52 ns"),
        ([place(52.2, 3, 34.94), place(301.0, 2, 56.8)], "34.9 / 56.8", "52 ns x 3, 301 ns x 2"),
        ([place(52.2, 3, None), place(301.0, 2, 56.8)], "- / 56.8", "52 ns x 3, 301 ns x 2"),
        ([], "40.0", "CPUs moved"),
    ],
)
def test_limits_name_placements(places: list[dict[str, Any]], rate: str, trip: str) -> None:
    script = runpy.run_path(str(SCRIPT))
    figures = {"decode_tokens_per_s": 40.0, "decode_read_gb_s": 30.0, "decode_gflop_s": 9.0}
    figures |= {"decode_share_of_read": 0.9, "roofline": {"placements": places}}
    cells = [cell.strip() for cell in script["row"](script["LINES"][0], figures).split("|")]
    assert cells[2:] == [rate, "30.0", "9.0", trip, "streaming read", "90.0%", "88%", ""]


@pytest.mark.parametrize(
    "read, peak, shown",
    [(0.8, 0.03, ["streaming read, which limits here", "80.0%"]), (0.5, 0.6, ["dot-product peak", "60.0%"])],
)
def test_limits_are_of_the_roof_that_leaves_less_room(read: float, peak: float, shown: list[str]) -> None:
    script = runpy.run_path(str(SCRIPT))
    figures = {"decode_share_of_read": read, "decode_share_of_peak": peak, "roofline": {"placements": []}}
    line = next(line for line in script["LINES"] if line.name == "decode, 16 sequences")
    cells = [cell.strip() for cell in script["row"](line, figures).split("|")]
    assert cells[-4:-2] == shown


def test_limits_of_a_tiny_engine(engine: Path, tmp_path: Path) -> None:
    options = ["--rounds", "1", "--threads", "1", "--json", str(tmp_path / "a.json")]
    done = subprocess.run([sys.executable, SCRIPT, engine, *options], capture_output=True, text=True, check=True)
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {9}
    assert any("left out: batch-size" in line for line in table)
    measured = json.loads((tmp_path / "a.json").read_bytes())
    first = measured["decode, batch 1, 128 tokens of context"]
    assert first["decode_tokens_per_s"] > 0
    assert [place["runs"] for place in first["roofline"]["placements"]] == [1]


def test_the_script_shows_one_placement_of_one_thread() -> None:
    command = [sys.executable, str(SCRIPT.with_name("bench_placement")), "--seconds", "0.05", "--threads", "1"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"\| 0-0 ns \| \d+ \| [\d.]+ \(\d+-\d+\) \| .*fma_f32 \d+.* \|", lines[2])
