"""Devices that take work on streams: what `execute/torch/executor.py` asks of one, and the CPU behind the same calls.

A stream runs what is submitted to it in order, later than the call that submits it. An event marks a place in that
order; waiting for it is the only way in which a thread here learns that work has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch

from cotenant.execute.threads.lanes import pin, settle
from cotenant.work import Share

Named = Mapping[str, torch.Tensor]


class Event(Protocol):
    """A place in the order of a stream."""

    def wait(self) -> None:
        """Sleep until the stream has come here, without spinning. Raises what the device says of the work before."""

    def ns_since(self, earlier: Any) -> int:
        """Nanoseconds between an earlier event of the same lane and this one, both reached."""


class Captured(Protocol):
    """Work that was recorded once and can be submitted again as a whole, over the same tensors."""

    @property
    def outputs(self) -> Named:
        """The tensors that every replay writes."""

    def replay(self) -> None:
        """Submit it to the calling thread's stream."""


class StreamLane(Protocol):
    """The streams of one partition. One thread submits, one waits; `threads` is what `TorchModel.run` is told."""

    threads: int | tuple[int, ...]

    def settle(self) -> None:
        """Make the calling thread the one that submits."""

    def attend(self) -> None:
        """Make the calling thread the one that waits."""

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        """What the calling thread submits inside goes to this stream; the urgent one goes first on the device."""

    def record(self) -> Event:
        """An event at the end of the current stream."""

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in memory of the host that the device can read while the host goes on."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device that gets the values of one of the host; does not wait for the copy."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host that gets the values of one on the device; does not wait for the copy."""

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """A downloaded tensor, whose copy has ended, as an array that does not keep the device's kind of memory."""

    def capture(self, work: Callable[[], Named], owner: int) -> Captured:
        """Record work on the current stream without running it. `owner` says whose memory it may share.

        Raises whatever stands against it; the stream can be used afterwards.
        """


class StreamDevice(Protocol):
    """A device with streams. `name` is where torch has to put a model's weights: "cpu" or "cuda:N"."""

    name: str
    has_graphs: bool

    def lane(self, partition: Share) -> StreamLane:
        """The streams of a partition."""

    def synchronize(self) -> None:
        """Wait for what the calling thread has submitted outside of lanes: weights on their way."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether this, or what caused it, says that the device has no memory left."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether the device takes no more work after this error."""

    def close(self) -> None:
        """Let go of streams; nothing runs on them any more."""


def causes(error: BaseException) -> list[BaseException]:
    """An error, what caused it, and so on."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


# --- the CPU ------------------------------------------------------------------------------------------------------


class CpuStreams:
    """Cores of this machine as a device with streams: work runs when it is submitted, on a thread pinned to them.

    `nice` is the nice value of these threads and of those that torch starts for them.
    """

    name = "cpu"
    has_graphs = False

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice

    def lane(self, partition: Share) -> StreamLane:
        """See StreamDevice."""
        return _CpuLane(partition, self._nice)

    def synchronize(self) -> None:
        """See StreamDevice."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See StreamDevice. torch has no class of its own for the host's memory, so its words are looked at."""
        return any(isinstance(each, MemoryError) or "can't allocate memory" in str(each) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """See StreamDevice: a CPU is not lost."""
        return False

    def close(self) -> None:
        """See StreamDevice."""


class _CpuLane:
    def __init__(self, partition: Share, nice: int) -> None:
        self._cores = partition.cores
        self._nice = nice
        self.threads: int | tuple[int, ...] = partition.cores if partition.size > 1 else 1

    def settle(self) -> None:
        settle(self._cores, self._nice)

    def attend(self) -> None:
        pin(self._cores)  # but not nice: an end that is told late keeps the lane empty

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event:
        return _Passed(time.perf_counter_ns())

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = tensor.numpy()
        return array

    def capture(self, work: Callable[[], Named], owner: int) -> Captured:
        raise NotImplementedError("a CPU has no graphs")


class _Passed:
    """An event of a CPU: what was submitted before it has run."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def wait(self) -> None:
        return

    def ns_since(self, earlier: Any) -> int:
        passed: int = self.at_ns - earlier.at_ns
        return passed
