"""Rates as they arrive, and when a plan no longer fits them. Pure: every look gives the next state.

A rate is followed in two ways. The average, with exponentially falling weights, follows a trend; the quantile over the
last windows covers what comes in bursts. A plan is asked for the larger of both. A rise is answered at once, a fall
only when it has lasted: a plan that is too large costs little, one that is too small costs answers. Source: GPU-let
(ATC'22), section 4.5, and its Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.types import NS_PER_S


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    """How rates are followed, and when they ask for another plan.

    `alpha` is the weight of the last window in the average. `quantile` is taken over the last `windows` windows: by
    default the second largest of five, which a rise reaches after two windows, and chance alone raises by little
    (7 % where a window has 50 rows on average; of ten windows of 4 rows the second largest is half as much again).
    A plan is too small when a rate, with the planner's `headroom` added, is more than `hysteresis` above what it
    serves; it is too large when one has been that much below for `patience` looks in a row.

    Raises InvalidValueError when a value is out of its range.
    """

    alpha: float = 0.3
    quantile: float = 0.8
    windows: int = 5
    headroom: float = 0.1
    hysteresis: float = 0.1
    patience: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise InvalidValueError("tracking", "alpha", self.alpha, "a share above 0, at most 1")
        if not 0 <= self.quantile <= 1:
            raise InvalidValueError("tracking", "quantile", self.quantile, "a share from 0 to 1")
        if self.windows < 1:
            raise InvalidValueError("tracking", "windows", self.windows, "at least 1")
        if not 0 <= self.headroom < math.inf:
            raise InvalidValueError("tracking", "headroom", self.headroom, "a share from 0")
        if not 0 <= self.hysteresis < 1:
            raise InvalidValueError("tracking", "hysteresis", self.hysteresis, "a share from 0 to below 1")
        if self.patience < 1:
            raise InvalidValueError("tracking", "patience", self.patience, "at least 1")


@dataclass(frozen=True, slots=True)
class TrackedRate:
    """Rows a second of one tenant: the average, the quantile over the last windows, and the rates of those."""

    ewma: float = 0.0
    quantile: float = 0.0
    recent: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Of the last windows."""
        return sum(self.recent) / len(self.recent) if self.recent else self.ewma

    def is_above(self, served_per_s: float, window_s: float, was_above: bool = False) -> bool:
        """Whether more rows arrive than a plan serves, by more than a tenth and than chance makes of so many windows
        (three deviations of a Poisson number); who was above stays so until it is by less than a twentieth.
        """
        if was_above:
            return self.mean > 1.05 * served_per_s
        length_s = window_s * max(1, len(self.recent))
        surplus = (self.mean - served_per_s) * length_s
        return self.mean > 1.1 * served_per_s and surplus > 3 * math.sqrt(served_per_s * length_s)

    @property
    def demand_per_s(self) -> float:
        """What a plan is asked to serve."""
        return max(self.ewma, self.quantile)


@dataclass(frozen=True, slots=True)
class Tracker:
    """The rates of all tenants after so many windows."""

    settings: TrackingSettings = TrackingSettings()
    rates: Mapping[str, TrackedRate] = field(default_factory=dict)

    def after(self, rows: Mapping[str, int], window_ns: int) -> Tracker:
        """The next state: so many rows of each tenant arrived in a window of that length.

        A tenant that is not named had none. The first window of a tenant is believed as it is.
        Raises InvalidValueError for a window without length.
        """
        if window_ns <= 0:
            raise InvalidValueError("tracking", "window_ns", window_ns, "a positive length")
        made = {
            tenant: self._followed(self.rates.get(tenant), rows.get(tenant, 0) * NS_PER_S / window_ns)
            for tenant in dict.fromkeys((*self.rates, *rows))
        }
        return replace(self, rates=made)

    def demand(self) -> dict[str, float]:
        """Rows a second of each tenant that a plan should serve, before headroom."""
        return {tenant: rate.demand_per_s for tenant, rate in self.rates.items()}

    def _followed(self, known: TrackedRate | None, rate: float) -> TrackedRate:
        if known is None:
            return TrackedRate(rate, rate, (rate,))
        alpha = self.settings.alpha
        recent = (*known.recent, rate)[-self.settings.windows :]
        import numpy as np  # the command line loads this module for a default alone

        quantile = float(np.quantile(recent, self.settings.quantile, method="inverted_cdf"))
        return TrackedRate(known.ewma + alpha * (rate - known.ewma), quantile, recent)


class RateVerdict(StrEnum):
    """What a look at rates and plan finds."""

    KEEP = "keep"
    GROW = "grow"
    SHRINK = "shrink"


def compare_rates(
    demand: Mapping[str, float], served: Mapping[str, float], settings: TrackingSettings, calm: int = 0
) -> tuple[RateVerdict, int]:
    """Compare the rates that are asked for with those that the plan serves, headroom included, in rows a second.

    `calm` is what the look before gave: the number of looks in a row that found the plan too large. Gives what to do,
    and the number for the next look.
    """
    wanted = {tenant: rate * (1 + settings.headroom) for tenant, rate in demand.items()}
    if any(rate > served.get(tenant, 0.0) * (1 + settings.hysteresis) for tenant, rate in wanted.items()):
        return RateVerdict.GROW, 0
    if any(rate < served.get(tenant, 0.0) * (1 - settings.hysteresis) for tenant, rate in wanted.items()):
        return (RateVerdict.SHRINK, 0) if calm + 1 >= settings.patience else (RateVerdict.KEEP, calm + 1)
    return RateVerdict.KEEP, 0
