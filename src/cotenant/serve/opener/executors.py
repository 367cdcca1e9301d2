"""The executor that a configuration asks for.

The kind of the device decides. On the CPU, `isolation` chooses threads of the server or a worker process for each
tenant, and both run `.onnx` and `.pt2` alike. On a GPU, models are `.pt2` and run in the server on streams, or under
MPS in a worker process for each tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError
from cotenant.execute.gpu.configured import open_streams
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.execute.worker.executor import ProcessExecutor
from cotenant.measure.place import Place, StreamPlace, open_place
from cotenant.work import Share

if TYPE_CHECKING:
    from cotenant.execute.torch.executor import TorchExecutor

LANE_NICE = 5
"""Nice value of the threads that run models: front-ends share the cores with them, and go first. Chosen by hand."""


def make_executor(
    section: DeviceSection, partitions: Sequence[Share] = ()
) -> ThreadExecutor | ProcessExecutor | TorchExecutor:
    """Threads of this process, a worker process for each tenant, or streams of a GPU that is divided into `partitions`.

    Without partitions a GPU is divided as the section says. Raises ConfigError when there is no such GPU.
    """
    if section.kind == "cuda":
        if section.sharing == "mps":
            return _under_mps(section)
        streams = open_streams(section, partitions)
        from cotenant.execute.torch.executor import TorchExecutor

        return TorchExecutor(streams)
    if section.isolation == "thread":
        return ThreadExecutor(LANE_NICE)
    return ProcessExecutor(LANE_NICE)


def _under_mps(section: DeviceSection) -> ProcessExecutor:
    from cotenant.execute.gpu.mps import MpsDaemon
    from cotenant.execute.gpu.mps_executor import MpsExecutor

    try:
        daemon = MpsDaemon.start()
    except GpuError as error:
        raise ConfigError(f"[device]: sharing is 'mps', but {error}") from None
    percentage = section.shares[0] if section.shares else 100.0  # shares are equal: see `lanes_of`
    return MpsExecutor(daemon, section.index, percentage, LANE_NICE)


def measuring_place(
    executor: ThreadExecutor | ProcessExecutor | TorchExecutor,
    section: DeviceSection,
    partitions: Sequence[Share],
) -> Place:
    """Where the server itself measures a model that has no profile.

    Under MPS that is the whole GPU, which only a worker sees less of: beliefs have to follow what is observed.
    """
    if isinstance(executor, ThreadExecutor | ProcessExecutor):
        return open_place(msgspec.structs.replace(section, sharing="streams"), partitions)
    return StreamPlace(executor.device)
