"""Safety margin: from a median latency to an upper estimate of the time until the response is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from cotenant.errors import InvalidValueError

_PART_OF_SLACK = 3
"""The margin is at most 1 / _PART_OF_SLACK of the slack (SLO - latency); see decision 0024."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Upper quantile of observed over predicted latency of a tenant's launches: `factor`, at about `launch_ns`.

    Raises InvalidValueError for a value out of its range.
    """

    factor: float
    launch_ns: int

    def __post_init__(self) -> None:
        if not 1 <= self.factor < float("inf"):
            raise InvalidValueError("spread", "factor", self.factor, "a finite number from 1")
        if self.launch_ns < 1:
            raise InvalidValueError("spread", "launch_ns", self.launch_ns, "at least 1")


@dataclass(frozen=True, slots=True)
class SafetyMargin:
    """Turns median latencies into upper estimates.

    `spreads` are by tenant; `reply_ns` is the time before a query is read and after its last launch. The empty margin
    adds nothing. Raises InvalidValueError for a value out of its range.
    """

    spreads: Mapping[str, Spread] = field(default_factory=dict)
    reply_ns: int = 0

    def __post_init__(self) -> None:
        if self.reply_ns < 0:
            raise InvalidValueError("safety margin", "reply_ns", self.reply_ns, "at least 0")

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """Upper estimate in ns of the time until the response is sent, for work of this predicted latency.

        `latency + min(reply + (factor - 1) * base, max(0, slo - latency) / _PART_OF_SLACK)`

        The bound by the slack keeps tenants with little slack from being deferred always. `base` is `latency`, or above
        the latency of one launch `sqrt(latency * launch)`: delays of n independent launches add up as sqrt(n).
        """
        spread = self.spreads.get(tenant)
        longer_ns = self.reply_ns
        if spread is not None:
            base = latency_ns if latency_ns <= spread.launch_ns else sqrt(latency_ns * spread.launch_ns)
            longer_ns += round((spread.factor - 1.0) * base)
        return latency_ns + min(longer_ns, max(0, slo_ns - latency_ns) // _PART_OF_SLACK)


NO_MARGIN = SafetyMargin()
