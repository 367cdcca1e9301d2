"""Worker threads pinned to partitions: one thread per set of cores, which sleeps until it is given work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from cotenant.execute.sched_slice import DEFAULT, set_slice
from cotenant.shortages import start_thread
from cotenant.work import Share

Task = Callable[[], None]
T = TypeVar("T")


class Lane:
    """Runs work in order on one thread. With several cores the thread sits on the first; its pool has the others.

    `nice` is the nice value of the thread, where the platform has one for each thread.
    """

    def __init__(self, partition: Share, nice: int = 0) -> None:
        self._partition = partition
        self._nice = nice
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        name = "cotenant-lane-" + "-".join(str(core) for core in partition.cores)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread, f"launches on cores {partition.cores} fail")

    def put(self, task: Task) -> None:
        """Queue a task; never blocks. It must not raise."""
        self._queue.put(task)

    def stop(self) -> None:
        """Stop when what is queued is done; never blocks."""
        self._queue.put(None)

    def close(self, until_s: float | None = None) -> None:
        """Finish what is queued and stop; nothing is waited for beyond `until_s` of the monotonic clock."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(left_s(until_s))

    def _run(self) -> None:
        settle(self._partition.cores, self._nice)
        while (task := self._queue.get()) is not None:
            task()
            del task  # nothing that it holds may wait for the next one


def left_s(until_s: float | None) -> float | None:
    """Seconds until a time of the monotonic clock, 0 when it has passed; None, as time-outs take it, for no limit."""
    return None if until_s is None else max(0.0, until_s - time.monotonic())


def settle(cores: tuple[int, ...], nice: int) -> None:
    """Make the calling thread one that runs launches: bound to the first of the cores, and nice."""
    pin(cores[:1])
    be_nice(nice)


def be_nice(nice: int) -> None:
    """Give the calling thread, and those that it will start, at least this nice value.

    What is nicer already, with its process, stays so: only the superuser may take that back. It gets the time slice
    that all have, too, if the thread that started it has a short one.
    """
    set_slice(DEFAULT)
    if hasattr(os, "setpriority"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), nice))


_GENTLY = 5
"""Added to the nice value of lanes for loading libraries and models: lanes on the same cores go first."""


def run_gently(work: Callable[[], T]) -> T:
    """Do work on a thread with a higher nice value than the calling one; return its result, raise its exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        if hasattr(os, "getpriority"):
            be_nice(min(19, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + _GENTLY))
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="cotenant-gentle")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def pin(cores: tuple[int, ...]) -> None:
    """Bind the calling thread to cores, where the platform can and they exist; a partition elsewhere stays unpinned.

    A thread inherits the cores of the one that started it, often a lane's: they do not bound what it may be given.
    """
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            pass
