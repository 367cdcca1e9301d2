"""What may come on top of a predicted latency until a client has his answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from cotenant.errors import InvalidValueError

_PART_OF_SLACK = 3
"""The margin takes at most one of so many parts of what an SLO leaves. Seven tenants at three times the capacity had
0.50 of their queries in time without a bound (`most`, served), 0.60 with a half of it, and 0.62 with a quarter."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Nearly all launches of a tenant, which are predicted to take some `launch_ns`, take at most `factor` times that.

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
    """Makes of a latency that half of the launches keep one that nearly all keep.

    `spreads` are by tenant; `reply_ns` is for what happens before a query is read and after its last launch has ended.
    The empty one adds nothing. Raises InvalidValueError for a value out of its range.
    """

    spreads: Mapping[str, Spread] = field(default_factory=dict)
    reply_ns: int = 0

    def __post_init__(self) -> None:
        if self.reply_ns < 0:
            raise InvalidValueError("safety margin", "reply_ns", self.reply_ns, "at least 0")

    def upper_ns(self, tenant: str, latency_ns: int, slo_ns: int) -> int:
        """Time, for work that is predicted to take `latency_ns`, after which its answer is nearly always on its way.

        On top comes a third of what the SLO leaves at most: with more, who has little would be doubtful from the start,
        and stand behind all others whenever there are such.

        Work of several launches is late by the sum of what they are late by, one independent of the other: that grows
        with the square root of their number.
        """
        spread = self.spreads.get(tenant)
        longer_ns = self.reply_ns
        if spread is not None:
            base = latency_ns if latency_ns <= spread.launch_ns else sqrt(latency_ns * spread.launch_ns)
            longer_ns += round((spread.factor - 1.0) * base)
        return latency_ns + min(longer_ns, max(0, slo_ns - latency_ns) // _PART_OF_SLACK)


NO_MARGIN = SafetyMargin()
