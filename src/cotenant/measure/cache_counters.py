"""Hardware counters of the last-level cache of some cores, by perf_event_open(2) of Linux."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Sequence

from cotenant.errors import CotenantError
from cotenant.linux import perf_event_paranoid, system_call
from cotenant.predict.pressure import CacheReading

_HW_CACHE, _LAST_LEVEL = 3, 2
_ACCESS, _MISS = 0, 1
_ATTRIBUTES = struct.Struct("IIQQQQQIIQ")
"""The first version of perf_event_attr; the kernel recognises it by its size."""
_CLOSE_ON_EXEC = 8


class CacheCounters:
    """Counts cache accesses and misses of all threads on these cores, until `close`.

    Raises CotenantError with the reason and a remedy where counters are unsupported or not permitted.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._files: list[int] = []
        try:
            for core in cores:
                for result in (_ACCESS, _MISS):
                    self._files.append(_opened(core, result))
        except CotenantError:
            self.close()
            raise
        self._last = self._counted()

    def read(self) -> CacheReading:
        """Rates since the last call."""
        before, self._last = self._last, self._counted()
        accesses, misses, ns = (now - then for now, then in zip(self._last, before, strict=True))
        return CacheReading(accesses * 1e9 / max(1, ns), min(1.0, misses / max(1, accesses)))

    def close(self) -> None:
        """Stop counting."""
        for file in self._files:
            os.close(file)
        self._files = []

    def _counted(self) -> tuple[int, int, int]:
        counts = [int.from_bytes(os.read(file, 8), "little") for file in self._files]
        return sum(counts[::2]), sum(counts[1::2]), time.perf_counter_ns()


def _opened(core: int, result: int) -> int:
    """A counter of reads of the last-level cache on one core: all reads, or misses."""
    kind = _LAST_LEVEL | result << 16
    attributes = _ATTRIBUTES.pack(_HW_CACHE, _ATTRIBUTES.size, kind, 0, 0, 0, 0, 0, 0, 0)
    try:
        return system_call("perf_event_open", attributes, -1, core, -1, _CLOSE_ON_EXEC)
    except OSError as error:
        raise CotenantError(f"counters of the cache cannot be read: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        paranoid = f"perf_event_paranoid is {perf_event_paranoid()}"
        return f"not allowed ({paranoid}): set it to 0 or less, or give the process CAP_PERFMON"
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV):
        return "this processor does not offer them here, as in most virtual machines"
    return error.strerror or str(error)
