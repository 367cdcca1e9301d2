"""Tracking of arrival rates, and the test whether a plan still fits them. Pure: each check returns the next state.

With the rate `x_k` of window k, the demand of a tenant is `max(e_k, q_k)`:

    e_k = e_(k-1) + alpha * (x_k - e_(k-1))              moving average: follows trends
    q_k = quantile of x_(k-windows+1), ..., x_k          covers bursts

A plan too small for `demand * (1 + headroom)` is replaced at once, a plan too large only after several checks. Spare
capacity costs little; missing capacity costs answers. Source: GPU-let (ATC'22), section 4.5 and Algorithm 2.
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
    """How rates are tracked, and when they need another plan.

    - `alpha`: weight of the last window in the average.
    - `quantile` over the last `windows` windows: by default the second largest of five. A rise reaches it after two
      windows, and random arrivals raise it little.
    - A plan is too small if a demand plus `headroom` is more than the share `hysteresis` above its rate in the plan. A
      plan is too large if one is that far below in `patience` consecutive checks.

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
    """Rates of one tenant in rows/s: moving average, quantile over the last windows, and the rates of these windows."""

    ewma: float = 0.0
    quantile: float = 0.0
    recent: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean rate of the last windows, in rows/s."""
        return sum(self.recent) / len(self.recent) if self.recent else self.ewma

    def is_above(self, served_per_s: float, window_s: float, was_above: bool = False) -> bool:
        """Whether more rows arrive than a plan serves: more than 10 %, and more than three standard deviations of a
        Poisson count. A tenant that `was_above` stays so until the surplus is below 5 %.
        """
        if was_above:
            return self.mean > 1.05 * served_per_s
        length_s = window_s * max(1, len(self.recent))
        surplus = (self.mean - served_per_s) * length_s
        return self.mean > 1.1 * served_per_s and surplus > 3 * math.sqrt(served_per_s * length_s)

    @property
    def demand_per_s(self) -> float:
        """The rate that a plan should serve, in rows/s, without headroom."""
        return max(self.ewma, self.quantile)


@dataclass(frozen=True, slots=True)
class Tracker:
    """Tracked rates of all tenants."""

    settings: TrackingSettings = TrackingSettings()
    rates: Mapping[str, TrackedRate] = field(default_factory=dict)

    def after(self, rows: Mapping[str, int], window_ns: int) -> Tracker:
        """The next state, after a window with `rows` arrivals by tenant; a missing tenant had none.

        The first window of a tenant sets its average. Raises InvalidValueError for a window without length.
        """
        if window_ns <= 0:
            raise InvalidValueError("tracking", "window_ns", window_ns, "a positive length")
        made = {
            tenant: self._followed(self.rates.get(tenant), rows.get(tenant, 0) * NS_PER_S / window_ns)
            for tenant in dict.fromkeys((*self.rates, *rows))
        }
        return replace(self, rates=made)

    def demand(self) -> dict[str, float]:
        """Demand of each tenant in rows/s, without headroom."""
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
    """Result of comparing rates with a plan."""

    KEEP = "keep"
    GROW = "grow"
    SHRINK = "shrink"


def compare_rates(
    demand: Mapping[str, float], served: Mapping[str, float], settings: TrackingSettings, calm: int = 0
) -> tuple[RateVerdict, int]:
    """Compare the demand plus headroom with the rates of the plan, in rows/s.

    `calm`: consecutive checks that found the plan too large. Returns the verdict, and `calm` for the next check.
    """
    wanted = {tenant: rate * (1 + settings.headroom) for tenant, rate in demand.items()}
    if any(rate > served.get(tenant, 0.0) * (1 + settings.hysteresis) for tenant, rate in wanted.items()):
        return RateVerdict.GROW, 0
    if any(rate < served.get(tenant, 0.0) * (1 - settings.hysteresis) for tenant, rate in wanted.items()):
        return (RateVerdict.SHRINK, 0) if calm + 1 >= settings.patience else (RateVerdict.KEEP, calm + 1)
    return RateVerdict.KEEP, 0
