"""When a party counts as lost: heartbeats that were asked for and not answered, in a row. Pure: time comes in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cotenant.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class DetectorSettings:
    """A node is lost after `misses` unanswered heartbeats in a row, one each `interval_ns`.

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
    """Counts unanswered heartbeats by party. A tick ends one interval; a late tick counts for no party.

    The watcher asks every party without an open question at the start of an interval, and calls `tick` at its end. A
    tick is late where more than twice the interval has passed since the one before: then the watcher itself did not
    run, and answers may wait to be read.
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
        """The parties that are followed."""
        return tuple(self._limits)

    def watch(self, party: str, misses: int, suspect_misses: int) -> None:
        """Begin to follow a party, or begin anew: it is lost after so many misses, or so many once it is suspected."""
        self.forget(party)
        self._limits[party] = misses, suspect_misses

    def forget(self, party: str) -> None:
        """Stop following a party."""
        self._limits.pop(party, None)
        self._misses.pop(party, None)
        self._suspected.discard(party)
        self._dead.pop(party, None)

    def heard(self, party: str) -> None:
        """A heartbeat came: the party is well."""
        self._misses.pop(party, None)
        self._suspected.discard(party)

    def suspect(self, party: str) -> None:
        """A connection to a party was refused or broke; the next heartbeat clears it."""
        if party in self._limits:
            self._suspected.add(party)

    def died(self, party: str, reason: str) -> None:
        """It is known that the party is gone: its process ended."""
        if party in self._limits:
            self._dead.setdefault(party, reason)

    def tick(self, now_ns: int, unanswered: Collection[str]) -> None:
        """An interval ends in which these parties were asked and gave no answer."""
        late = self._ticked_ns is None or now_ns - self._ticked_ns > 2 * self._interval_ns
        self._ticked_ns = now_ns
        if not late:
            for party in unanswered:
                self._misses[party] = self._misses.get(party, 0) + 1

    def lost(self) -> dict[str, str]:
        """The parties that count as lost, with the reason."""
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
