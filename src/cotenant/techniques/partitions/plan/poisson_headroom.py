"""How much more than a rate must be planned for because arrivals vary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.types import NS_PER_S, Load

QUANTILE = 0.8
"""Of the counts in one SLO: see `with_poisson_headroom`."""


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
    mean rate r such that r + 0.9 * sqrt(r / SLO) fills them, or less; that is the 80 % quantile of the count in one
    SLO. Not enough for a load of which hardly one batch fits into half its SLO: that experiment simulates instead.

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
