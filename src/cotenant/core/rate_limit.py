"""A limit of queries a second."""

from __future__ import annotations

_BURST_NS = 1_000_000_000
"""Queries of so much time may come at once."""


class RateLimit:
    """The generic cell rate algorithm (ITU-T I.371), with a burst of one second.

    With `interval = 1 / rate` and `slack = max(0, 1 s - interval)`: a query that comes at `t` is taken where
    `t >= due - slack`, and then `due = max(t, due) + interval`.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, per_s: float) -> None:
        self._interval_ns = max(1, round(1e9 / per_s))
        self._slack_ns = max(0, _BURST_NS - self._interval_ns)
        self._due_ns = 0

    @property
    def opens_ns(self) -> int:
        """The time from which another query is within the limit."""
        return self._due_ns - self._slack_ns

    def take(self, now_ns: int) -> None:
        """Count a query that is taken now."""
        self._due_ns = max(now_ns, self._due_ns) + self._interval_ns
