"""Devices that take work on streams: what `execute/torch/executor.py` asks of one, and the CPU behind the same calls.

A stream runs what is submitted to it in order, later than the call that submits it. An event marks a place in that
order; looking whether it was reached is the only way in which a thread here learns that work has ended.
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
"""Submits work that was captured as a whole to the calling thread's stream, over the same tensors. It holds none."""


class Event(Protocol):
    """A place in the order of a stream."""

    def is_reached(self) -> bool:
        """Whether the stream has come here; never blocks. Raises what the device says of the work before."""

    def ns_since(self, earlier: Any) -> int:
        """Nanoseconds between an earlier event of the same stream and this one: both reached, and both timed."""


def wait_for(event: Event, look_s: float = _LOOK_S) -> None:
    """Wait until a stream has come to an event. Raises what the device says of the work before."""
    while not event.is_reached():
        time.sleep(look_s)


class StreamLane(Protocol):
    """The streams of one share. One thread submits; `threads` is what `TorchModel.run` is told."""

    threads: int | tuple[int, ...]

    def settle(self) -> None:
        """Make the calling thread the one that submits."""

    def stream(self, urgent: bool) -> AbstractContextManager[Any]:
        """What the calling thread submits inside goes to this stream; the urgent one goes first on the device."""

    def crossing(self, up: bool) -> AbstractContextManager[Any]:
        """What the calling thread submits inside goes to a stream for copies to the device, or from it to the host."""

    def record(self, timed: bool = False) -> Event:
        """An event at the end of the current stream."""

    def follow(self, event: Any) -> None:
        """What is submitted to the current stream from now on waits for an event of any lane, on the device."""

    def hold(self, ns: int) -> None:
        """Keep the current stream busy for about so long: what is submitted meanwhile then runs without gaps."""

    def gather(self, arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        """Arrays below each other, in memory of the host that the device can read while the host goes on.

        Raises TypeError for a type of elements that torch lacks.
        """

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor on the device, or that one, that gets the values of one of the host; does not wait for the copy."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host that gets the values of one, mostly of the device; does not wait for that copy."""

    def to_numpy(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """A downloaded tensor, whose copy has ended, as an array that does not keep the device's kind of memory."""

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        """Record work on the current stream without running it; all of a lane share one memory, and never run at once.

        Gives what submits it, and the tensors that it writes: their memory is theirs while somebody has them. Raises
        whatever stands against it; the stream can be used afterwards.
        """

    def lend(self, tensors: Named) -> Named:
        """The same tensors of captured work, without a hold on their memory: other captures of the lane may have it."""


class StreamDevice(Protocol):
    """A device with streams. `name` is where torch has to put a model's weights: "cpu" or "cuda:N".

    Events of every `timed_every`th launch of a lane are timed.
    """

    name: str
    timed_every: int

    @property
    def why_no_graphs(self) -> str:
        """Why nothing can be captured here, or not any more; "" while it can."""

    @property
    def capturing(self) -> AbstractContextManager[Any]:
        """Held while work is captured, and by who lets go of what was."""

    def lane(self, share: Share) -> StreamLane:
        """The streams of a share."""

    def room(self) -> tuple[int, int]:
        """Bytes of its memory that are free, and bytes in all; if short, what is kept for later is given back."""

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
    timed_every = 1
    capturing = nullcontext()
    why_no_graphs = "a CPU has no graphs"

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice

    def lane(self, share: Share) -> StreamLane:
        """See StreamDevice."""
        return _CpuLane(share, self._nice)

    def room(self) -> tuple[int, int]:
        """See StreamDevice. Nobody bounds the host's memory here."""
        return sys.maxsize, sys.maxsize

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See StreamDevice. torch has no class of its own for the host's memory, so its words are looked at."""
        return any(isinstance(each, MemoryError) or "can't allocate memory" in str(each) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        """See StreamDevice: a CPU is not lost."""
        return False

    def close(self) -> None:
        """See StreamDevice."""


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
        """What was submitted before has run."""

    def hold(self, ns: int) -> None:
        """There are no gaps: work runs when it is submitted."""

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

    def lend(self, tensors: Named) -> Named:
        return tensors


class _Passed:
    """An event of a CPU: what was submitted before it has run."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def is_reached(self) -> bool:
        return True

    def ns_since(self, earlier: Any) -> int:
        passed: int = self.at_ns - earlier.at_ns
        return passed
