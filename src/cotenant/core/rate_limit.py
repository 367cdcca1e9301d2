"""A limit of queries a second."""

from __future__ import annotations

_BURST_NS = 1_000_000_000
"""Burst: queries of this time may arrive at once."""


class RateLimit:
    """The generic cell rate algorithm (ITU-T I.371), with a burst of one second.

    `interval = 1 / rate`, `slack = max(0, 1 s - interval)`. A query that arrives at `t` is admitted if
    `t >= due - slack`. Then `due = max(t, due) + interval`.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, per_s: float) -> None:
        self._interval_ns = max(1, round(1e9 / per_s))
        self._slack_ns = max(0, _BURST_NS - self._interval_ns)
        self._due_ns = 0

    @property
    def opens_ns(self) -> int:
        """Earliest time at which the limit admits another query."""
        return self._due_ns - self._slack_ns

    def take(self, now_ns: int) -> None:
        """Count a query that is admitted now."""
        self._due_ns = max(now_ns, self._due_ns) + self._interval_ns
