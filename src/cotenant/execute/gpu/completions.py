"""Polls the ends of launches of all lanes of a device, on one thread.

The polling interval shrinks as the predicted end of a launch comes near, and grows when the launch is late. A wait in
the driver would cost tens of microseconds a launch, and each lane would need a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Protocol

from cotenant.execute.threads.lanes import left_s
from cotenant.linux import sleep_precisely

_EARLY, _LATE = 2, 32
"""The next poll is after the time to the predicted end divided by `_EARLY`, or the lateness divided by `_LATE`."""
_LEAST_NS, _MOST_NS = 10_000, 1_000_000
"""Bounds of the polling interval; the upper one for launches that are late."""
_FOREVER_NS = 1 << 62


class Flight(Protocol):
    """A launch on the device. Its methods may not raise."""

    due_ns: int
    """Predicted end, in ns of `time.monotonic_ns`."""

    def is_over(self) -> bool:
        """Whether it has ended; never blocks."""

    def land(self) -> None:
        """Report its end."""


class Completions:
    """Reports ends of launches, those of one lane in the order in which they were added. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._lanes: dict[Hashable, deque[Flight]] = {}
        self._changed = threading.Condition()
        self._wake_ns = 0
        """Time at which the sleeping thread wakes at the latest; 0 while it does not sleep."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"cotenant-ends-{name}", daemon=True)
        self._thread.start()

    def add(self, lane: Hashable, flight: Flight) -> None:
        """Report the end of this launch: at once if it has ended and none is before it, else later.

        One thread for each lane.
        """
        waiting = self._lanes.get(lane)
        if not waiting and flight.is_over():
            flight.land()
            return
        with self._changed:
            if waiting is None:
                waiting = self._lanes[lane] = deque()
            waiting.append(flight)
            if len(waiting) == 1 and time.monotonic_ns() + _pause_ns(flight) < self._wake_ns:
                self._changed.notify_all()

    def look(self) -> None:
        """Poll now: a launch may have ended, or its predicted end has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait_idle(self, lane: Hashable) -> None:
        """Wait until all launches added for a lane have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lanes.get(lane))

    def close(self, until_s: float | None = None) -> bool:
        """Report all remaining ends and stop. Waits until `until_s` at most; returns whether all ends are reported."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(left_s(until_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        sleep_precisely()
        while self._poll():
            pass

    def _poll(self) -> bool:
        """Poll the first launch of every lane; False at the end. Keeps no reference to ended launches."""
        over = [(waiting, waiting[0]) for waiting in list(self._lanes.values()) if waiting and waiting[0].is_over()]
        for _, flight in over:
            flight.land()
        with self._changed:
            for waiting, _ in over:
                waiting.popleft()
            if over:
                self._changed.notify_all()
                return True
            pauses = [_pause_ns(waiting[0]) for waiting in self._lanes.values() if waiting]
            if not pauses and self._is_closing:
                return False
            pause = min(pauses, default=_FOREVER_NS)
            self._wake_ns = time.monotonic_ns() + pause
            self._changed.wait(pause / 1e9 if pauses else None)
            self._wake_ns = 0
        return True


def _pause_ns(flight: Flight) -> int:
    """Polling interval of a launch in ns."""
    left = flight.due_ns - time.monotonic_ns()
    return max(_LEAST_NS, left // _EARLY) if left > 0 else min(_MOST_NS, max(_LEAST_NS, -left // _LATE))
