"""Inbox of an event loop for calls from other threads, with one wake-up for all calls that wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_log = logging.getLogger("cotenant.frontend")


class LoopInbox:
    """Thread-safe queue of calls for the running loop. Create it on the loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Call a function on the loop; at once if this is its thread. Safe on any thread."""
        if threading.get_ident() == self._thread:
            _make(call)
            return
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                _log.warning("an answer was dropped: the server had already stopped")

    def when_done(self, future: Future[T], then: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """When a future is done, call `then` with its value or `failed` with its error, on the loop."""

        def follow() -> None:
            try:
                then(future.result())
            except Exception as error:
                failed(error)

        future.add_done_callback(lambda _: self.put(follow))

    def _drain(self) -> None:
        self._is_woken = False  # before the calls are taken, so that later ones wake again
        while self._calls:
            _make(self._calls.popleft())


def _make(call: Callable[[], None]) -> None:
    """Run a call; an error of it does not affect other calls."""
    try:
        call()
    except Exception:
        _log.exception("an answer could not be passed to its connection")
