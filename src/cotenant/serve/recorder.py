"""Writes the server's trace: an observer that keeps what happened, and a thread that writes it a little later."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import Timing
from cotenant.predict.table import TablePredictor
from cotenant.serve.engine.clock import Clock
from cotenant.shortages import Resource, report
from cotenant.trace import Header, TraceWriter, header
from cotenant.work import Machine

FLUSH_NS = 100_000_000
"""How long a record may stay in memory: writing in blocks keeps files and encoding out of the way of queries."""
_FLUSH_PRIORITY = 9
_MOST_TRACES = 64
"""Servers of one repository that record at the same time; those beyond do not."""

_log = logging.getLogger("cotenant.recorder")


class Recorder:
    """Records every event with its actions. The trace of the run before is kept beside it with the ending `.old`.

    Encoding and writing happen on the clock's thread, within FLUSH_NS of the event. Where the file cannot be begun, or
    cannot be written any more, there is a warning, serving goes on, and each event that is not recorded is counted
    (`shortages`). A trace that another server writes is left alone: this one is written to a file beside it with a
    number, `trace-2.jsonl`, and the log says so.
    """

    def __init__(
        self, path: Path, policy: Policy, machine: Machine, clock: Clock, *, limit_bytes: int | None = None
    ) -> None:
        self._clock = clock
        self._path = path
        self._appending = threading.Lock()
        self._writing = threading.Lock()
        self._records: list[tuple[int, Event, list[Action]]] = []
        self._is_broken = False
        self._lock: BinaryIO | None = None
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = header(policy, TablePredictor({}), (), machine, created=created)
        try:
            self._path, self._lock = _own(path)
            self._writer = _begun(self._path, head, limit_bytes)
        except OSError as error:
            self._stop(error)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer."""
        if self._is_broken:
            self._count(1)
            return None
        with self._appending:
            is_first = not self._records
            self._records.append((time_ns, event, actions))
        if is_first:
            self._clock.call_at(time_ns + FLUSH_NS, _FLUSH_PRIORITY, self.flush)
        return None

    def flush(self) -> None:
        """Write what there is."""
        with self._writing:
            with self._appending:
                records, self._records = self._records, []
            if self._is_broken:
                self._count(len(records))
                return
            try:
                self._writer.write(records)
            except OSError as error:
                self._stop(error)
                self._count(len(records))

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        if self._is_broken:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._stop(error)
        if self._lock is not None:
            self._lock.close()

    def _stop(self, error: OSError) -> None:
        self._is_broken = True
        _log.warning(
            "%s: recording stops, the file cannot be written (%s); mend that and start the server again",
            self._path,
            error.strerror,
        )
        if self._lock is not None:
            self._lock.close()

    def _count(self, events: int) -> None:
        report(Resource.DISK, f"events are not recorded in {self._path}", events)


def _own(path: Path) -> tuple[Path, BinaryIO]:
    """The first of the path and its numbered siblings that no other server writes, and the lock on it.

    The lock goes with the process, however it ends. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, _MOST_TRACES + 1):
        own = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        lock = own.with_name(own.name + ".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        except OSError as error:  # a file system without locks
            _log.warning("%s cannot be locked (%s): start no second server of this repository", own, error.strerror)
        if own != path:
            text = "another server writes %s: this one records in %s, name it to 'cotenant explain'"
            _log.warning(text, path, own)
        return own, lock
    raise OSError(errno.EBUSY, f"{_MOST_TRACES} other servers write traces there")


def _begun(path: Path, head: Header, limit_bytes: int | None) -> TraceWriter:
    """A writer of a new trace. The one before is put aside once the new one has been begun, if it has any records: runs
    that record nothing do not push out one that did. Raises OSError."""
    new = path.with_name(path.name + ".new")
    file = new.open("wb")
    try:
        writer = TraceWriter(file, head, limit_bytes=limit_bytes)
        if _has_records(path):
            os.replace(path, path.with_name(path.name + ".old"))
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        new.unlink(missing_ok=True)
        raise
    return writer


def _has_records(path: Path) -> bool:
    """Whether there is a trace with more than its header."""
    try:
        with path.open("rb") as file:
            file.readline()
            return bool(file.read(1))
    except FileNotFoundError:
        return False
