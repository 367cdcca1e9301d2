"""Heartbeats to nodes, gateway and head of Ray, sent concurrently; the failure detector counts unanswered ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from cotenant.cluster.detector import Detector, DetectorSettings

GATEWAY, RAY_HEAD = "(gateway)", "(head of Ray)"
"""Parties other than nodes; names of nodes have no brackets."""
Question = Callable[[], Any]
Submit = Callable[[Question], "Future[Any]"]
Wait = Callable[[Collection["Future[Any]"], float], object]


class Heartbeats:
    """Heartbeats with at most one open call per party. Thread-safe.

    `submit` runs a call on another thread; `wait` waits for futures with a time-out in seconds.
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
        """Start watching a node."""
        with self._lock:
            self._detector.watch(node, self._settings.misses, self._settings.suspect_misses)

    def forget(self, party: str) -> None:
        """Stop watching a node; reset the gateway or the head of Ray."""
        with self._lock:
            self._open.pop(party, None)
            if party in (GATEWAY, RAY_HEAD):
                self._detector.heard(party)
            else:
                self._detector.forget(party)

    def suspect(self, party: str) -> None:
        """Record a refused or broken connection to a party."""
        with self._lock:
            self._detector.suspect(party)

    def died(self, party: str, reason: str) -> None:
        """Record that the process of a party has ended."""
        with self._lock:
            self._detector.died(party, reason)

    def lost(self) -> dict[str, str]:
        """Lost parties with the reason."""
        with self._lock:
            return self._detector.lost()

    def ask(self, questions: Mapping[str, Question], interval_s: float) -> dict[str, Future[Any]]:
        """Call every party without an open call, wait for at most one interval, and return the finished calls."""
        with self._lock:
            for party, question in questions.items():
                if party not in self._open:
                    self._open[party] = self._submit(question)
            futures = list(self._open.values())
        self._wait(futures, interval_s)
        with self._lock:
            done = {party: future for party, future in self._open.items() if future.done()}
            for party in done:
                del self._open[party]
        return done

    def tick(self, now_ns: int, called: Collection[str], heard: Collection[str]) -> None:
        """End an interval. `called`: parties with a heartbeat; `heard`: parties that are healthy."""
        with self._lock:
            for party in heard:
                self._detector.heard(party)
            self._detector.tick(now_ns, [party for party in called if party not in heard])
