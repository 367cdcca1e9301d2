"""How fast the machine is at the moment: the time of a fixed amount of plain Python.

The machines of our figures are virtual, and neighbours take up to half of their speed, for seconds or for hours.
Results that were taken at different paces cannot be compared.
"""

from __future__ import annotations

import statistics
from time import perf_counter_ns

_TIMES = 25
_STEPS = 20_000


def pace_us() -> float:
    """The median time of the fixed work, in microseconds; 25 runs take some 50 ms."""
    return statistics.median(_piece_ns() for _ in range(_TIMES)) / 1e3


def _piece_ns() -> int:
    began = perf_counter_ns()
    table: dict[int, int] = {}
    total = 0
    for step in range(_STEPS):
        total += table.get(step & 63, step)
        table[step & 127] = total & 1023
    return perf_counter_ns() - began
