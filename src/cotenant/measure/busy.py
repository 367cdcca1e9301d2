"""Measures how busy other processes kept the cores during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Self

from cotenant import linux

MOST_OTHERS = 0.1
"""Share of the cores' time taken by other processes above which a measurement counts as disturbed."""
_LEAST_S = 0.2
"""Shorter measurements are not judged: clocks of processes tick every 10 ms."""


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
