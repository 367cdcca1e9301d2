"""Resources of the system that could not be had: counted for the metrics page, and logged.

Each want costs the call that met it. The counts are those of this process, like the limits that they speak of, and of
front-end processes, which tell theirs.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

_LOG_EVERY_S = 60.0
_log = logging.getLogger("cotenant.shortages")


class Resource(StrEnum):
    """What a process asks its system for; the label of the metric."""

    THREAD = "thread"
    PROCESS = "process"
    DESCRIPTOR = "descriptor"
    MEMORY = "memory"
    DISK = "disk"


_BY_ERRNO = {
    errno.EAGAIN: Resource.PROCESS,
    errno.EMFILE: Resource.DESCRIPTOR,
    errno.ENFILE: Resource.DESCRIPTOR,
    errno.ENOMEM: Resource.MEMORY,
    errno.ENOSPC: Resource.DISK,
    errno.EDQUOT: Resource.DISK,
}
_MEND = {
    Resource.THREAD: "raise the limit of threads and processes (pids cgroup, ulimit -u)",
    Resource.PROCESS: "raise the limit of threads and processes (pids cgroup, ulimit -u)",
    Resource.DESCRIPTOR: "raise the limit of open files (ulimit -n)",
    Resource.MEMORY: "give the server more memory, or serve fewer models",
    Resource.DISK: "free some space on the disk, and see whether it hangs or is slow",
}
_counted: Counter[Resource] = Counter()
_logged_s: dict[Resource, float] = {}
_lock = threading.Lock()


def report(resource: Resource, lost: str, times: int = 1) -> None:
    """Count a want of a resource. `lost` says what it costs; it is logged once a minute for each resource."""
    now_s = time.monotonic()
    with _lock:
        _counted[resource] += times
        is_due = now_s - _logged_s.get(resource, -_LOG_EVERY_S) >= _LOG_EVERY_S
        if is_due:
            _logged_s[resource] = now_s
    if is_due:
        _log.warning("the system gives no further %s: %s; %s", resource, lost, _MEND[resource])


def report_error(error: OSError, lost: str) -> None:
    """As `report`, where the error of a system call says that a resource is short."""
    resource = _BY_ERRNO.get(error.errno or 0)
    if resource is not None:
        report(resource, lost)


def start_thread(thread: threading.Thread, lost: str) -> None:
    """Start a thread; count it where that cannot be, and raise RuntimeError as `Thread.start` does."""
    try:
        thread.start()
    except RuntimeError:
        report(Resource.THREAD, lost)
        raise


def add(met: Mapping[str, int]) -> None:
    """Count what another process of this server has met, and logged, by the values of Resource."""
    with _lock:
        _counted.update({Resource(name): times for name, times in met.items()})


def counts() -> Mapping[Resource, int]:
    """How often each resource was short so far."""
    with _lock:
        return Counter(_counted)
