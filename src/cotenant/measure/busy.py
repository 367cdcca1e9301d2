"""Measures how busy other processes kept the cores during a measurement or a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from cotenant import linux

MOST_OTHERS = 0.1
"""Share of the cores' time taken by other processes above which a measurement counts as disturbed."""
_LEAST_S = 0.2
"""Shorter measurements are not judged: clocks of processes tick every 10 ms."""
MOST_OTHERS_OF_RUN = 0.05
"""Share of the cores' time taken by other processes above which a run of a server counts as disturbed."""
LEAST_RUN_S = 1.0
"""Least time between two readings of `OthersClock`; shorter runs are not judged."""
LOAD_PROCESS = "cotenant-load"
"""Name of a load generator's process: its time is part of the run."""


class OthersTime:
    """Measures `share`, the part (0 to 1) of these cores' time that other processes or a hypervisor took. A context."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self.share = 0.0

    def __enter__(self) -> Self:
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        (wall, busy, own), (wall_s, busy_s, own_s) = self._began, self._now()
        if wall_s - wall >= _LEAST_S and busy_s > busy and self._cores:
            others_s = (busy_s - busy) - (own_s - own)
            self.share = min(1.0, max(0.0, others_s / ((wall_s - wall) * len(self._cores))))

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took more than MOST_OTHERS."""
        return self.share > MOST_OTHERS

    def _now(self) -> tuple[float, float, float]:
        """In seconds: the wall clock, busy time of the cores, and processor time of this process."""
        took = os.times()
        return time.monotonic(), linux.busy_s(self._cores), took.user + took.system


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
