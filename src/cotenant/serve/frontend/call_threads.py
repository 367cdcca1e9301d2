"""Thread pool for work that would block an event loop.

It differs from `concurrent.futures.ThreadPoolExecutor` in three points. Its threads are daemons, so endless work does
not keep the process alive. Its queue is fair to tenants. If a thread cannot be started, work waits for the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

from cotenant.errors import CotenantError
from cotenant.execute.threads.lanes import be_nice
from cotenant.serve.frontend.fair_line import FairLine
from cotenant.shortages import start_thread

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work in steps: yields the cost of the next step, and returns the result."""

_log = logging.getLogger("cotenant.frontend")
_QUANTUM_BYTES = 1 << 20
"""Quantum of the deficit round robin in bytes. Decoding 1 MiB of JSON takes about 8 ms."""


class LoopThreads:
    """Pool of at most `limit` threads, started when all others are busy; further work waits in a FairLine.

    The first thread starts at once, so queued work always has one. Raises CotenantError if it cannot be started.
    """

    def __init__(self, limit: int, name: str, nice: int = 0) -> None:
        self._limit = limit
        self._name = name
        self._nice = nice
        self._changed = threading.Condition()
        self._line: FairLine[Callable[[], None]] = FairLine(_QUANTUM_BYTES)
        self._is_over = False
        self._unfinished = 0
        self._started = 1
        self._start_one()
        if self._started == 0:
            raise CotenantError(
                f"no thread can be started for {self._name}: raise the limit of threads and processes (pids cgroup, "
                "ulimit -u)"
            )

    def submit(self, function: Callable[[], T], key: str = "", cost: int = 1) -> Future[T]:
        """Run a function on one of the threads. `key`: tenant to which the work is charged; `cost`: bytes."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._put(key, cost, run)
        return future

    def submit_steps(self, steps: Steps[T], key: str, cost: int) -> Future[T]:
        """Run work in steps; between two steps the threads serve other keys. `cost`: bytes of the first step."""
        future: Future[T] = Future()

        def step() -> None:
            if not future.running() and not future.set_running_or_notify_cancel():
                return
            try:
                cost = next(steps)
            except StopIteration as end:
                future.set_result(end.value)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._put(key, cost, step, is_rest=True)

        self._put(key, cost, step)
        return future

    def shutdown(self) -> None:
        """End the threads after the queued work, without waiting for them."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _put(self, key: str, cost: int, work: Callable[[], None], *, is_rest: bool = False) -> None:
        with self._changed:
            self._line.put(key, cost, work, is_rest=is_rest)
            self._unfinished += 1
            self._changed.notify()
            if is_rest or self._unfinished <= self._started or self._started >= self._limit:
                return
            self._started += 1
        self._start_one()

    def _start_one(self) -> None:
        """Start a thread that is already counted; if that fails, work waits for the other threads."""
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        try:
            start_thread(thread, f"calls wait for the running threads of {self._name}")
        except RuntimeError:
            with self._changed:
                self._started -= 1

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next work item; None when the pool is shut down and its queue is empty."""
        with self._changed:
            while (work := self._line.take()) is None and not self._is_over:
                self._changed.wait()
            return work

    def _run(self) -> None:
        if self._nice:
            be_nice(self._nice)
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # raised by a callback of the future
                _log.exception("a callback of %s failed", self._name)
            finally:
                with self._changed:
                    self._unfinished -= 1
            del work
