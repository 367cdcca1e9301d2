"""Trace recorder of a server: an observer queues events in memory, and a thread writes them to the file
(docs/decisions/0072-the-recorder-may-stall.md)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from cotenant import linux
from cotenant.core.actions import Action
from cotenant.core.events import Event, LaunchEnded, PolicyChanged, TenantAdded, TenantChanged, TenantRemoved
from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import Timing
from cotenant.execute.threads.lanes import be_nice
from cotenant.measure.busy import CoreTime
from cotenant.predict.table import TablePredictor
from cotenant.shortages import Resource, report, start_thread
from cotenant.trace import EventsMissing, Header, OthersTook, TraceWriter, header
from cotenant.work import Machine

FLUSH_S = 0.1
"""Seconds that the thread gathers events before it writes them together."""
CLOSE_S = 1.0
"""Seconds that `close` waits for the remaining writes: less than `cli.signals.LATE_S`."""
MOST_EVENTS = 1 << 16
"""Maximum number of queued events: some seconds of a busy server."""
MOST_BYTES = 64 << 20
"""Maximum estimated memory of queued events, from the three sizes below."""
OTHERS_S = 2.0
"""Seconds between two records of the time that other processes took, while there are events."""
NICE = 10
"""Nice value of the thread, equal to that of the threads that decompress requests."""
_EVENT_BYTES, _ACTION_BYTES, _TASK_BYTES = 400, 300, 200
_ENCODED_AT_ONCE = 64
"""Events encoded between two releases of the interpreter lock: some tenths of a millisecond."""
_ALWAYS_RECORDED = (TenantAdded, TenantChanged, TenantRemoved, PolicyChanged)
"""Events recorded even while others are dropped: readers need them to interpret the events after a gap."""
_RESERVED_EVENTS = 1024
"""Queue slots reserved for these events."""
_MOST_TRACES = 64
"""Maximum number of servers that record in one repository at a time; further servers do not record."""

_Entry = tuple[int, Event | EventsMissing, list[Action], int]
"""Time in ns, event, its actions, and their estimated size in bytes."""
_log = logging.getLogger("cotenant.recorder")


class Recorder:
    """Recorder of every event with its actions. The previous trace is kept with the suffix `.old`.

    A low-priority thread encodes and writes about FLUSH_S after the event. While it stalls, events queue in memory up
    to `most_events` and `most_bytes` (an estimate). A full queue drops events until it is half empty; an
    `EventsMissing` record gives their number. If the file cannot be written, the log has a warning, recording stops
    and serving continues. Each event that is not recorded is counted (`shortages`). If another server writes the
    trace, this recorder writes a numbered file, such as `trace-2.jsonl`, and logs its name.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy,
        machine: Machine,
        *,
        launch_ns: int = 0,
        limit_bytes: int | None = None,
        most_events: int = MOST_EVENTS,
        most_bytes: int = MOST_BYTES,
        core_time: Callable[[], CoreTime] | None = None,
    ) -> None:
        self._core_time, self._core_last, self._core_s = core_time, CoreTime(0.0, 0.0), 0.0
        """Where the time of cores is read, the last reading, and its time of the monotonic clock in s."""
        self._path = path
        self._most_events, self._most_bytes = most_events, most_bytes
        self._waiting: deque[_Entry] = deque()
        self._put_bytes = self._taken_bytes = 0
        """Total bytes queued so far, and total bytes that the thread has dequeued."""
        self._is_dropping = False
        self._missing = self._missing_ns = 0
        """Number of events in the current gap that has no record yet, and the time of its first event."""
        self._unwritten = 0
        """Events dequeued and not yet written."""
        self._is_broken = False
        self._dropping = threading.Lock()
        self._has_some, self._closing = threading.Event(), threading.Event()
        self._lock: BinaryIO | None = None
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = header(policy, TablePredictor({}), (), machine, created=created, launch_ns=launch_ns)
        self._thread = threading.Thread(target=self._run, name="cotenant-recorder", daemon=True)
        try:
            self._path, self._lock = _own(path)
            self._writer = _begun(self._path, head, limit_bytes)
        except OSError as error:
            self._stop(error)
            return
        try:
            start_thread(self._thread, f"nothing is recorded in {self._path}")
        except RuntimeError as error:
            self._stop(error)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> None:
        """Queue an event for the thread, as an observer of the driver. Never blocks on the file."""
        size = _EVENT_BYTES + _ACTION_BYTES * len(actions)
        if type(event) is LaunchEnded and event.task_times:
            size += _TASK_BYTES * len(event.task_times)
        waiting, bytes_ = self._waiting, self._put_bytes + size
        is_full = len(waiting) >= self._most_events or bytes_ > self._taken_bytes + self._most_bytes
        if (is_full or self._is_dropping) and not self._is_kept(event, time_ns):
            self._count(1)
            return
        waiting.append((time_ns, event, actions, size))
        self._put_bytes = bytes_
        if not self._has_some.is_set():
            self._has_some.set()

    def close(self) -> None:
        """Write the remaining events, within CLOSE_S. Safe to repeat."""
        self._closing.set()
        self._has_some.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if left := self._drop():
            self._count(left)
            text = "%s: the last %d events are not recorded: the file could not be written within %g s"
            _log.warning(text, self._path, left, CLOSE_S)

    def _is_kept(self, event: Event, time_ns: int) -> bool:
        """Whether a full or dropping queue takes the event. If so, the record of the gap precedes it."""
        if self._is_broken:
            return False
        waiting = len(self._waiting)
        half = waiting <= self._most_events // 2 and self._put_bytes - self._taken_bytes <= self._most_bytes // 2
        self._is_dropping = waiting > 0 and not (self._is_dropping and half)
        if self._is_dropping and not (
            type(event) in _ALWAYS_RECORDED and waiting < self._most_events + _RESERVED_EVENTS
        ):
            self._missing_ns = self._missing_ns if self._missing else time_ns
            self._missing += 1
            return False
        if self._missing:
            self._waiting.append(self._gap())
        return True

    def _gap(self) -> _Entry:
        missing, self._missing = self._missing, 0
        return self._missing_ns, EventsMissing(missing), [], 0

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        be_nice(NICE)
        try:
            is_last = False
            while not is_last:
                self._has_some.wait()
                self._has_some.clear()
                is_last = self._closing.wait(FLUSH_S)
                while entries := self._take():
                    self._writer.write([each[:3] for each in entries])  # releases the interpreter lock
                    self._write_others(entries[-1][0])
            if self._missing:
                self._writer.write([self._gap()[:3]])
            self._writer.close()
        except Exception as error:  # of the file, or of an event that cannot be encoded
            self._count(self._drop())
            self._stop(error)
        if self._lock is not None:
            self._lock.close()

    def _write_others(self, time_ns: int) -> None:
        """Write what other processes took since the last reading, after OTHERS_S. Time without events is left out."""
        now_s = time.monotonic()
        passed_s = now_s - self._core_s
        if self._core_time is None or passed_s < OTHERS_S:
            return
        last, self._core_last, self._core_s = self._core_last, self._core_time(), now_s
        took = OthersTook(*(round(1e9 * (now - was)) for now, was in zip(self._core_last, last, strict=True)))
        if passed_s < 2 * OTHERS_S and took.cores_ns:
            self._writer.write([(time_ns, took, [])])

    def _take(self) -> list[_Entry]:
        """Dequeue at most _ENCODED_AT_ONCE events."""
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(min(len(waiting), _ENCODED_AT_ONCE))]
        self._taken_bytes += sum([size for *_, size in taken])
        self._unwritten = _events_in(taken)
        return taken

    def _drop(self) -> int:
        """Stop queueing. Returns the number of events that are neither written nor counted."""
        with self._dropping:
            left = 0 if self._is_broken else self._unwritten + _events_in(tuple(self._waiting))
            self._is_broken = self._is_dropping = True
            self._waiting = deque()
            return left

    def _stop(self, error: Exception) -> None:
        self._is_broken = self._is_dropping = True
        reason = error.strerror if isinstance(error, OSError) else error
        text = "%s: recording stops: the file cannot be written (%s); correct that and restart the server"
        _log.warning(text, self._path, reason)
        if self._lock is not None:
            self._lock.close()

    def _count(self, events: int) -> None:
        if events:
            report(Resource.DISK, f"events are not recorded in {self._path}", events)


def _events_in(entries: Iterable[_Entry]) -> int:
    """Number of entries without the records of gaps."""
    return sum([type(event) is not EventsMissing for _, event, *_ in entries])


def _own(path: Path) -> tuple[Path, BinaryIO]:
    """Lock the first of the path and its numbered siblings that no other server writes. The kernel releases the lock
    when the process ends. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, _MOST_TRACES + 1):
        own = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        lock = own.with_name(own.name + ".lock").open("ab")
        try:
            linux.lock(lock.fileno(), waits=False)
        except BlockingIOError:
            lock.close()
            continue
        except OSError as error:  # a file system without locks
            _log.warning("%s cannot be locked (%s): do not start a second server here", own, error.strerror)
        if own != path:
            text = "another server writes %s: this one records in %s; pass that path to 'cotenant explain'"
            _log.warning(text, path, own)
        return own, lock
    raise OSError(errno.EBUSY, f"{_MOST_TRACES} other servers already write traces there")


def _begun(path: Path, head: Header, limit_bytes: int | None) -> TraceWriter:
    """Open a writer of a new trace. Raises OSError. A previous trace is renamed to `.old` only if it has records: an
    empty run never replaces a useful `.old`."""
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
    """Whether the file exists and has more than a header."""
    try:
        with path.open("rb") as file:
            file.readline()
            return bool(file.read(1))
    except FileNotFoundError:
        return False
