"""Clocks of the serving driver: real time, and virtual time for tests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from typing_extensions import override

Alarm = Callable[[], None]
_log = logging.getLogger("cotenant.clock")


class Clock(Protocol):
    """Time source with alarms. Alarms of the same instant ring in the order (priority, time of the call)."""

    def now_ns(self) -> int:
        """Monotonic time."""

    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        """Call `alarm` at that time on the clock's thread; at once if the time has passed."""

    def close(self) -> None:
        """Cancel all alarms."""


class RealClock(Clock):
    """Monotonic clock of the system. One thread sleeps until the next alarm and rings it; it never polls."""

    def __init__(self) -> None:
        self._alarms: list[tuple[int, int, int, Alarm]] = []
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cotenant-clock", daemon=True)
        self._thread.start()

    @override
    def now_ns(self) -> int:
        return time.monotonic_ns()

    @override
    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        with self._changed:
            heappush(self._alarms, (at_ns, priority, self._count, alarm))
            self._count += 1
            if self._alarms[0][2] == self._count - 1:
                self._changed.notify()

    @override
    def close(self) -> None:
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
            except Exception:  # other alarms must still ring
                _log.exception("an alarm of the clock raised; other alarms are not affected")


class VirtualClock(Clock):
    """Virtual time: `run` advances it from alarm to alarm. For tests and for parity with the simulator."""

    def __init__(self) -> None:
        self._alarms: list[tuple[int, int, int, Alarm]] = []
        self._count = 0
        self._now = 0

    @override
    def now_ns(self) -> int:
        return self._now

    @override
    def call_at(self, at_ns: int, priority: int, alarm: Alarm) -> None:
        heappush(self._alarms, (max(at_ns, self._now), priority, self._count, alarm))
        self._count += 1

    def run(self) -> None:
        """Ring all alarms, including alarms set meanwhile."""
        while self._alarms:
            self._now, _, _, alarm = heappop(self._alarms)
            alarm()

    @override
    def close(self) -> None:
        self._alarms.clear()
