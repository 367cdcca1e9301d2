"""Lanes: one thread for each set of cores, pinned to them, which sleeps until it gets a task."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from cotenant.execute.sched_slice import DEFAULT, set_slice
from cotenant.linux import nice_value, pin, raise_nice
from cotenant.shortages import start_thread
from cotenant.work import Share

Task = Callable[[], None]
T = TypeVar("T")


class Lane:
    """Runs tasks in order on one thread, pinned to the first core; the engine's thread pool uses the others.

    `nice` is the nice value of the thread, on platforms with one for each thread.
    """

    def __init__(self, partition: Share, nice: int = 0) -> None:
        self._partition = partition
        self._nice = nice
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        name = "cotenant-lane-" + "-".join(str(core) for core in partition.cores)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread, f"launches on cores {partition.cores} fail")

    def put(self, task: Task) -> None:
        """Queue a task; never blocks. The task must not raise."""
        self._queue.put(task)

    def stop(self) -> None:
        """Stop after the queued tasks; never blocks."""
        self._queue.put(None)

    def close(self, until_s: float | None = None) -> None:
        """Run the queued tasks and stop. Waits until `until_s` of the monotonic clock at most."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(left_s(until_s))

    def _run(self) -> None:
        settle(self._partition.cores, self._nice)
        while (task := self._queue.get()) is not None:
            task()
            del task  # frees the task's tensors before the wait for the next task


def left_s(until_s: float | None) -> float | None:
    """Seconds until a time of the monotonic clock, at least 0; None (no limit) for None."""
    return None if until_s is None else max(0.0, until_s - time.monotonic())


def settle(cores: tuple[int, ...], nice: int) -> None:
    """Make the calling thread the thread of a lane: pinned to the first of the cores, with this nice value."""
    pin(cores[:1])
    be_nice(nice)


def be_nice(nice: int) -> None:
    """Raise the nice value of the calling thread, and of threads that it starts, to at least `nice`.

    A higher value is kept: only the superuser may lower it. The thread also gets the default time slice, if the thread
    that started it has a short one.
    """
    set_slice(DEFAULT)
    raise_nice(nice)


_GENTLY = 5
"""Nice value, added to that of lanes, for loading libraries and models: lanes on the same cores go first."""


def run_gently(work: Callable[[], T]) -> T:
    """Run `work` on a thread with a higher nice value; return its result, or raise its exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        be_nice(min(19, nice_value() + _GENTLY))
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
