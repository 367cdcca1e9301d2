"""A GPU by configuration: its shares, their streams, and the executor on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError, CotenantError, InvalidValueError
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.gpu.hardware_queues import MOST, VARIABLE, queue_count
from cotenant.execute.gpu.sm_ladder import SmGrid, shares_of, whole
from cotenant.execute.layout import device_cores
from cotenant.execute.protocol import ModelExecutor
from cotenant.work import Machine, Share

if TYPE_CHECKING:
    from cotenant.execute.gpu.cuda_streams import CudaStreams


class SmLayout:
    """A GPU divided into shares of its SMs; asks its driver for their number. Implements `Layout`."""

    def lanes(self, section: DeviceSection, cores: tuple[int, ...], where: str) -> tuple[Share, ...]:
        """The shares of the configuration."""
        return sm_lanes(section, where)

    def machine(self, lanes: Sequence[Share], cores: tuple[int, ...]) -> Machine:
        """The SMs of the lanes, which do not change while it serves."""
        return Machine.holding(lanes)


SMS = SmLayout()
SWITCH_S = 5e-5
"""Switch interval of the interpreter in seconds: while a submitting thread waits for the interpreter, a GPU idles."""


def sm_lanes(section: DeviceSection, where: str = "[device]", grid: SmGrid | None = None) -> tuple[Share, ...]:
    """The shares of a GPU. `grid`: how its SMs can be divided, by default asked from its driver. Raises ConfigError."""
    if section.lanes not in ("single", "all"):
        raise ConfigError(f"{where}: lanes is {section.lanes!r}: lists of cores divide a CPU, shares = [50, 50] a GPU")
    if section.lanes == "all" and section.shares:
        raise ConfigError(f"{where}: lanes is 'all' and shares is {list(section.shares)}, expected one of them")
    if grid is None:
        grid = _ask_driver(section, where)
    try:
        if section.shares:
            return shares_of(section.shares, grid, section.index, where)
    except InvalidValueError as error:
        raise ConfigError(str(error)) from None
    return (whole(grid, section.index),)


def open_streams(section: DeviceSection, partitions: Sequence[Share] = ()) -> CudaStreams:
    """Streams of the GPU, divided into `partitions`, by default those of the section. Raises ConfigError."""
    try:
        from cotenant.execute.gpu.cuda_streams import CudaStreams
        from cotenant.execute.gpu.sm_shares import open_shares
    except ImportError as error:
        raise ConfigError(
            f"[device]: kind is 'cuda', which needs torch ({error}): pip install 'cotenant[torch]'"
        ) from None
    try:
        shares = open_shares(section.index, section.sharing)
    except GpuError as error:
        raise ConfigError(f"[device]: kind is 'cuda', but {error}") from None
    try:
        partitions = tuple(dict.fromkeys(partitions or sm_lanes(section, grid=shares.grid)))
        streams = len(partitions) * (1 if section.sharing == "green" else 2)  # plain: another for urgent launches
        if streams > queue_count(os.environ):
            raise GpuError(
                f"the {len(partitions)} shares that launches may get need {streams} streams, more than the "
                f"{queue_count(os.environ)} queues of CUDA ({VARIABLE}, {MOST} at most): configure fewer "
                "shares, or a policy that joins none"
            )
        shares.split(partitions)
    except CotenantError as error:
        shares.close()
        raise ConfigError(f"[device]: cuda:{section.index} cannot be divided: {error}") from None
    return CudaStreams(section.index, shares)


def open_executor(section: DeviceSection, partitions: Sequence[Share], lane_nice: int) -> ModelExecutor:
    """An executor on streams of the GPU; ignores `lane_nice`, since its threads only submit. Raises ConfigError."""
    streams = open_streams(section, partitions)
    sys.setswitchinterval(SWITCH_S)
    from cotenant.execute.torch.executor import TorchExecutor

    cores = device_cores(section)
    return TorchExecutor(streams, cores[1:] or cores)  # the first core is for the submitting threads


def _ask_driver(section: DeviceSection, where: str) -> SmGrid:
    from cotenant.execute.gpu.sm_groups import ask_grid

    try:
        return ask_grid(section.index, section.sharing)
    except CotenantError as error:
        raise ConfigError(f"{where}: kind is 'cuda', but {error}") from None
