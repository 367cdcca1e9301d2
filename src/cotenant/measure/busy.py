"""Judges whether other processes disturbed a measurement (decision 0081) or a run (decision 0084)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from cotenant import linux

MOST_OTHERS = 0.1
"""Share of the cores' time taken by others above which a measurement counts as disturbed."""
_LEAST_S = 0.4
"""Time of the cores from which on busy times are judged: clocks of processes tick every 10 ms."""
MOST_OTHERS_OF_RUN = 0.05
"""Share of the cores' time taken by other processes above which a run of a server counts as disturbed."""
LEAST_RUN_S = 1.0
"""Least time between two readings of `OthersClock`; shorter runs are not judged."""
LOAD_PROCESS = "cotenant-load"
"""Name of a load generator's process: its time is part of the run."""


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


class CoreTime(NamedTuple):
    """Time in seconds since a start: of all cores, and the part that processes outside of a run or the host took."""

    cores_s: float
    others_s: float


def others_share(before: CoreTime, after: CoreTime) -> float | None:
    """Part (0 to 1) of the cores' time that others took between two readings; None where the readings are the same."""
    cores_s = after.cores_s - before.cores_s
    return min(1.0, max(0.0, after.others_s - before.others_s) / cores_s) if cores_s > 0 else None


def disturbed_sentence(share: float | None) -> list[str]:
    """The warning of a disturbed run; none where others took MOST_OTHERS_OF_RUN or less, or their share is unknown."""
    if share is None or share <= MOST_OTHERS_OF_RUN:
        return []
    taken = f"other processes took {100 * share:.0f} % of the cores"
    return [f"Disturbed run: {taken}, so the figures are too pessimistic."]


class OthersClock:
    """Clock of the time that other processes and the host take from a server's cores. Thread-safe.

    `root()` is the process that started all others of the server. Load generators of this machine (LOAD_PROCESS) belong
    to the run, as far as they are visible here.
    """

    def __init__(self, root: Callable[[], int], cores: Sequence[int]) -> None:
        self._root, self._cores = root, tuple(cores)
        self._lock = threading.Lock()
        self._total = CoreTime(0.0, 0.0)
        self._last: tuple[float, float, dict[int, float]] | None = None

    def read(self) -> CoreTime:
        """Time since the first call, as of LEAST_RUN_S ago or later. It never decreases."""
        with self._lock:
            if self._last is None:
                self._last = self._now()
            last_s, last_busy_s, last_own = self._last
            if time.monotonic() - last_s < LEAST_RUN_S:
                return self._total
            now_s, busy_s, own = self._last = self._now()
            own_s = sum([max(0.0, used_s - last_own.get(pid, 0.0)) for pid, used_s in own.items()])
            others_s = max(0.0, busy_s - last_busy_s - own_s)
            cores_s, others_before_s = self._total
            self._total = CoreTime(cores_s + (now_s - last_s) * len(self._cores), others_before_s + others_s)
            return self._total

    def _now(self) -> tuple[float, float, dict[int, float]]:
        """In seconds: the wall clock, busy time of the cores, and processor time of the run's processes by root."""
        root = self._root()
        named = set(linux.processes_named(LOAD_PROCESS)) - {root, *(pid for pid, _ in linux.processes_below(root))}
        own = {root: linux.family_cpu_s(root), **{pid: linux.cpu_s(pid) for pid in named}}
        return time.monotonic(), linux.busy_s(self._cores), own
