"""Threads on demand for what would hold an event loop up.

Does what `concurrent.futures.ThreadPoolExecutor` does, with daemon threads, so that work that never ends cannot keep
the process alive. A thread that cannot be started costs no call: work stays in line for the threads that there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from cotenant.errors import CotenantError
from cotenant.execute.threads.lanes import be_nice
from cotenant.shortages import start_thread

T = TypeVar("T")

_log = logging.getLogger("cotenant.frontend")


class LoopThreads:
    """Runs work on at most `limit` threads, which are started when all are busy; further work waits in line.

    The first thread is there from the start, so that work in line always has one. Raises CotenantError where it cannot
    be started.
    """

    def __init__(self, limit: int, name: str, nice: int = 0) -> None:
        self._limit = limit
        self._name = name
        self._nice = nice
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._started = 1
        self._start_one()
        if self._started == 0:
            raise CotenantError(
                f"no thread can be started for {self._name}: raise the limit of threads and processes (pids cgroup, "
                "ulimit -u)"
            )

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on one of the threads."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        with self._lock:
            self._unfinished += 1
            if self._unfinished <= self._started or self._started >= self._limit:
                return future
            self._started += 1
        self._start_one()
        return future

    def shutdown(self) -> None:
        """Let the threads end when the work is done; they are never waited for."""
        for _ in range(self._limit):
            self._work.put(None)

    def _start_one(self) -> None:
        """Start a thread that is counted as started already; where there is none, work waits for the others."""
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        try:
            start_thread(thread, f"calls wait in line for the threads of {self._name} that there are")
        except RuntimeError:
            with self._lock:
                self._started -= 1

    def _run(self) -> None:
        if self._nice:
            be_nice(self._nice)
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # of what is called when the work is done
                _log.exception("a call of %s failed", self._name)
            finally:
                with self._lock:
                    self._unfinished -= 1
            del work
