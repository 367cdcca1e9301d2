"""The sessions that a worker has to have: those of the lanes that are served now, and soon those of the next ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from cotenant.errors import CotenantError
from cotenant.execute.contents import HeldFolder
from cotenant.execute.errors import ModelError
from cotenant.execute.worker.channel import Keep, Message, Open, Prepare

Wanted = tuple[tuple[int | tuple[int, ...], tuple[tuple[int, int], ...]], ...]
"""Threads, or cores, and the ranges of units to be run with them."""
Send = Callable[[Message], bool]
"""Tells the worker something; False when it is not there. Raises CotenantError when that cannot be said."""


class SessionSet:
    """What the worker of a model loads when it starts, which is what it has by then.

    One caller at a time prepares and keeps; the rest is for the thread that keeps the worker.
    """

    def __init__(self, model: Open) -> None:
        self._lock = threading.Lock()
        self._model = model
        self._told: Wanted = ()
        """What a worker that is opening knows of."""
        self._trying: Wanted = ()
        """What a worker loads beside what it has: forgotten if that cannot be."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ended = threading.Event()
        self._reason = ""

    @property
    def model(self) -> Open:
        """What to tell a worker that has started now."""
        return self._model

    def prepare(self, sessions: Wanted, shapes: dict[str, tuple[int, ...]], send: Send) -> None:
        """Add sessions, and wait until the worker has them or is lost. Raises ModelError when they cannot be loaded.

        A worker that is not there is not waited for: it is up again when it has these as well.
        """
        with self._lock:
            missing = _without(sessions, self._model.sessions)
            if not missing:
                return
            self._ended.clear()
            self._reason = ""
            self._trying, self._shapes = missing, shapes
            self._model = msgspec.structs.replace(self._model, sessions=self._model.sessions + missing)
        try:
            if not send(Prepare(missing, shapes)):
                return
        except CotenantError as error:
            self.end(str(error))
        self._ended.wait()
        if self._reason:
            raise ModelError(Path(self._model.path), self._reason, "It is served as before")

    def keep(self, sessions: Wanted, send: Send) -> None:
        """Leave these sessions alone."""
        with self._lock:
            self._model = msgspec.structs.replace(self._model, sessions=sessions)
        send(Keep(tuple(threads for threads, _ in sessions)))

    # --- for who keeps the worker ---------------------------------------------------------------------------------

    def hold(self, keep: Callable[[], None]) -> None:
        """Keep workers, whose model's files stay meanwhile."""
        with HeldFolder(Path(self._model.cache_dir) / self._model.graph):
            keep()

    def begin(self) -> Open:
        """What to tell a worker that has started."""
        with self._lock:
            self._told, self._trying = self._model.sessions, ()
            return self._model

    def adopt(self, theirs: Open) -> str:
        """Why a running worker, which has `theirs`, cannot be used in place of one that starts now, or ""."""
        with self._lock:
            if msgspec.structs.replace(theirs, sessions=()) != msgspec.structs.replace(self._model, sessions=()):
                return "has another model, or other settings"
            if _without(self._model.sessions, theirs.sessions):
                return "lacks sessions for these lanes"
            self._told, self._trying = self._model.sessions, ()
            return ""

    def rest(self) -> Prepare | None:
        """What was asked for since a worker was told what to load: it is not up before it has that too."""
        with self._lock:
            missing = _without(self._model.sessions, self._told)
            self._told += missing
            self._trying = missing
            return Prepare(missing, self._shapes) if missing else None

    def end(self, reason: str) -> None:
        """What the worker was to load beside the rest is there, or, with a reason, is forgotten: whoever waits goes on.

        Without a reason a worker may also have been lost: the next one loads it with the model.
        """
        with self._lock:
            if reason:
                left = _without(self._model.sessions, self._trying)
                self._model = msgspec.structs.replace(self._model, sessions=left)
            self._trying = ()
            if not self._ended.is_set():
                self._reason = reason
                self._ended.set()


def _without(sessions: Wanted, known: Wanted) -> Wanted:
    """The sessions that are not among the known ones."""
    there = {(threads, each) for threads, ranges in known for each in ranges}
    left = [(threads, tuple(each for each in ranges if (threads, each) not in there)) for threads, ranges in sessions]
    return tuple((threads, ranges) for threads, ranges in left if ranges)
