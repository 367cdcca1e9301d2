"""Worker processes that share a GPU through MPS, with a daemon of our own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import msgspec

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError
from cotenant.execute.gpu.configured import open_streams
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.gpu.mps import MpsDaemon
from cotenant.execute.gpu.sm_ladder import device_name
from cotenant.execute.place import Place, StreamPlace
from cotenant.execute.protocol import ModelExecutor
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.execute.worker.limits import WorkerLimits
from cotenant.work import Share


class MpsExecutor(ProcessExecutor):
    """Worker processes whose models run on a GPU, each on an equal share of its SMs. Stops the daemon at the end.

    Not yet run on hardware.
    """

    lanes_change = False

    def __init__(
        self,
        daemon: MpsDaemon,
        section: DeviceSection,
        partitions: Sequence[Share] = (),
        lane_nice: int = 0,
        limits: WorkerLimits = WorkerLimits(),
    ) -> None:
        percentage = section.shares[0] if section.shares else 100.0  # shares are equal: see `sm_lanes`
        super().__init__(lane_nice, limits, lambda _: daemon.environment(percentage), device_name(section.index))
        self._at_end = ExitStack()
        self._at_end.callback(daemon.stop)
        self._section = msgspec.structs.replace(section, sharing="streams")
        self._partitions = partitions

    @cached_property
    def place(self) -> Place:
        """See ModelExecutor: the whole GPU, of which only a worker sees less: beliefs follow what is observed."""
        streams = open_streams(self._section, self._partitions)
        self._at_end.callback(streams.close)
        return StreamPlace(streams)

    def close(self) -> None:
        """See Executor. The workers end first: the daemon would end them otherwise."""
        super().close()
        self._at_end.close()


def open_mps(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    """Start the daemon. Raises ConfigError when it cannot be started."""
    try:
        daemon = MpsDaemon.start()
    except GpuError as error:
        raise ConfigError(f"[device]: sharing is 'mps', but {error}") from None
    return MpsExecutor(daemon, section, partitions, lane_nice)
