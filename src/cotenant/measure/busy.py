"""Judges whether other processes disturbed a measurement (decision 0081)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Self

from cotenant import linux

MOST_OTHERS = 0.1
"""Share of the cores' time taken by others above which a measurement counts as disturbed."""
_LEAST_S = 0.4
"""Time of the cores from which on busy times are judged: clocks of processes tick every 10 ms."""


def taken_share(wall_s: float, cores: int, others_s: float, delay_s: float, preempted_s: float) -> float:
    """Part (0 to 1) of the time of `cores` cores during `wall_s` that others took: the largest of three readings.

    - `others_s`: cores were busy for other processes or the host (steal time); left out below _LEAST_S.
    - `delay_s`: threads that measured were ready, but waited in a run queue.
    - `preempted_s`: single-threaded runs had wall time beyond their processor time, without a wait of their own.
    """
    cores_s = wall_s * cores
    if cores_s <= 0:
        return 0.0
    ticked_s = others_s if cores_s >= _LEAST_S else 0.0
    return min(1.0, max(0.0, ticked_s, delay_s, preempted_s) / cores_s)


class OthersTime:
    """Measures the time of these cores that others took during a block: see `taken_share`. A context.

    Without cores the share is 0. On one core the run-queue delay is that of the calling thread, else of all threads of
    this process.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._spent = (0.0, 0.0, 0.0, 0.0)
        self.preempted_s = 0.0
        """To be set by a block that compares the processor time of its runs with their wall time."""

    def __enter__(self) -> Self:
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, own, delay = (now - then for now, then in zip(self._now(), self._began, strict=True))
        self._spent = wall, busy, own, delay

    @property
    def share(self) -> float:
        """The part (0 to 1) of the cores' time that others took."""
        wall_s, busy_s, own_s, delay_s = self._spent
        others_s = busy_s - own_s if busy_s > 0 else 0.0
        return taken_share(wall_s, len(self._cores), others_s, delay_s, self.preempted_s)

    @property
    def is_disturbed(self) -> bool:
        """Whether others took more than MOST_OTHERS."""
        return self.share > MOST_OTHERS

    def _now(self) -> tuple[float, float, float, float]:
        """In seconds: wall clock, busy time of the cores, processor time and run-queue delay of this process."""
        took = os.times()
        delay_s = linux.run_delay_s(threading.get_native_id() if len(self._cores) == 1 else None)
        return time.monotonic(), linux.busy_s(self._cores), took.user + took.system, delay_s
