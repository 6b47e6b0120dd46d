"""Where a virtual machine's CPUs lie at this moment: on one chiplet or on two. Standard library only: peers import it.

A host moves virtual CPUs between cores. Two that share a chiplet share its link to memory, and a pair on two chiplets
reads nearly twice as fast; a cache line's round trip between them tells which it is. Compute rates do not change.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

NEAR, FAR = "one chiplet", "two chiplets"
#: Between what was measured on Zen 4: 47 to 60 ns within a chiplet, 290 to 315 ns across.
_SPLIT_S = 150e-9
#: Longer than this, and the two threads did not run at the same time.
_MOST_S = 5e-6
#: Threads of a system that wait for work spin for a while, and would be in the way.
_SETTLE_S = 0.01

Probe = Callable[[], float]


def load_probe(library: str | Path | None) -> Probe:
    """A function that measures the round trip between the first two CPUs of this process, in seconds.

    It says 0.0 where there is only one, or no library.
    """
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if library is None or len(cpus) < 2:
        return lambda: 0.0
    function = ctypes.CDLL(str(library)).round_trip
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_double

    def probe() -> float:
        time.sleep(_SETTLE_S)
        return float(function(*cpus))

    return probe


def placement(*round_trips: float | None) -> str | None:
    """What these round trips (those that are not None) agree on; None if they do not, or say nothing."""
    found = {_one(trip) for trip in round_trips if trip is not None}
    return found.pop() if len(found) == 1 else None


def _one(trip: float) -> str | None:
    if not 0 < trip < _MOST_S:
        return None
    return NEAR if trip < _SPLIT_S else FAR


def wait_for(wanted: str, probe: Probe, patience: float) -> bool:
    """Wait until the CPUs lie so, at most ``patience`` seconds; whether they do."""
    end = time.monotonic() + patience
    while placement(probe()) != wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
