"""Plots and pages: numbers in the right places, well-formed, self-contained."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from pelton.inflight_batcher.bench.svg import Bar, Line, bar_chart, cumulative, label, line_chart, ticks


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.0, 3.0, [3.0]),
        (97.0, 132.0, [100, 110, 120, 130]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "value, text", [(1234567.0, "1.23M"), (12345.0, "12.3k"), (0.25, "0.25"), (2e9, "2G"), (7.0, "7")]
)
def test_labels_are_short(value: float, text: str) -> None:
    assert label(value) == text


def parsed(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)


def test_a_line_stays_inside_its_frame() -> None:
    figure = parsed(line_chart("Title <&>", [Line("a & b", [(1, 5), (2, 50), (3, 20)])], "x", "y"))
    (points,) = [e.get("points") for e in figure.iter("polyline")]
    pixels = [tuple(map(float, pair.split(","))) for pair in str(points).split()]
    assert [x for x, _ in pixels] == pytest.approx([62, 304, 546])
    assert all(14 <= y <= 236 for _, y in pixels)
    assert pixels[1][1] < pixels[2][1] < pixels[0][1]  # larger is higher up
    assert figure.findtext("figcaption") == "Title <&>"
    assert "a & b" in "".join(figure.itertext())


def test_one_point_and_none() -> None:
    assert "polyline" in line_chart("t", [Line("a", [(1, 0)])], "x", "y")
    assert "nothing was measured" in line_chart("t", [Line("a", [])], "x", "y")
    assert "nothing was measured" in bar_chart("t", [], "%")


def test_bars_show_their_share_of_the_roof() -> None:
    figure = parsed(bar_chart("t", [Bar("decode", 45, 60), Bar("free", 10)], "GB/s"))
    text = "".join(figure.itertext())
    assert "45 GB/s (75 %)" in text
    assert "10 GB/s" in text
    bars = [float(str(e.get("width"))) for e in figure.iter("rect")]
    assert bars[0] / bars[1] == pytest.approx(4.5, rel=0.01)
    assert len(list(figure.iter("line"))) == 1


def test_cumulative() -> None:
    assert cumulative([3.0, 1.0, 2.0, 4.0]) == [(1.0, 25.0), (2.0, 50.0), (3.0, 75.0), (4.0, 100.0)]
    many = cumulative([float(i) for i in range(10_000)])
    assert len(many) == 400
    assert many[0][0] == 0.0
    assert many[-1] == (9999.0, 100.0)
    assert cumulative([]) == []


def test_a_count_goes_in_steps() -> None:
    figure = parsed(line_chart("t", [Line("requests", [(0, 1), (2, 3), (4, 0)], steps=True)], "s", "requests"))
    (points,) = [e.get("points") for e in figure.iter("polyline")]
    pixels = [tuple(map(float, pair.split(","))) for pair in str(points).split()]
    assert len(pixels) == 5
    for before, after in zip(pixels, pixels[1:], strict=False):
        assert before[0] == after[0] or before[1] == after[1]


@pytest.mark.parametrize("length", [3, 28, 40, 90])
def test_names_and_values_of_bars_stay_inside(length: int) -> None:
    bars = [Bar("n" * length, 134.2, 100.0), Bar("n", 3.0, 100.0)]
    for unit in ("%", "GB/s"):
        figure = parsed(bar_chart("t", bars, unit))
        (svg,) = figure.iter("svg")
        width = float(str(svg.get("viewBox")).split()[2])
        for text in figure.iter("text"):
            long = float(text.get("textLength") or 7.2 * len(str(text.text)))
            x = float(str(text.get("x")))
            begin, end = (x - long, x) if text.get("text-anchor") == "end" else (x, x + long)
            assert begin >= 0
            assert end <= width


def test_only_several_curves_have_a_legend() -> None:
    one, two = (line_chart("t", [Line(n, [(0, 1), (1, 2)]) for n in names], "x", "y") for names in ("a", "ab"))
    assert 'class="key"' not in one
    assert two.count('class="key"') == 2
