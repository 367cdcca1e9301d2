"""Clocks of the serving driver: the real one, and one that jumps from alarm to alarm for tests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

Alarm = Callable[[], None]
_log = logging.getLogger("cotenant.clock")


class Clock(Protocol):
    """Tells the time and rings alarms. Alarms of the same instant ring in the order (priority, call)."""

    def now_ns(self) -> int:
        """Monotonic time."""

    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        """Call `alarm` at that time; at once, on the clock's thread, when it has passed."""

    def close(self) -> None:
        """Ring no more."""


class RealClock:
    """Monotonic time; alarms ring on one thread, which sleeps until the next one is due. Never polls."""

    def __init__(self) -> None:
        self._alarms: list[tuple[int, int, int, Alarm]] = []
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cotenant-clock", daemon=True)
        self._thread.start()

    def now_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()

    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        """See Clock."""
        with self._changed:
            heappush(self._alarms, (at_ns, priority, self._count, alarm))
            self._count += 1
            if self._alarms[0][2] == self._count - 1:
                self._changed.notify()

    def close(self) -> None:
        """See Clock."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    if not self._alarms:
                        self._changed.wait()
                        continue
                    left = self._alarms[0][0] - time.monotonic_ns()
                    if left <= 0:
                        break
                    self._changed.wait(left / 1e9)
                if self._closed:
                    return
                alarm = heappop(self._alarms)[3]
            try:
                alarm()
            except Exception:  # the alarms of all others still have to ring
                _log.exception("an alarm failed")


class VirtualClock:
    """Time that stands still until `run` lets it jump from alarm to alarm. For tests and parity with the simulator."""

    def __init__(self) -> None:
        self._alarms: list[tuple[int, int, int, Alarm]] = []
        self._count = 0
        self._now = 0

    def now_ns(self) -> int:
        """See Clock."""
        return self._now

    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        """See Clock."""
        heappush(self._alarms, (max(at_ns, self._now), priority, self._count, alarm))
        self._count += 1

    def run(self) -> None:
        """Ring all alarms, those that are set meanwhile included."""
        while self._alarms:
            self._now, _, _, alarm = heappop(self._alarms)
            alarm()

    def close(self) -> None:
        """See Clock."""
        self._alarms.clear()
