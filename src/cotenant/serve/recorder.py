"""Writes the server's trace: an observer that keeps what happened, and a thread that writes it a little later."""

from __future__ import annotations

import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

from cotenant.core.actions import Action
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import Timing
from cotenant.predict.table import TablePredictor
from cotenant.serve.brain.clock import Clock
from cotenant.trace import TraceWriter, header
from cotenant.work import Machine

FLUSH_NS = 100_000_000
"""How long a record may stay in memory: writing in blocks keeps files and encoding out of the way of queries."""
_FLUSH_PRIORITY = 9

_log = logging.getLogger("cotenant.recorder")


class Recorder:
    """Records every event with its actions. The trace of the run before is kept beside it with the ending `.old`.

    Encoding and writing happen on the clock's thread, within FLUSH_NS of the event. When the file cannot be written any
    more, recording stops with a warning, and serving goes on.
    """

    def __init__(
        self, path: Path, policy: Policy, machine: Machine, clock: Clock, *, limit_bytes: int | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.replace(path, path.with_name(path.name + ".old"))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = header(policy, TablePredictor({}), (), machine, created=created)
        self._writer = TraceWriter(path.open("wb"), head, limit_bytes=limit_bytes)
        self._clock = clock
        self._path = path
        self._appending = threading.Lock()
        self._writing = threading.Lock()
        self._records: list[tuple[int, Event, list[Action]]] = []
        self._is_broken = False

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer."""
        if self._is_broken:
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
                return
            try:
                self._writer.write(records)
            except OSError as error:
                self._is_broken = True
                _log.warning("%s: recording stops, the file cannot be written: %s", self._path, error.strerror)

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        if not self._is_broken:
            self._writer.close()
