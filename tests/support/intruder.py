"""Another thread's work, between two steps that are taken under a driver's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cotenant.serve.engine.driver import Driver


class Intruder:
    """Stands in for a driver's lock. Does `work` once, before this thread takes the lock or after it lets it go: the
    moments are counted from 0.
    """

    def __init__(self, driver: Driver, moment: int, work: Callable[[], object]) -> None:
        self._driver = driver
        self.inner: Any = driver._lock
        self._left = moment
        self._work = work
        self._thread = threading.get_ident()
        driver._lock = self  # type: ignore[assignment]

    @property
    def came(self) -> bool:
        """Whether there was such a moment."""
        return self._left < 0

    def leave(self) -> None:
        self._driver._lock = self.inner

    def __enter__(self) -> None:
        self._step()
        self.inner.acquire()

    def __exit__(self, *_: Any) -> None:
        self.inner.release()
        self._step()

    def _step(self) -> None:
        if threading.get_ident() == self._thread:
            self._left -= 1
            if self._left == -1:
                self._work()
