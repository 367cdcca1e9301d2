"""Where models are opened, measured and run: on cores of this machine, or on the streams of a GPU's shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from cotenant.execute.threads.lanes import pin
from cotenant.execute.threads.names import Threads
from cotenant.work import CPU, Share

if TYPE_CHECKING:
    from cotenant.execute.gpu.streams import StreamDevice

Cores = tuple[int, ...]


class Place(Protocol):
    """A device to measure on. `device` is where models have to be opened."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""

    @property
    def unit(self) -> str:
        """What a partition has some of, for messages."""

    def at(self, cores: Cores) -> AbstractContextManager[None]:
        """What the calling thread runs inside runs in this partition."""

    def threads(self, cores: Cores) -> Threads:
        """What a runner is told of the partition."""


class CorePlace:
    """Cores of this machine: the calling thread sits on the first, a runner's pool on the others."""

    device = CPU
    unit = "core"

    @contextmanager
    def at(self, cores: Cores) -> Iterator[None]:
        """See Place."""
        before = os.sched_getaffinity(0)
        pin(cores[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def threads(self, cores: Cores) -> Threads:
        """See Place."""
        return cores if len(cores) > 1 else 1


class StreamPlace:
    """Streams of a device that takes work so. Whoever measures has to wait for results: bringing them home does."""

    unit = "SM"

    def __init__(self, streams: StreamDevice) -> None:
        self._streams = streams
        self.device = streams.name

    @contextmanager
    def at(self, cores: Cores) -> Iterator[None]:
        """See Place."""
        lane = self._streams.lane(Share(cores, self.device))
        before = os.sched_getaffinity(0)
        lane.settle()  # which may pin the thread
        try:
            with lane.stream(False):
                yield
        finally:
            os.sched_setaffinity(0, before)

    def threads(self, cores: Cores) -> Threads:
        """See Place: kernels need none."""
        return 1
