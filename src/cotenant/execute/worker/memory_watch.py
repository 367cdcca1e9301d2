"""When a worker lets onnxruntime's arena shrink: some launches after one that took far more than the others."""

from __future__ import annotations

import os
import threading

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LEAST_BYTES = 64 << 20
"""Growth that is worth a shrink, which takes some 0.1 ms for each MiB."""
_NOISE_BYTES = 1 << 20
_CALM_LAUNCHES = 16
_MOST_CALM_LAUNCHES = 1 << 16


def private_bytes() -> int:
    """Resident memory of this process without what it shares with others; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class MemoryWatch:
    """Follows the private memory of a worker from launch to launch. Thread-safe.

    `ended` says when to shrink: memory is 64 MiB above what the last shrink left, and has not grown for 16 launches.
    Where memory comes back within as many launches, that is what launches need: from then on twice as many have to
    pass (docs/decisions/0055-memory-returns.md).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base = self._top = 0
        """Private bytes after the last shrink, and the most since."""
        self._peak = 0
        """The most before the last shrink, until it is known whether that comes back; 0 then."""
        self._calm = self._since = 0
        self._needed = _CALM_LAUNCHES
        self._is_asked = False

    def ended(self, held: int) -> bool:
        """A launch has ended, and the process has so many private bytes. Whether the next launches are to shrink."""
        with self._lock:
            if self._base == 0 or self._is_asked:
                self._base = self._top = held
                self._calm = self._since = 0
                self._is_asked = False
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
            self._peak, self._is_asked = self._top, True
            return True
