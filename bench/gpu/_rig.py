"""The two devices that can be measured: a GPU, and the cores of this machine to try everything out on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from bench.gpu._context import Opened, Rig, Split, Way
from bench.gpu._journal import MeasureError
from cotenant.work import Share


class _Cores:
    """Cores as shares: there is nothing to split."""

    def __init__(self) -> None:
        self.granted: Mapping[Share, int] = {}

    def split(self, partitions: Sequence[Share]) -> int:
        """See GpuPartitioner."""
        began = time.perf_counter_ns()
        self.granted = {partition: partition.size for partition in partitions}
        return time.perf_counter_ns() - began


class CpuRig:
    """Cores as slots. A partition is a thread pinned to its cores; there are no graphs."""

    kind = "cpu"
    device = "cpu"
    granule = 1
    ways: tuple[Way, ...] = (Way.SHARES,)
    graphs: tuple[bool, ...] = (False,)

    def __init__(self) -> None:
        self.slots = tuple(sorted(os.sched_getaffinity(0)))

    @contextmanager
    def open(self, partitions: Sequence[Share], way: Way, graphs: int) -> Iterator[Opened]:
        """See Rig."""
        from cotenant.execute.gpu.streams import CpuStreams
        from cotenant.execute.torch.executor import TorchExecutor

        cores = _Cores()
        cores.split(partitions)
        executor = TorchExecutor(CpuStreams(), graphs=graphs)
        try:
            yield Opened(executor, cores)
        finally:
            executor.close()

    def problem(self) -> str:
        """See Rig."""
        return ""

    def survey(self, shares: Split) -> tuple[int, str] | None:
        """See Rig: what cores a thread runs on is known."""
        return None

    def close(self) -> None:
        """See Rig."""


class _Kept:
    """GpuPartitioner that outlive the executor which runs in them: closing it would close them."""

    def __init__(self, shares: Any) -> None:
        self._shares = shares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shares, name)

    def close(self) -> None:
        """Leave them open."""


class CudaRig:
    """SMs as slots. GpuPartitioner are green contexts where there are some; plain streams are there always.

    `green` and `plain` are opened `execute.sm_streams.GpuPartitioner`, the first one None for the reason `no_shares`.
    """

    kind = "cuda"
    graphs: tuple[bool, ...] = (True, False)

    def __init__(self, index: int, plain: Any, green: Any = None, no_shares: str = "") -> None:
        self.index = index
        self.device = f"cuda:{index}"
        self.no_shares = no_shares
        self._plain: Any = plain
        self._green: Any = green
        shares = green or plain
        self.slots = tuple(range(shares.total))
        self.granule: int = shares.granularity
        self.ways: tuple[Way, ...] = (Way.STREAMS,) if green is None else (Way.SHARES, Way.STREAMS)

    @classmethod
    def open_gpu(cls, index: int) -> CudaRig:
        """Raises MeasureError when torch has no such GPU."""
        import torch

        from cotenant.execute.gpu.sm_shares import GreenShares, PlainShares

        if not torch.cuda.is_available():
            raise MeasureError(f"there is no GPU that torch {torch.__version__} can use")
        if index >= torch.cuda.device_count():
            raise MeasureError(f"there is no GPU number {index}, torch sees {torch.cuda.device_count()}")
        torch.cuda.set_device(index)
        torch.empty(1, device=f"cuda:{index}")  # makes the primary context, which all shares belong to
        plain = PlainShares.open(index)
        try:
            return cls(index, plain, GreenShares.open(index))
        except Exception as error:  # whatever the driver or its bindings say: the other steps go on
            return cls(index, plain, None, " ".join(str(error).split()) or type(error).__name__)

    @contextmanager
    def open(self, partitions: Sequence[Share], way: Way, graphs: int) -> Iterator[Opened]:
        """See Rig. Where there are no green contexts, all partitions are plain streams."""
        import torch

        from cotenant.execute.gpu.cuda_streams import CudaStreams
        from cotenant.execute.torch.executor import TorchExecutor

        shares = self._green if way is Way.SHARES and self._green is not None else self._plain
        shares.split(partitions)
        kept: Any = _Kept(shares)
        executor = TorchExecutor(CudaStreams(self.index, kept), graphs=graphs)
        try:
            yield Opened(executor, shares)
        finally:
            executor.close()
            torch.cuda.empty_cache()  # what is cached for streams that are gone would never be used again

    def problem(self) -> str:
        """See Rig: a kernel that failed for good makes every later call fail."""
        import torch

        try:
            torch.cuda.synchronize(self.index)
        except RuntimeError as error:
            return " ".join(str(error).split())[:300]
        return ""

    def survey(self, shares: Split) -> tuple[int, str] | None:
        """See Rig. A kernel reads the number of its SM in each share."""
        if self._green is None or shares is not self._green:
            return None
        from bench.gpu._sm_probe import survey

        found = survey(cast(Any, shares))
        return len({sm for sms in found.seen.values() for sm in sms}), "; ".join(found.problems)

    def close(self) -> None:
        """Give the shares back."""
        for shares in (self._green, self._plain):
            if shares is not None:
                shares.close()


def open_rig(kind: str, index: int) -> Rig:
    """The device to measure, "cuda" or "cpu". Raises MeasureError when there is no such GPU."""
    return CpuRig() if kind == "cpu" else CudaRig.open_gpu(index)
