"""Requests of one event loop that wait for their query to end: how results come to the loop, and who has gone away."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from cotenant.wire.api import InferResult

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Result = asyncio.Future[InferResult]

_log = logging.getLogger("cotenant.http")

_WATCH_AFTER_S = 0.01
"""A client's disconnect is looked for once its query has lasted this long, or twice that; sooner costs a task each."""


class PendingReplies:
    """The waiting requests of the running loop. `cancel` withdraws a query, by its number."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[int], None]) -> None:
        self.loop = loop
        self._cancel = cancel
        self._thread = threading.get_ident()
        self._ended: deque[tuple[_Result, InferResult]] = deque()
        self._is_called = False
        """The loop has been asked to settle what has ended."""
        # One timer for all requests: those of `_new` came since it rang, those of `_old` before that.
        self._new: dict[_Result, tuple[int, Receive]] = {}
        self._old: dict[_Result, tuple[int, Receive]] = {}
        self._watchers: dict[_Result, asyncio.Task[None]] = {}
        self._is_ticking = False

    async def result(
        self, submit: Callable[[Callable[[InferResult], None]], int], receive: Receive, threads: Executor | None = None
    ) -> InferResult:
        """Submit a query, on one of `threads` if they are given, and wait for its end.

        A client that goes away meanwhile withdraws it.
        """
        future: _Result = self.loop.create_future()
        done = partial(self._done, future)
        query = submit(done) if threads is None else await self.loop.run_in_executor(threads, submit, done)
        if future.done():
            return future.result()
        self._new[future] = query, receive
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.call_later(_WATCH_AFTER_S, self._tick)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(query)
            raise
        finally:
            if self._new.pop(future, None) is None and self._old.pop(future, None) is None:
                self._watchers.pop(future).cancel()

    def _done(self, future: _Result, result: InferResult) -> None:
        """A query has ended; from any thread. The loop is called once for all that end before it gets there."""
        if threading.get_ident() == self._thread:
            _settle(future, result)
            return
        self._ended.append((future, result))
        if not self._is_called:
            self._is_called = True
            try:
                self.loop.call_soon_threadsafe(self._settle_all)
            except RuntimeError:
                _log.warning("query %d ended after the HTTP server had stopped", result.query)

    def _settle_all(self) -> None:
        self._is_called = False  # first: whatever is appended from now on calls again
        while self._ended:
            _settle(*self._ended.popleft())

    def _tick(self) -> None:
        for future, (query, receive) in self._old.items():
            self._watchers[future] = self.loop.create_task(self._cancel_on_disconnect(receive, query))
        self._old, self._new = self._new, {}
        self._is_ticking = bool(self._old)
        if self._is_ticking:
            self.loop.call_later(_WATCH_AFTER_S, self._tick)

    async def _cancel_on_disconnect(self, receive: Receive, query: int) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel(query)


def _settle(future: _Result, result: InferResult) -> None:
    if not future.done():
        future.set_result(result)
