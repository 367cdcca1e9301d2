"""Where the threads of a worker's lanes compute: on cores, or on a GPU, of which their process has a share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from cotenant.execute.threads.lanes import be_nice, settle
from cotenant.work import CPU


class LanePlace(Protocol):
    """What a lane's thread does to compute somewhere. Used by that thread alone."""

    @property
    def threads(self) -> int | tuple[int, ...]:
        """What models are run with."""

    def settle(self) -> AbstractContextManager[Any]:
        """Make the calling thread one that runs launches, while the context lasts."""

    def finish(self) -> None:
        """Wait until what was run has been computed."""


class OnCores:
    """The cores of a partition. Implements `LanePlace`."""

    def __init__(self, cores: tuple[int, ...], nice: int) -> None:
        self.threads: int | tuple[int, ...] = cores if len(cores) > 1 else 1
        self._cores = cores
        self._nice = nice

    def settle(self) -> AbstractContextManager[Any]:
        """See LanePlace: bound to the first of the cores, and nice."""
        settle(self._cores, self._nice)
        return nullcontext()

    def finish(self) -> None:
        """See LanePlace: it has been."""


class OnGpu:
    """A stream of a GPU; MPS bounds the SMs of its whole process. Implements `LanePlace`. Not yet run on hardware."""

    threads: int | tuple[int, ...] = 1

    def __init__(self, device: str, nice: int) -> None:
        self._device = device
        self._nice = nice
        self._stream: Any = None

    def settle(self) -> AbstractContextManager[Any]:
        """See LanePlace: on a stream of its own, on any core."""
        import torch

        be_nice(self._nice)
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(torch.device(self._device))
        context: AbstractContextManager[Any] = cuda.stream(self._stream)
        return context

    def finish(self) -> None:
        """See LanePlace."""
        self._stream.synchronize()


def place_of(device: str, cores: tuple[int, ...], nice: int) -> LanePlace:
    """The place of a lane by the device of its partition."""
    return OnCores(cores, nice) if device == CPU else OnGpu(device, nice)
