"""Threads on demand for calls that may last: unlike those of `ThreadPoolExecutor`, the interpreter does not wait for
them when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """At most `limit` daemon threads, started when all others are busy; further calls wait in line."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._changed = threading.Condition()
        self._line: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = self._idle = 0
        self._is_over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on one of the threads. Raises RuntimeError after `shutdown`, or where no thread can start."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_over:
                raise RuntimeError(f"{self._name}: no calls are taken after the shutdown")
            self._line.append((future, partial(fn, *args, **kwargs)))
            if self._idle < len(self._line) and self._threads < self._limit:
                self._start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they are idle; they are never waited for. Calls in line are cancelled."""
        with self._changed:
            self._is_over = True
            line, self._line = list(self._line), deque()
            self._changed.notify_all()
        for future, _ in line:
            future.cancel()

    def _start(self) -> None:
        """Under the lock. Without another thread the call waits for those that there are."""
        name = f"{self._name}-{self._threads + 1}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            if self._threads == 0:
                self._line.pop()
                raise
        else:
            self._threads += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: bool(self._line) or self._is_over)
                self._idle -= 1
                if not self._line:
                    return
                future, call = self._line.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # nothing that they hold may wait for the next call
