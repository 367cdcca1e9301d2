"""Protocols of devices that run work on streams, for `execute/torch/executor.py`; and the CPU as such a device.

A stream runs submitted work in order, after the call that submits it. An event marks a position in that order. A thread
learns that work has ended only by polling an event.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt
import torch

from cotenant.execute.runner import joined
from cotenant.execute.threads.lanes import settle
from cotenant.execute.torch.arrays import array_of, tensor_of
from cotenant.work import Share

_LOOK_S = 1e-4
Named = Mapping[str, torch.Tensor]
Replay = Callable[[], None]
"""Submits captured work to the calling thread's stream, over the same tensors; keeps no tensor alive."""


class Event(Protocol):
    """A position in the order of a stream."""

    def is_reached(self) -> bool:
        """Whether the stream has reached it; never blocks. Raises errors of the work before it."""

    def ns_since(self, earlier: Any) -> int:
        """Time in ns since an earlier event of the same stream; both are reached and timed."""


def wait_for(event: Event, look_s: float = _LOOK_S) -> None:
    """Wait until a stream has reached an event. Raises errors of the work before it."""
    while not event.is_reached():
        time.sleep(look_s)


class StreamLane(Protocol):
    """The streams of one share. One thread submits. `threads` is the argument of `TorchModel.run`."""

    threads: int | tuple[int, ...]

    def settle(self) -> None:
        """Make the calling thread the submitting thread."""

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        """Inside, the calling thread submits to this stream; the device prefers the urgent one."""

    def crossing(self, up: bool) -> AbstractContextManager[Any]:
        """Inside, the calling thread submits to a stream for copies to the device (`up`), or back to the host."""

    def record(self, timed: bool = False) -> Event:
        """An event at the end of the current stream."""

    def follow(self, event: Any) -> None:
        """Let later work of the current stream wait, on the device, for an event of any lane."""

    def hold(self, ns: int) -> None:
        """Keep the current stream busy for about `ns`: work submitted meanwhile then runs without gaps."""

    def gather(self, arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        """Join arrays along the first dimension, in host memory that the device can read asynchronously.

        Raises TypeError for an element type that torch lacks.
        """

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a tensor of the host to the device, to `into` if given; does not wait for the copy."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, mostly of the device, to the host; does not wait for the copy."""

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """A downloaded tensor, after its copy has ended, as an array in ordinary memory."""

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        """Record work on the current stream without running it. Captures of a lane share memory, and run one at a time.

        Returns a function that submits the work, and the tensors that it writes; references to them keep their memory.
        Raises any error of the capture; the stream can be used afterwards.
        """

    def unowned(self, tensors: Named) -> Named:
        """Views of captured tensors that do not keep their memory: other captures of the lane may reuse it."""


class StreamDevice(Protocol):
    """A device with streams. `name` is torch's name of it: "cpu" or "cuda:N".

    Events of every `timed_every`th launch of a lane are timed.
    """

    name: str
    timed_every: int

    @property
    def why_no_graphs(self) -> str:
        """Why work cannot be captured, or not any more; "" while it can."""

    @property
    def capturing(self) -> AbstractContextManager[Any]:
        """Held during captures, and while captured graphs are freed."""

    def lane(self, share: Share) -> StreamLane:
        """The streams of a share."""

    def room(self) -> tuple[int, int]:
        """Free and total bytes of its memory; frees cached memory first if it is short."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the error, or a cause of it, says that the device has no memory left."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether the device cannot be used after this error."""

    def close(self) -> None:
        """Free its streams, on which nothing runs any more."""


def causes(error: BaseException) -> list[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


# --- the CPU ------------------------------------------------------------------------------------------------------


class CpuStreams:
    """Cores of this machine as a device with streams: work runs when it is submitted, on a thread pinned to them.

    `nice` is the nice value of these threads, and of those that torch starts for them.
    """

    name = "cpu"
    timed_every = 1
    capturing = nullcontext()
    why_no_graphs = "a CPU has no graphs"

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice

    def lane(self, share: Share) -> StreamLane:
        """The cores of a share."""
        return _CpuLane(share, self._nice)

    def room(self) -> tuple[int, int]:
        """Unlimited: the host's memory is not bounded here."""
        return sys.maxsize, sys.maxsize

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error is about host memory. torch has no class for it, so the message is searched."""
        return any(isinstance(each, MemoryError) or "can't allocate memory" in str(each) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """False: a CPU is never lost."""
        return False

    def close(self) -> None:
        """Do nothing."""


class _CpuLane:
    def __init__(self, share: Share, nice: int) -> None:
        self._cores = share.cores
        self._nice = nice
        self.threads: int | tuple[int, ...] = share.cores if share.size > 1 else 1

    def settle(self) -> None:
        settle(self._cores, self._nice)

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def crossing(self, up: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, timed: bool = False) -> Event:
        return _Passed(time.perf_counter_ns())

    def follow(self, event: Any) -> None:
        """Do nothing: work submitted before has run."""

    def hold(self, ns: int) -> None:
        """Do nothing: work runs when it is submitted."""

    def gather(self, arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        return tensor_of(joined(arrays))

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return tensor if into is None else into.copy_(tensor)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = array_of(tensor)
        return array

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        raise NotImplementedError(CpuStreams.why_no_graphs)

    def unowned(self, tensors: Named) -> Named:
        return tensors


class _Passed:
    """An event on a CPU: work submitted before it has run."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def is_reached(self) -> bool:
        return True

    def ns_since(self, earlier: Any) -> int:
        passed: int = self.at_ns - earlier.at_ns
        return passed
