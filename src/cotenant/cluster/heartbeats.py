"""Questions to nodes, gateway and the head of Ray, asked side by side; unanswered ones are counted by the detector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from cotenant.cluster.detector import Detector, DetectorSettings

GATEWAY, RAY_HEAD = "(gateway)", "(head of Ray)"
"""Parties that are no nodes; names of nodes have no brackets."""
Question = Callable[[], Any]
Submit = Callable[[Question], "Future[Any]"]
Wait = Callable[[Collection["Future[Any]"], float], object]


class Heartbeats:
    """At most one open question a party. Thread-safe.

    `submit` runs a question on a thread of its own, `wait` waits for futures for some seconds at most.
    """

    def __init__(self, settings: DetectorSettings, submit: Submit, wait: Wait) -> None:
        self._settings = settings
        self._submit = submit
        self._wait = wait
        self._lock = threading.Lock()
        self._open: dict[str, Future[Any]] = {}
        self._detector = Detector(settings.interval_ns)
        for party in (GATEWAY, RAY_HEAD):
            self._detector.watch(party, settings.gateway_misses, settings.suspect_misses)

    def watch(self, node: str) -> None:
        """Begin to follow a node."""
        with self._lock:
            self._detector.watch(node, self._settings.misses, self._settings.suspect_misses)

    def forget(self, party: str) -> None:
        """Stop following a node; begin anew with another party."""
        with self._lock:
            self._open.pop(party, None)
            if party in (GATEWAY, RAY_HEAD):
                self._detector.heard(party)
            else:
                self._detector.forget(party)

    def suspect(self, party: str) -> None:
        """See Detector."""
        with self._lock:
            self._detector.suspect(party)

    def died(self, party: str, reason: str) -> None:
        """See Detector."""
        with self._lock:
            self._detector.died(party, reason)

    def lost(self) -> dict[str, str]:
        """See Detector."""
        with self._lock:
            return self._detector.lost()

    def ask(self, questions: Mapping[str, Question], interval_s: float) -> dict[str, Future[Any]]:
        """Ask every party that has no open question, wait for one interval at most, and give what has come."""
        with self._lock:
            for party, question in questions.items():
                if party not in self._open:
                    self._open[party] = self._submit(question)
            asked = list(self._open.values())
        self._wait(asked, interval_s)
        with self._lock:
            done = {party: future for party, future in self._open.items() if future.done()}
            for party in done:
                del self._open[party]
        return done

    def tick(self, now_ns: int, asked: Collection[str], heard: Collection[str]) -> None:
        """An interval ends in which these parties were asked, and those of them in `heard` are well."""
        with self._lock:
            for party in heard:
                self._detector.heard(party)
            self._detector.tick(now_ns, [party for party in asked if party not in heard])
