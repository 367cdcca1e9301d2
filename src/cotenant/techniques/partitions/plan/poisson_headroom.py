"""Headroom for Poisson arrivals: the rate to plan for, given the mean rate and the SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.types import NS_PER_S, Load

QUANTILE = 0.8
"""Quantile of the number of arrivals within one SLO, for `with_poisson_headroom`."""


def poisson_rate(rate_per_s: float, window_s: float, quantile: float = QUANTILE) -> float:
    """The rate `max(r, Q(r * w) / w)`: mean rate r, window w in seconds, Q the Poisson quantile of a count.

    A Poisson process exceeds this rate in at most a share `1 - quantile` of the windows. The artifact of GPU-let uses
    the 99 % quantile in windows of one second, whatever the SLO.

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
    """The loads at `poisson_rate` with one SLO as window, so that about 1 % of Poisson arrivals miss the SLO.

    Bursts within one SLO count: earlier rows are answered by then. The default quantile comes from simulations of full
    partitions (experiment gpulet-rates, rows `headroom`). It is too low for a load of which hardly one batch fits into
    half its SLO.

    Raises as `poisson_rate`.
    """
    return tuple(
        replace(load, rate_per_s=poisson_rate(load.rate_per_s, load.slo_ns / NS_PER_S, quantile)) for load in loads
    )


def _quantile(mean: float, quantile: float) -> int:
    """Quantile of the Poisson distribution: the smallest count n with `P(X <= n) >= quantile`."""
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
