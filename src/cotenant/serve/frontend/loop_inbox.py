"""What other threads hand to an event loop: it is woken once for all that comes before it gets there."""

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
    """Calls for the running loop. Made on its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Have a call made on the loop, at once where this is its thread. From any thread."""
        if threading.get_ident() == self._thread:
            _make(call)
            return
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                _log.warning("an answer came after the server had stopped")

    def when_done(self, future: Future[T], then: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """Have called on the loop, when a future is done, what its value or its error is for."""

        def follow() -> None:
            try:
                then(future.result())
            except Exception as error:
                failed(error)

        future.add_done_callback(lambda _: self.put(follow))

    def _drain(self) -> None:
        self._is_woken = False  # first: whatever is put from now on wakes again
        while self._calls:
            _make(self._calls.popleft())


def _make(call: Callable[[], None]) -> None:
    """One call that fails must not cost the others theirs."""
    try:
        call()
    except Exception:
        _log.exception("an answer could not be handed over")
