"""Workers on threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from cotenant.execute.worker import supervisor, worker
from cotenant.execute.worker.channel import Channel

WAIT_S = 20.0


class HereWorker:
    """A worker on a thread of this process, so that its model can be looked at. Stands in for `WorkerProcess`."""

    pid = 1
    made: ClassVar[list[HereWorker]] = []

    def __init__(self, *_: object) -> None:
        self.made.append(self)
        self.channel, self._theirs = Channel.pair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.worker = worker.Worker(self._theirs)
        self.worker.serve()
        self._theirs.close()

    def cpu_s(self) -> float:
        return 0.0

    def resident_bytes(self) -> int:
        return 0

    def kill(self) -> None:
        self.channel.shut()

    def wait(self) -> str:
        self._thread.join(WAIT_S)
        return "was killed by the test"

    def close(self) -> None:
        assert self.worker.paused == 0
        self.channel.close()


@contextmanager
def here_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `ProcessExecutor` that is made inside has its workers here."""
    monkeypatch.setattr(supervisor, "WorkerProcess", HereWorker)
    yield
    HereWorker.made.clear()
