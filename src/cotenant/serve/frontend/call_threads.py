"""Threads on demand for what would hold an event loop up.

Does what `concurrent.futures.ThreadPoolExecutor` does, with daemon threads, so that work that never ends cannot keep
the process alive, and with a line that is fair to tenants. A thread that cannot be started costs no call: work stays in
line for the threads that there are.
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
"""Work in steps: it yields the cost of the next step, and returns what it has made."""

_log = logging.getLogger("cotenant.frontend")
_QUANTUM_BYTES = 1 << 20
"""Bytes of a tenant's turn. 1 MiB of JSON is decoded in about 8 ms."""


class LoopThreads:
    """Runs work on at most `limit` threads, which are started when all are busy; further work waits in a FairLine.

    The first thread is there from the start, so that work in line always has one. Raises CotenantError where it cannot
    be started.
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
        """Run a function on one of the threads. `key` names the tenant whose work it is, `cost` is in bytes."""
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
        """Run work in steps, between which the threads take work of other keys. `cost` is that of the first step."""
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
        """Let the threads end when the work is done; they are never waited for."""
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
        """Start a thread that is counted as started already; where there is none, work waits for the others."""
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        try:
            start_thread(thread, f"calls wait in line for the threads of {self._name} that there are")
        except RuntimeError:
            with self._changed:
                self._started -= 1

    def _next(self) -> Callable[[], None] | None:
        """The next piece of work, which is waited for; None when all is done and none is to come."""
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
            except Exception:  # of what is called when the work is done
                _log.exception("a call of %s failed", self._name)
            finally:
                with self._changed:
                    self._unfinished -= 1
            del work
