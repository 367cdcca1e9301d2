"""Measures how busy other processes kept the cores during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

MOST_OTHERS = 0.1
"""Share of the cores' time taken by other processes above which a measurement counts as disturbed."""
_LEAST_S = 0.2
"""Shorter measurements are not judged: clocks of processes tick every 10 ms."""
_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of a core's times in /proc/stat that count as idle. Columns from _COLUMNS on are part of the user's time."""
_COLUMNS = 8


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
        try:
            text = _STAT.read_text(encoding="ascii")
        except OSError:
            text = ""
        return time.monotonic(), busy_s(text, self._cores), took.user + took.system


def busy_s(text: str, cores: Sequence[int]) -> float:
    """Seconds that cores were busy since the machine started, from the text of /proc/stat."""
    names = [f"cpu{core}" for core in cores]
    ticks = 0
    for name, *columns in (line.split() for line in text.splitlines() if line.startswith("cpu")):
        if name in names:
            ticks += sum(int(each) for at, each in enumerate(columns[:_COLUMNS]) if at not in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")
