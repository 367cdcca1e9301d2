"""Decides when a worker shrinks onnxruntime's arena: some launches after one with much more memory than the others."""

from __future__ import annotations

import threading

_LEAST_BYTES = 64 << 20
"""Least growth before a shrink, which takes some 0.1 ms for each MiB."""
_NOISE_BYTES = 1 << 20
_CALM_LAUNCHES = 16
_MOST_CALM_LAUNCHES = 1 << 16


class MemoryWatch:
    """Follows the private memory of a worker from launch to launch. Thread-safe.

    `ended` asks for a shrink when memory is 64 MiB above the level after the last shrink, and has not grown for 16
    launches. If memory comes back within as many launches, launches need it. The number of launches is then doubled
    (docs/decisions/0055-memory-returns.md).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base = self._top = 0
        """Private bytes after the last shrink, and the most since."""
        self._peak = 0
        """The most before the last shrink, until it is known whether it comes back; else 0."""
        self._calm = self._since = 0
        self._needed = _CALM_LAUNCHES
        self._is_requested = False

    def ended(self, held: int) -> bool:
        """Count the end of a launch with `held` private bytes; returns whether the next runs should shrink."""
        with self._lock:
            if self._base == 0 or self._is_requested:
                self._base = self._top = held
                self._calm = self._since = 0
                self._is_requested = False
                return False
            self._since += 1
            if held > self._top + _NOISE_BYTES:
                self._top, self._calm = held, 0
            else:
                self._calm += 1
            if self._peak and self._since == self._needed:
                is_back = 2 * (self._top - self._base) >= self._peak - self._base
                self._needed = min(2 * self._needed, _MOST_CALM_LAUNCHES) if is_back else _CALM_LAUNCHES
                self._peak = 0
            if self._calm < self._needed or self._top - self._base < _LEAST_BYTES:
                return False
            self._peak, self._is_requested = self._top, True
            return True
