"""Threads on demand for the calls of the front-ends.

Does what `concurrent.futures.ThreadPoolExecutor` does for grpcio, with less locking around every call (measured: some
8 % of the processor time of a small request), and with daemon threads, so that a call that never ends cannot keep the
process alive. A thread that cannot be started costs no call: work stays in line for the threads that there are.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from cotenant.errors import CotenantError
from cotenant.shortages import start_thread

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("cotenant.grpc")


class Slots:
    """A number of places that can be taken without waiting; a semaphore that costs a tenth of `threading`'s."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def take(self) -> bool:
        """Take a place; False when none is free."""
        try:
            self._free.get_nowait()
        except Empty:
            return False
        return True

    def give_back(self) -> None:
        """Free the place taken."""
        self._free.put(None)


class PendingCall:
    """What grpcio needs of a future: it tells its callbacks when the call has ended."""

    __slots__ = ("_callbacks", "_ended")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[PendingCall], object]] = []
        self._ended = False

    def add_done_callback(self, callback: Callable[[PendingCall], object]) -> None:
        """Call back once, when the call has ended; at once if it has."""
        self._callbacks.append(callback)
        if self._ended:
            self._drain()

    def end(self) -> None:
        """Mark the call as ended and tell the callbacks."""
        self._ended = True
        self._drain()

    def _drain(self) -> None:
        # `end` and a late `add_done_callback` may both come here; popping hands each callback to one of them.
        while True:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback(self)


class CallThreads:
    """Runs calls on at most `limit` threads, which are started when all are busy; further calls wait in line. `nice` is
    the priority of the threads.

    `start` comes first: the threads that it starts stay until `shutdown`, so that work in line always has one.
    """

    def __init__(self, limit: int, name: str, nice: int = 0) -> None:
        self._limit = limit
        self._name = name
        self._nice = nice
        self._work: SimpleQueue[tuple[PendingCall, Callable[..., object], Any, Any, int] | None] = SimpleQueue()
        self._present = threading.local()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._started = 0

    def start(self, count: int = 1) -> None:
        """Start so many threads, or as many as can be had. Raises CotenantError when there is none."""
        for _ in range(count):
            with self._lock:
                self._started += 1
            self._start_one()
        if self._started == 0:
            raise CotenantError(
                f"no thread can be started for {self._name}: raise the limit of threads and processes (pids cgroup, "
                "ulimit -u)"
            )

    def submit(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> PendingCall:
        """Run a function on one of the threads."""
        call = PendingCall()
        self._work.put((call, function, args, kwargs, time.monotonic_ns()))
        with self._lock:
            self._unfinished += 1
            if self._unfinished <= self._started or self._started >= self._limit:
                return call
            self._started += 1
        self._start_one()
        return call

    def came_ns(self) -> int:
        """When the call that runs on this thread was submitted, in monotonic nanoseconds; 0 on another thread."""
        since_ns: int = getattr(self._present, "since_ns", 0)
        return since_ns

    def shutdown(self, wait: bool = False) -> None:
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
        if self._nice and hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            item = self._work.get()
            if item is None:
                return
            call, function, args, kwargs, self._present.since_ns = item
            try:
                function(*args, **kwargs)
            except Exception:
                _log.exception("a call of %s failed", self._name)
            finally:
                with self._lock:
                    self._unfinished -= 1
                call.end()
            del item, call, function, args, kwargs


class LoopThreads(Executor):
    """CallThreads as an event loop takes them in `run_in_executor`. Raises CotenantError when there is no thread."""

    def __init__(self, limit: int, name: str, nice: int = 0) -> None:
        self._threads = CallThreads(limit, name, nice)
        self._threads.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on one of the threads."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._threads.submit(run)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let the threads end when the work is done; they are never waited for."""
        self._threads.shutdown()
