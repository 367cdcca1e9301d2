"""Memory pressure of a machine, from cache counters or from the slowdown of a known workload. Pure.

Pressure is the used part of the memory bandwidth, from 0 (idle) to 1 (saturated). VELTAIR (section 4.3) computes it
from counters of the last-level cache by a linear model. Most virtual machines have no such counters: there the slowdown
of a known workload against its time alone gives the pressure. The pressure of our own launches is in their profiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from cotenant.errors import InvalidValueError

_FEWEST = 4
"""Fewest samples for a linear model of two features and a constant."""


class CacheReading(Struct, frozen=True):
    """Counters of the last-level caches: accesses a second, and the share of misses."""

    accesses_per_s: float
    miss_rate: float


class CounterModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Pressure as a linear function of a CacheReading, clipped to 0 to 1."""

    constant: float
    per_access_per_s: float
    per_miss_rate: float

    def pressure(self, reading: CacheReading) -> float:
        """Pressure from 0 to 1."""
        found = self.constant + self.per_access_per_s * reading.accesses_per_s + self.per_miss_rate * reading.miss_rate
        return min(1.0, max(0.0, found))


class SlowdownScale(Struct, frozen=True, forbid_unknown_fields=True):
    """Pressure by the slowdown of a known workload: rising points (slowdown, pressure).

    Linear between points, 0 below the first, constant above the last.

    Raises InvalidValueError when the points do not rise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        slowdowns = [slowdown for slowdown, _ in self.points]
        pressures = [pressure for _, pressure in self.points]
        rises = slowdowns == sorted(set(slowdowns)) and pressures == sorted(pressures)
        if not self.points or not rises or not 0.0 <= pressures[0] <= pressures[-1] <= 1.0:
            raise InvalidValueError(
                "slowdown scale", "points", self.points, "slowdowns, and pressures 0 to 1, that rise"
            )

    def pressure(self, slowdown: float) -> float:
        """Pressure from 0 to 1."""
        slowdowns, pressures = zip(*self.points, strict=True)
        return float(np.interp(slowdown, slowdowns, pressures, left=0.0))


def fit_counters(readings: Sequence[CacheReading], pressures: Sequence[float]) -> CounterModel:
    """The linear model of least squared error.

    Raises InvalidValueError when there are fewer than four readings, or not a pressure for each.
    """
    if len(readings) != len(pressures) or len(readings) < _FEWEST:
        expected = f"at least {_FEWEST}, as many as pressures ({len(pressures)})"
        raise InvalidValueError("counter model", "readings", len(readings), expected)
    features = np.array([(1.0, each.accesses_per_s, each.miss_rate) for each in readings])
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)  # accesses are some 1e9, and rates below 1
    found = np.linalg.lstsq(features / scale, np.array(pressures), rcond=None)[0] / scale
    return CounterModel(*(float(each) for each in found))


def fit_slowdowns(slowdowns: Sequence[float], pressures: Sequence[float], least: float = 0.02) -> SlowdownScale | None:
    """The scale through these points by isotonic regression (pool adjacent violators).

    None if the slowdown at the highest pressure exceeds that at the lowest by at most `least`.
    """
    pools: list[list[tuple[float, float]]] = []
    for point in sorted(zip(pressures, slowdowns, strict=True)):
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2])[1] >= _mean(pools[-1])[1]:
            last = pools.pop()
            pools[-1] += last
    points = tuple((slowdown, pressure) for pressure, slowdown in map(_mean, pools))
    return SlowdownScale(points) if points[-1][0] - points[0][0] > least else None


def _mean(pool: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pool) / len(pool), sum(b for _, b in pool) / len(pool)
