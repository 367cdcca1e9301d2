"""Failure detector: a party is lost after a number of consecutive unanswered heartbeats. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cotenant.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """Settings: a node is lost after `misses` consecutive unanswered heartbeats, one per `interval_ns`.

    A node with refused or broken connections is lost after `suspect_misses`, the gateway after `gateway_misses`.

    Raises InvalidValueError when a value is out of its range.
    """

    interval_ns: int = 500_000_000
    misses: int = 7
    suspect_misses: int = 3
    gateway_misses: int = 60

    def __post_init__(self) -> None:
        if self.interval_ns < 1:
            raise InvalidValueError("failure detector", "interval_ns", self.interval_ns, "a positive interval")
        for name in ("misses", "suspect_misses", "gateway_misses"):
            if (value := getattr(self, name)) < 1:
                raise InvalidValueError("failure detector", name, value, "at least 1")


class Detector:
    """Counter of unanswered heartbeats by party. A tick ends an interval; a late tick counts for no party.

    The watcher sends a heartbeat to each party without an open one at the start of an interval, and calls `tick` at its
    end. A tick is late after more than two intervals. Then the watcher itself did not run, and answers may be unread.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._ticked_ns: int | None = None
        self._limits: dict[str, tuple[int, int]] = {}
        self._misses: dict[str, int] = {}
        self._suspected: set[str] = set()
        self._dead: dict[str, str] = {}

    @property
    def watched(self) -> tuple[str, ...]:
        """Watched parties."""
        return tuple(self._limits)

    def watch(self, party: str, misses: int, suspect_misses: int) -> None:
        """Start watching a party with its limits of misses, without and with a suspicion. Resets a watched party."""
        self.forget(party)
        self._limits[party] = misses, suspect_misses

    def forget(self, party: str) -> None:
        """Stop watching a party."""
        self._limits.pop(party, None)
        self._misses.pop(party, None)
        self._suspected.discard(party)
        self._dead.pop(party, None)

    def heard(self, party: str) -> None:
        """Record an answered heartbeat, which clears misses and suspicion."""
        self._misses.pop(party, None)
        self._suspected.discard(party)

    def suspect(self, party: str) -> None:
        """Record a refused or broken connection; the next heartbeat clears it."""
        if party in self._limits:
            self._suspected.add(party)

    def died(self, party: str, reason: str) -> None:
        """Record that the process of a party has ended."""
        if party in self._limits:
            self._dead.setdefault(party, reason)

    def tick(self, now_ns: int, unanswered: Collection[str]) -> None:
        """End an interval with the unanswered parties."""
        late = self._ticked_ns is None or now_ns - self._ticked_ns > 2 * self._interval_ns
        self._ticked_ns = now_ns
        if not late:
            for party in unanswered:
                self._misses[party] = self._misses.get(party, 0) + 1

    def lost(self) -> dict[str, str]:
        """Lost parties with the reason."""
        found = {}
        for party, (misses, suspect_misses) in self._limits.items():
            missed = self._misses.get(party, 0)
            if party in self._dead:
                found[party] = self._dead[party]
            elif missed >= misses:
                found[party] = f"{missed} heartbeats in a row were not answered"
            elif party in self._suspected and missed >= suspect_misses:
                found[party] = f"connections to it fail, and {missed} heartbeats in a row were not answered"
        return found
