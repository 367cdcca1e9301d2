"""Worker processes: their start and their states."""

from __future__ import annotations

from enum import StrEnum

from typing_extensions import override

from cotenant.execute.worker.channel import Channel
from cotenant.execute.worker.child import ChildProcess


class WorkerState(StrEnum):
    """Whether launches can be sent to a worker."""

    DOWN = "down"
    UP = "up"
    FAILING = "failing"
    """Lost; the core is being notified, and may still start launches, which fail with the others."""


class WorkerProcess(ChildProcess):
    """A started worker, and the server's end of its channel."""

    def __init__(self, tenant: str, nice: int) -> None:
        self.channel, theirs = Channel.pair()
        try:
            super().__init__("cotenant.execute.worker.main", tenant, theirs.fileno(), nice)
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()

    @override
    def close(self) -> None:
        super().close()
        self.channel.close()
