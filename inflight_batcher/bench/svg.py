"""Small plots as inline SVG. Colours and fonts come from the page (classes), so they follow its light or dark look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44
_SERIES = 6  # colours in the page
_LETTER = 7.2  # width of one on average, at the page's font size in plots
_LONGEST_NAME = 290  # of a bar; longer ones are set narrower


@dataclass(frozen=True)
class Line:
    """A curve; ``points`` are (x, y). ``steps``: a value holds until the next point, as a count does."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False

    def corners(self) -> list[tuple[float, float]]:
        """What the curve goes through."""
        if not self.steps:
            return list(self.points)
        held = [(after[0], before[1]) for before, after in pairwise(self.points)]
        return [*(corner for pair in zip(self.points, held, strict=False) for corner in pair), self.points[-1]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values in low..high, about ``count`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number as short as it may be: 1234567 -> "1.23M"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}"


class _Axes:
    """From values to pixels, and the frame around the plot."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], x_label: str, y_label: str) -> None:
        self.x, self.y = _widened(x), _widened(y)
        self.x_label, self.y_label = x_label, y_label

    def px(self, x: float) -> float:
        low, high = self.x
        return _LEFT + (x - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        low, high = self.y
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_ticks: bool = True) -> list[str]:
        parts = []
        for y in ticks(*self.y):
            at = self.py(y)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label(y)}</text>')
        for x in ticks(*self.x) if x_ticks else ():
            at = self.px(x)
            low = _HEIGHT - _BOTTOM
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{low}"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{low + 16}" text-anchor="middle">{label(x)}</text>')
        middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text class="axis" x="{middle_x}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        parts.append(
            f'<text class="axis" transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return parts


def _widened(span: tuple[float, float]) -> tuple[float, float]:
    low, high = span
    if high > low:
        return low, high
    return (0.0, high * 1.2) if high > 0 else (low - 1, low + 1)


def line_chart(title: str, lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Curves with a legend; the y axis begins at 0. Text if there is nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return _empty(title)
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    axes = _Axes((min(xs), max(xs)), (0.0, max(ys) * 1.05), x_label, y_label)
    parts = axes.frame()
    for index, line in enumerate(lines):
        colour = f"c{index % _SERIES}"
        path = " ".join(f"{axes.px(x):.1f},{axes.py(y):.1f}" for x, y in line.corners())
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        if len(line.points) <= 40 and not line.steps:
            parts += [
                f'<circle class="dot {colour}" cx="{axes.px(x):.1f}" cy="{axes.py(y):.1f}" r="2.5">'
                f"<title>{escape(line.name)}: {label(x)}, {label(y)}</title></circle>"
                for x, y in line.points
            ]
    return _figure(title, parts, [line.name for line in lines])


@dataclass(frozen=True)
class Bar:
    """A bar of ``value`` with a mark where ``roof`` is (None: no mark)."""

    name: str
    value: float
    roof: float | None = None


def bar_chart(title: str, bars: Sequence[Bar], unit: str) -> str:
    """Horizontal bars, each with its value; a mark shows the roof."""
    if not bars:
        return _empty(title)
    high = max([bar.value for bar in bars] + [bar.roof or 0.0 for bar in bars]) or 1.0
    widest = max(_LETTER * len(bar.name) for bar in bars)
    row, left = 26, round(min(widest, _LONGEST_NAME)) + 12
    height = row * len(bars) + 10
    texts = [_bar_text(bar, unit) for bar in bars]
    scale = (_WIDTH - left - 14 - _LETTER * max(map(len, texts))) / high
    parts = []
    for index, bar in enumerate(bars):
        y, text = 5 + index * row, texts[index]
        narrow = f' textLength="{_LONGEST_NAME}" lengthAdjust="spacingAndGlyphs"'
        fit = narrow if _LETTER * len(bar.name) > _LONGEST_NAME else ""
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 16}" text-anchor="end"{fit}>{escape(bar.name)}</text>')
        parts.append(
            f'<rect class="bar c0" x="{left}" y="{y + 3}" width="{max(bar.value * scale, 0.5):.1f}" height="{row - 9}">'
            f"<title>{escape(bar.name)}: {text}</title></rect>"
        )
        if bar.roof:
            at = left + bar.roof * scale
            parts.append(f'<line class="roof" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + row - 3}"/>')
        after = left + max(bar.value, bar.roof or 0.0) * scale + 6
        parts.append(f'<text class="tick" x="{after:.1f}" y="{y + 16}">{escape(text)}</text>')
    return _figure(title, parts, [], _WIDTH, height)


def _bar_text(bar: Bar, unit: str) -> str:
    if unit == "%":
        return f"{bar.value:.0f} %"
    return f"{label(bar.value)} {unit}" + (f" ({100 * bar.value / bar.roof:.0f} %)" if bar.roof else "")


def cumulative(values: Sequence[float], most: int = 400) -> list[tuple[float, float]]:
    """(value, percent of values at or below it), thinned to about ``most`` points."""
    ordered = sorted(values)
    count = len(ordered)
    indices = sorted({round(i * (count - 1) / max(1, min(most, count) - 1)) for i in range(min(most, count))})
    return [(ordered[i], 100 * (i + 1) / count) for i in indices]


def _figure(title: str, parts: list[str], legend: list[str], width: int = _WIDTH, height: int = _HEIGHT) -> str:
    keys = "".join(
        f'<span class="key"><i class="swatch c{i % _SERIES}"></i>{escape(name)}</span> '
        for i, name in enumerate(legend if len(legend) > 1 else ())
    )
    body = "\n".join(parts)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{body}</svg>' + (f"<div>{keys}</div>" if keys else "") + "</figure>"
    )


def _empty(title: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing was measured</p></figure>"
