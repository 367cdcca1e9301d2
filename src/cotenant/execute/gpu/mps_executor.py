"""Worker processes that share a GPU through MPS, with a daemon of our own."""

from __future__ import annotations

from cotenant.execute.gpu.mps import MpsDaemon
from cotenant.execute.gpu.sm_ladder import device_name
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits


class MpsExecutor(ProcessExecutor):
    """Worker processes whose models run on a GPU, each on at most `percentage` of its SMs. Stops the daemon at the end.

    Not yet run on hardware.
    """

    def __init__(
        self, daemon: MpsDaemon, index: int, percentage: float, lane_nice: int, limits: WorkerLimits = WorkerLimits()
    ) -> None:
        super().__init__(lane_nice, limits, lambda _: daemon.environment(percentage), device_name(index))
        self._daemon = daemon

    def close(self) -> None:
        """See Executor. The workers end first: the daemon would end them otherwise."""
        super().close()
        self._daemon.stop()
