"""The thread that tells how the launches of all lanes of a device have ended.

It looks more and more often as the end that was predicted comes near, and less and less often the later it gets: a
wait in the driver costs tens of microseconds a launch, and a thread for each lane wakes beside the others.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Protocol

from cotenant.execute.threads.lanes import left_s

_EARLY, _LATE = 2, 32
"""It looks again after this part of the time that is left, or by which the end is late."""
_LEAST_NS, _MOST_NS = 10_000, 1_000_000
"""Between two looks; the latter once the end is late."""
_FOREVER_NS = 1 << 62
_SET_TIMER_SLACK = 29  # of Linux's prctl: by how many ns a thread's sleep may be longer than asked


class Flight(Protocol):
    """A launch that is on the device. Neither method may raise."""

    due_ns: int
    """When it is believed to end, as `time.monotonic_ns` counts."""

    def is_over(self) -> bool:
        """Whether it has ended; never blocks."""

    def land(self) -> None:
        """Tell that it has ended."""


class Completions:
    """Lands flights when they have ended, those of one lane in the order in which they were added. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._lanes: dict[Hashable, deque[Flight]] = {}
        self._changed = threading.Condition()
        self._wake_ns = 0
        """Until when the thread sleeps at most; 0 while it does not."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"cotenant-ends-{name}", daemon=True)
        self._thread.start()

    def add(self, lane: Hashable, flight: Flight) -> None:
        """Land this flight once it is over: at once, on the calling thread, where it is and none is before it.

        Flights of a lane are added by one thread.
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
        """Something has changed that flights are over by, or are believed to be."""
        with self._changed:
            self._changed.notify_all()

    def wait_idle(self, lane: Hashable) -> None:
        """Wait until no flight of a lane is left that was added."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lanes.get(lane))

    def close(self, until_s: float | None = None) -> bool:
        """Land all that is left, and stop; nothing is waited for beyond `until_s`. Says whether all has landed."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(left_s(until_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        sleep_precisely()
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One look at the first flight of every lane; False at the end. What has landed is held by nobody after it."""
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
    """How long not to look at a flight."""
    left = flight.due_ns - time.monotonic_ns()
    return max(_LEAST_NS, left // _EARLY) if left > 0 else min(_MOST_NS, max(_LEAST_NS, -left // _LATE))


def sleep_precisely() -> None:
    """Let sleeps of the calling thread be as short as asked, where the system can."""
    try:
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass
