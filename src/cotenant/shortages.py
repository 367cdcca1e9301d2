"""Shortages of system resources: counted for the metrics page, and logged.

Each shortage fails the call that met it. The counts include this process and the front-end processes that report
theirs.
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
    """A resource of the operating system; the label of the metric."""

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
_HINTS = {
    Resource.THREAD: "raise the limit of threads and processes (pids cgroup, ulimit -u)",
    Resource.PROCESS: "raise the limit of threads and processes (pids cgroup, ulimit -u)",
    Resource.DESCRIPTOR: "raise the limit of open files (ulimit -n)",
    Resource.MEMORY: "give the server more memory, or serve fewer models",
    Resource.DISK: "free some space on the disk, and check whether it hangs or is slow",
}
_counted: Counter[Resource] = Counter()
_logged_s: dict[Resource, float] = {}
_lock = threading.Lock()


def report(resource: Resource, lost: str, times: int = 1) -> None:
    """Count a shortage of a resource; `lost` names the effect. Logged at most once a minute for each resource."""
    now_s = time.monotonic()
    with _lock:
        _counted[resource] += times
        is_due = now_s - _logged_s.get(resource, -_LOG_EVERY_S) >= _LOG_EVERY_S
        if is_due:
            _logged_s[resource] = now_s
    if is_due:
        _log.warning("the system has no further %s: %s; %s", resource, lost, _HINTS[resource])


def report_error(error: OSError, lost: str) -> None:
    """As `report`, if the error of a system call is a shortage of a resource."""
    resource = _BY_ERRNO.get(error.errno or 0)
    if resource is not None:
        report(resource, lost)


def start_thread(thread: threading.Thread, lost: str) -> None:
    """Start a thread. If the system refuses, count the shortage and raise RuntimeError, as `Thread.start` does."""
    try:
        thread.start()
    except RuntimeError:
        report(Resource.THREAD, lost)
        raise


def add(met: Mapping[str, int]) -> None:
    """Add the counts of another process of this server, by the values of Resource."""
    with _lock:
        _counted.update({Resource(name): times for name, times in met.items()})


def counts() -> Mapping[Resource, int]:
    """Number of shortages so far, by resource."""
    with _lock:
        return Counter(_counted)
