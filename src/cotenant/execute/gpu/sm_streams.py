"""The protocol of a GPU's shares, and the simplest implementation: streams of the whole device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

from cotenant.errors import InvalidValueError
from cotenant.execute.gpu.cuda_driver import GpuError
from cotenant.execute.gpu.sm_ladder import SmGrid, device_name, groups_of
from cotenant.work import Share

if TYPE_CHECKING:
    import torch


class GpuPartitioner(Protocol):
    """Division of a GPU. Partitions may overlap: the core never runs overlapping ones at the same time."""

    grid: SmGrid
    index: int

    @property
    def granted(self) -> Mapping[Share, int]:
        """SMs on which the kernels of each partition may run."""

    def split(self, partitions: Sequence[Share]) -> int:
        """Make streams for new partitions; returns the duration in ns."""

    def stream(self, partition: Share, urgent: bool = False) -> torch.cuda.Stream:
        """The stream of a partition, the same each time. An `urgent` one has priority if others compete with it."""

    def close(self) -> None:
        """Wait for launches under way, and free everything."""


class PlainShares:
    """Shares by plain streams: kernels of each partition may run on every SM."""

    def __init__(self, index: int, grid: SmGrid, make: Callable[[int, bool], Any]) -> None:
        self.index = index
        self.grid = grid
        self._make = make
        self._lock = threading.Lock()
        self._streams: dict[Share, dict[bool, Any]] = {}

    @classmethod
    def open(cls, index: int) -> Self:
        """Raises GpuError when torch sees no such GPU."""
        import torch

        count = torch.cuda.device_count()
        if index >= count:
            raise GpuError(f"there is no cuda:{index}; torch {torch.__version__} sees {count} GPUs")
        return cls(index, SmGrid(torch.cuda.get_device_properties(index).multi_processor_count), plain_stream)

    @property
    def granted(self) -> Mapping[Share, int]:
        """All SMs for every partition."""
        with self._lock:
            return MappingProxyType(dict.fromkeys(self._streams, self.grid.total))

    def split(self, partitions: Sequence[Share]) -> int:
        """Add these partitions; streams are made at the first use. Returns ns taken. Raises InvalidValueError."""
        for partition in partitions:
            check_device(partition, self.index)
            groups_of(partition, self.grid)
        began = time.perf_counter_ns()
        with self._lock:
            for each in partitions:
                self._streams.setdefault(each, {})
        return time.perf_counter_ns() - began

    def stream(self, partition: Share, urgent: bool = False) -> torch.cuda.Stream:
        """A stream of a partition, of the greatest priority when `urgent`; the same one each time."""
        with self._lock:
            streams = self._streams.get(partition)
            if streams is None:
                raise unknown(partition, len(self._streams))
            if urgent not in streams:
                streams[urgent] = self._make(self.index, urgent)
            stream: torch.cuda.Stream = streams[urgent]
            return stream

    def close(self) -> None:
        """Forget the streams, which torch owns."""
        with self._lock:
            self._streams = {}


def check_device(partition: Share, index: int) -> None:
    """Raises InvalidValueError when a partition is of another device."""
    if partition.device != device_name(index):
        raise InvalidValueError("shares of a GPU", "device", partition.device, device_name(index))


def unknown(partition: Share, count: int) -> InvalidValueError:
    """The error for a partition that was not passed to `split`."""
    return InvalidValueError("shares of a GPU", "partition", partition, f"one of the {count} that it was split into")


def plain_stream(index: int, urgent: bool) -> Any:
    """A stream of a whole GPU, of the greatest priority when `urgent`."""
    import torch

    streams: Any = torch.cuda.Stream
    least, greatest = streams.priority_range()
    return streams(torch.device("cuda", index), priority=greatest if urgent else least)
