"""Percentiles of measured values, and their sections in reports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sample, in the sample's unit. Percentiles lie linearly between neighbours (p50 is the median)."""

    average: float
    minimum: float
    maximum: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(values: Sequence[float], scale: float = 1.0) -> Percentiles | None:
    """Statistics of ``values`` times ``scale``; None of no values."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64) * scale
    p50, p90, p95, p99 = (float(x) for x in np.percentile(array, (50, 90, 95, 99)))
    return Percentiles(
        average=float(array.mean()),
        minimum=float(array.min()),
        maximum=float(array.max()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def median(values: Sequence[float]) -> float | None:
    """The median; None of no values."""
    return float(np.median(values)) if len(values) else None
