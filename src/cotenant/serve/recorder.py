"""Writes the server's trace: an observer that reaches the file whenever nothing is left inside."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from cotenant.core.actions import Action, Respond
from cotenant.core.events import Event, QueryArrived
from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import Timing
from cotenant.predict.table import TablePredictor
from cotenant.trace import TraceWriter, header

_log = logging.getLogger("cotenant.recorder")


class Recorder:
    """Records every event with its actions. The trace of the run before is kept beside it with the ending `.old`.

    When the file cannot be written any more, recording stops with a warning, and serving goes on.
    """

    def __init__(self, path: Path, policy: Policy, cores: tuple[int, ...], limit_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.replace(path, path.with_name(path.name + ".old"))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = header(policy, TablePredictor({}), (), cores, created=created)
        self._writer = TraceWriter(path.open("wb"), head, limit_bytes=limit_bytes)
        self._inside = 0
        self._path = path
        self._is_broken = False

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer."""
        if self._is_broken:
            return None
        if isinstance(event, QueryArrived):
            self._inside += 1
        for action in actions:
            if isinstance(action, Respond):
                self._inside -= 1
        try:
            self._writer(time_ns, event, actions)
            if self._inside == 0:
                self._writer.flush()
        except OSError as error:
            self._is_broken = True
            _log.warning("%s: recording stops, the file cannot be written: %s", self._path, error.strerror)
        return None

    def close(self) -> None:
        """Write the rest."""
        if not self._is_broken:
            self._writer.close()
