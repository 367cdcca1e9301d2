"""Arrivals for the simulation of plans, and how much more than a rate must be planned because arrivals vary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cotenant.errors import InvalidValueError
from cotenant.plan.types import NS_PER_S, Load

Times = npt.NDArray[np.int64]
RateCurve = Sequence[tuple[int, float]]
"""Rates a second, each from a time in ns on; ascending, the first from 0."""

QUANTILE = 0.8
"""Of the counts in one SLO: see `with_poisson_headroom`."""


def poisson_arrivals(rates: Mapping[str, float], duration_ns: int, seed: int) -> dict[str, Times]:
    """Ascending times in [0, duration) of each tenant, in ns. Each draws from a child of the seed, in their order.

    Raises InvalidValueError for a duration or a rate that is not positive, and a seed below 0.
    """
    return curve_arrivals({name: ((0, rate),) for name, rate in rates.items()}, duration_ns, seed)


def curve_arrivals(curves: Mapping[str, RateCurve], duration_ns: int, seed: int) -> dict[str, Times]:
    """Poisson arrivals whose rates follow piecewise-constant curves. Raises as `poisson_arrivals`; rates may be 0."""
    if duration_ns <= 0:
        raise InvalidValueError("arrivals", "duration_ns", duration_ns, "a positive duration")
    if seed < 0:
        raise InvalidValueError("arrivals", "seed", seed, "an integer from 0")
    children = np.random.SeedSequence(seed).spawn(len(curves))
    return {
        name: _draw(name, curve, duration_ns, np.random.default_rng(child))
        for (name, curve), child in zip(curves.items(), children, strict=True)
    }


def _draw(name: str, curve: RateCurve, duration_ns: int, rng: np.random.Generator) -> Times:
    starts = [start for start, _ in curve]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise InvalidValueError(f"arrivals of {name!r}", "curve", starts, "times that ascend from 0")
    parts = []
    for (start, rate), end in zip(curve, [*starts[1:], duration_ns], strict=True):
        if not 0 <= rate < math.inf:
            raise InvalidValueError(f"arrivals of {name!r}", "rate", rate, "a finite rate from 0")
        end = min(end, duration_ns)
        if start < end:
            count = rng.poisson(rate * (end - start) / NS_PER_S)
            parts.append(np.sort(rng.integers(start, end, count, dtype=np.int64)))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def poisson_rate(rate_per_s: float, window_s: float, quantile: float = QUANTILE) -> float:
    """The rate that a Poisson process exceeds in a share 1 - quantile of windows of this length, at most.

    Never below the mean rate. The artifact of GPU-let plans with the 99 % quantile of the count in a second, which is
    blind to the SLO: 24 % more at 100 a second, 7 % at 1000. See `with_poisson_headroom`.

    Raises InvalidValueError for a rate or window that is not positive, and a quantile that is not between 0 and 1.
    """
    if not 0 < rate_per_s < math.inf:
        raise InvalidValueError("poisson rate", "rate_per_s", rate_per_s, "a positive finite rate")
    if not 0 < window_s < math.inf:
        raise InvalidValueError("poisson rate", "window_s", window_s, "a positive finite window")
    if not 0 < quantile < 1:
        raise InvalidValueError("poisson rate", "quantile", quantile, "a share between 0 and 1")
    return max(rate_per_s, _quantile(rate_per_s * window_s, quantile) / window_s)


def with_poisson_headroom(loads: Sequence[Load], quantile: float = QUANTILE) -> tuple[Load, ...]:
    """The loads at the rates to plan for, without other headroom, so that about 1 % of Poisson arrivals miss the SLO.

    A full plan has no rest for bursts, and what counts are bursts within an SLO: rows that come earlier are gone by
    then. Simulations of full partitions (rows `headroom` of the experiment gpulet-rates) bear 1 % of late rows at a
    mean rate r such that r + 0.9 * sqrt(r / SLO) fills them, or less; that is the 80 % quantile of the
    count in one SLO. Not enough for a load of which hardly one batch fits into half its SLO: see `plan_simulated`.

    Raises as `poisson_rate` does.
    """
    return tuple(
        replace(load, rate_per_s=poisson_rate(load.rate_per_s, load.slo_ns / NS_PER_S, quantile)) for load in loads
    )


def _quantile(mean: float, quantile: float) -> int:
    """The smallest count that a Poisson variable stays at or below with this probability."""
    spread = math.sqrt(mean)
    first = max(0, math.floor(mean - 12 * spread - 12))
    total = 0.0
    term = math.exp(first * math.log(mean) - mean - math.lgamma(first + 1))
    for count in range(first, math.ceil(mean + 40 * spread + 40)):
        total += term
        if total >= quantile:
            return count
        term *= mean / (count + 1)
    return math.ceil(mean + 40 * spread + 40)
