"""A GPU as a configuration wants it: streams inside its shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cotenant.config import DeviceSection
from cotenant.errors import ConfigError, CotenantError
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.layout import lanes_of
from cotenant.work import Share

if TYPE_CHECKING:
    from cotenant.execute.gpu.cuda_streams import CudaStreams


def open_streams(section: DeviceSection, partitions: Sequence[Share] = ()) -> CudaStreams:
    """Streams of the GPU, divided into partitions, else as the section says. Raises ConfigError when there is none."""
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
        shares.split(partitions or lanes_of(section, (), grid=shares.grid))
    except CotenantError as error:
        shares.close()
        raise ConfigError(f"[device]: cuda:{section.index} cannot be divided: {error}") from None
    return CudaStreams(section.index, shares)
