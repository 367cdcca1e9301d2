"""The two devices that can be measured, a GPU and the cores of this machine to try everything out on.

All that opens an executor is here, and in `Context.runner`, which hands it the models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.gpu._journal import MeasureError
from cotenant.work import Share


class Way(StrEnum):
    """How launches share the device."""

    SHARES = "shares"
    """Each partition has SMs of its own by green contexts (on a CPU: cores)."""
    STREAMS = "streams"
    """Partitions are streams of the whole device."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An executor, and what divides the device that it runs on: a `GpuPartitioner`, or cores."""

    executor: Any
    shares: Any


class _Cores:
    """Cores as shares: there is nothing to split."""

    def __init__(self) -> None:
        self.granted: dict[Share, int] = {}

    def split(self, partitions: Sequence[Share]) -> None:
        """See GpuPartitioner."""
        self.granted = {partition: partition.size for partition in partitions}


class CpuRig:
    """Cores as slots. A partition is a thread pinned to its cores, a stream one on all of them; there are no graphs."""

    kind = device = "cpu"
    granule = 1
    ways: tuple[Way, ...] = (Way.SHARES, Way.STREAMS)
    no_shares = ""

    def __init__(self) -> None:
        self.slots = self.parted = tuple(sorted(os.sched_getaffinity(0)))

    @contextmanager
    def open(self, way: Way) -> Iterator[Opened]:
        """See CudaRig."""
        from cotenant.execute.gpu.streams import CpuStreams
        from cotenant.execute.torch.executor import TorchExecutor

        streams, everywhere = CpuStreams(), Share(self.slots, self.device)
        if way is Way.STREAMS:
            lane = streams.lane
            streams.lane = lambda share: lane(everywhere)  # type: ignore[method-assign]
        executor = TorchExecutor(streams)
        try:
            yield Opened(executor, _Cores())
        finally:
            executor.close()

    def problem(self) -> str:
        """See CudaRig."""
        return ""


class CudaRig:
    """SMs as slots. Shares are green contexts, for the reason `no_shares` plain streams.

    Raises MeasureError when torch has no such GPU.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        import torch

        from cotenant.execute.gpu.sm_groups import ask_grid
        from cotenant.execute.gpu.sm_ladder import SmGrid

        if not torch.cuda.is_available():
            raise MeasureError(f"there is no GPU that torch {torch.__version__} can use")
        if index >= torch.cuda.device_count():
            raise MeasureError(f"there is no GPU number {index}, torch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(index)
        torch.empty(1, device=f"cuda:{index}")  # makes the primary context, which all shares belong to
        self.index, self.device, self.no_shares = index, f"cuda:{index}", ""
        self.ways: tuple[Way, ...] = (Way.SHARES, Way.STREAMS)
        self._told = False
        try:
            grid = ask_grid(index, "green")
        except Exception as error:  # whatever the driver or its bindings say: the other steps go on
            self.no_shares = " ".join(str(error).split()) or type(error).__name__
            self.ways = (Way.STREAMS,)
            grid = SmGrid(torch.cuda.get_device_properties(index).multi_processor_count)
        self.slots = tuple(range(grid.total))
        self.granule = grid.granularity
        """Partitions are multiples of so many slots."""
        self.parted = self.slots[: grid.groups * grid.granularity]
        """Slots that shares are made of; the SMs of no group are in the whole device alone."""

    @contextmanager
    def open(self, way: Way) -> Iterator[Opened]:
        """An executor for the given shares and for those into which they are split; they may be split on below it."""
        from cotenant.execute.gpu.cuda_streams import CudaStreams
        from cotenant.execute.gpu.sm_shares import open_shares
        from cotenant.execute.torch.executor import TorchExecutor

        shares = open_shares(self.index, "green" if way is Way.SHARES and way in self.ways else "streams")
        streams = CudaStreams(self.index, shares)
        streams.timed_every = 1  # the tables have what the device says of the units of every launch
        executor = TorchExecutor(streams)
        try:
            yield Opened(executor, shares)
        finally:
            executor.close()  # closes the shares as well
            self._trim()

    def _trim(self) -> None:
        """Return the cached memory of streams that are gone: it would never be used again."""
        import torch

        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # in torch 2.11 after a capture that CUDA invalidated, and for good
            if not self._told:
                text = f"bench/gpu: memory is not given back any more, start again: {error}"
                print(text.splitlines()[0], file=sys.stderr, flush=True)
            self._told = True

    def problem(self) -> str:
        """Why nothing can be measured any more, "" while it can: a kernel that failed makes every later call fail."""
        import torch

        try:
            torch.cuda.synchronize(self.index)
        except RuntimeError as error:
            return " ".join(str(error).split())[:300]
        return ""


def open_rig(kind: str, index: int) -> CpuRig | CudaRig:
    """The device to measure, "cuda" or "cpu". Raises MeasureError when there is no such GPU."""
    return CpuRig() if kind == "cpu" else CudaRig(index)
