"""Worker threads pinned to partitions: one thread per set of cores, which sleeps until it is given work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from cotenant.types import Partition

Work = Callable[[], None]


class Lane:
    """Runs work in order on one thread. With several cores the thread sits on the first; its pool has the others.

    `nice` is the nice value of the thread, where the platform has one for each thread.
    """

    def __init__(self, partition: Partition, nice: int = 0) -> None:
        self._partition = partition
        self._nice = nice
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        name = "cotenant-lane-" + "-".join(str(core) for core in partition.cores)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue work; never blocks. Work must not raise."""
        self._queue.put(work)

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pin(self._partition.cores[:1])
        if hasattr(os, "setpriority"):
            thread = threading.get_native_id()
            # Of a process that is nicer already the thread stays so: only the superuser may take that back.
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), self._nice))
        while (work := self._queue.get()) is not None:
            work()


def pin(cores: tuple[int, ...]) -> None:
    """Bind the calling thread to cores, where the platform can and they exist; a partition elsewhere stays unpinned.

    A thread inherits the cores of the one that started it, often a lane's: they do not bound what it may be given.
    """
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            pass
