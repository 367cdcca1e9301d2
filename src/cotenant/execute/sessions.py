"""The set of sessions of a worker: those of the present lanes, and those of the next lanes while they are loaded."""

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
"""Sends a message to the worker; returns False without a worker. Raises CotenantError when it cannot be sent."""


class SessionSet:
    """Sessions that the worker of a model loads when it starts.

    `prepare` and `keep` have one caller at a time; the other methods are for the thread that supervises the worker.
    """

    def __init__(self, model: Open) -> None:
        self._lock = threading.Lock()
        self._model = model
        self._sent: Wanted = ()
        """Sessions that the starting worker was asked for."""
        self._trying: Wanted = ()
        """Sessions that the worker loads in addition; dropped if they cannot be loaded."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ended = threading.Event()
        self._reason = ""

    @property
    def model(self) -> Open:
        """The message for a worker that starts now."""
        return self._model

    def prepare(self, sessions: Wanted, shapes: dict[str, tuple[int, ...]], send: Send) -> None:
        """Add sessions, and wait until the worker has them or is lost. Raises ModelError when they cannot be loaded.

        Without a worker it does not wait: the next worker loads them before it is ready.
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
        """Unload all other sessions."""
        with self._lock:
            self._model = msgspec.structs.replace(self._model, sessions=sessions)
        send(Keep(tuple(threads for threads, _ in sessions)))

    # --- for the thread that supervises the worker -----------------------------------------------------------------

    def hold(self, keep: Callable[[], None]) -> None:
        """Run `keep`, which supervises workers, while the model's files are locked in their cache."""
        with HeldFolder(Path(self._model.cache_dir) / self._model.graph):
            keep()

    def begin(self) -> Open:
        """The message for a worker that has started."""
        with self._lock:
            self._sent, self._trying = self._model.sessions, ()
            return self._model

    def adopt(self, theirs: Open) -> str:
        """Why a running worker, which has `theirs`, cannot be used in place of one that starts now, or ""."""
        with self._lock:
            if msgspec.structs.replace(theirs, sessions=()) != msgspec.structs.replace(self._model, sessions=()):
                return "has another model, or other settings"
            if _without(self._model.sessions, theirs.sessions):
                return "lacks sessions for these lanes"
            self._reported, self._trying = self._model.sessions, ()
            return ""

    def rest(self) -> Prepare | None:
        """Sessions added since `begin`, which a worker must load before it is ready; None without any."""
        with self._lock:
            missing = _without(self._model.sessions, self._sent)
            self._sent += missing
            self._trying = missing
            return Prepare(missing, self._shapes) if missing else None

    def end(self, reason: str) -> None:
        """The additional sessions are loaded, or are dropped if there is a `reason`; the waiting `prepare` returns.

        Without a reason the worker may also have been lost: the next one loads them with the model.
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
