"""The sessions that a worker has to have: those of the lanes that are served now, and soon those of the next ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from cotenant.execute.contents import Held
from cotenant.execute.errors import ModelError
from cotenant.execute.worker.channel import Keep, Message, Open, Prepare

Wanted = tuple[tuple[int | tuple[int, ...], tuple[tuple[int, int], ...]], ...]
"""Threads, or cores, and the ranges of units to be run with them."""
Send = Callable[[Message], bool]
"""Tells the worker something; False when it is not there."""


class SessionLadder:
    """What the worker of a model loads when it starts, which is what it has by then. One caller at a time."""

    def __init__(self, model: Open) -> None:
        self.model = model
        self._ended = threading.Event()
        self._reason = ""

    def hold(self, keep: Callable[[], None]) -> None:
        """Keep workers, whose model's files stay meanwhile."""
        with Held(Path(self.model.cache_dir) / self.model.graph):
            keep()

    def prepare(self, sessions: Wanted, shapes: dict[str, tuple[int, ...]], send: Send) -> None:
        """Add sessions, and wait until the worker has them or is lost. Raises ModelError when it refuses them."""
        before = self.model
        missing = _without(sessions, before.sessions)
        if not missing:
            return
        self._ended.clear()
        self._reason = ""
        self.model = msgspec.structs.replace(before, sessions=before.sessions + missing)
        if not send(Prepare(missing, shapes)):
            return
        self._ended.wait()
        if self._reason:
            self.model = before
            raise ModelError(Path(before.path), self._reason, "It is served as before")

    def keep(self, sessions: Wanted, send: Send) -> None:
        """Leave these sessions alone."""
        self.model = msgspec.structs.replace(self.model, sessions=sessions)
        send(Keep(tuple(threads for threads, _ in sessions)))

    def end(self, reason: str) -> None:
        """The worker has answered, or is lost: whoever waits goes on."""
        self._reason = reason
        self._ended.set()


def _without(sessions: Wanted, known: Wanted) -> Wanted:
    """The sessions that are not among the known ones."""
    there = {(threads, each) for threads, ranges in known for each in ranges}
    left = [(threads, tuple(each for each in ranges if (threads, each) not in there)) for threads, ranges in sessions]
    return tuple((threads, ranges) for threads, ranges in left if ranges)
