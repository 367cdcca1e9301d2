"""A device with streams and a model for it, made of ordinary tensors: work runs at once, events wait for a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.streams import Event, Named, Replay, StreamLane, causes
from cotenant.execute.torch.arrays import tensor_of
from cotenant.graph.dfg import Tensor
from cotenant.work import Share

WAIT_S = 20.0
GPU = "cuda:0"


class LostError(RuntimeError):
    """What the fake device says when it is gone."""


class FakeStreams:
    """Implements StreamDevice. While `gate` is closed, no event is reached."""

    name = GPU
    timed_every = 1
    capturing = nullcontext()

    def __init__(self, *, has_graphs: bool = True, memory_bytes: int = 1 << 40) -> None:
        self.why_no_graphs = "" if has_graphs else "it has none"
        self.memory_bytes = memory_bytes
        self.cached_bytes = 0
        """What torch keeps for later, until it is asked for."""
        self.graph_bytes = 0
        """What each capture takes."""
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        """What looking at an event raises."""
        self.streams: list[tuple[Share, bool]] = []
        self.captures: list[Share] = []
        self.replays = 0
        self.of_graphs = threading.local()
        """Whether the calling thread runs a model for a graph: Python that a real one would not run again."""
        self.refuses_capture: Exception | None = None
        self.refused_rows: set[int] = set()
        """As clusters of blocks that do not fit into a share."""
        self.followed: list[tuple[Share, Share]] = []
        """Which lane was made to wait for an event of which."""
        self.lookers: set[str] = set()
        self.models: list[FakeModel] = []
        self.is_closed = False

    @property
    def free_bytes(self) -> int:
        graphs = self.graph_bytes * len(self.captures)
        return self.memory_bytes - graphs - self.cached_bytes - sum(model.weight_bytes for model in self.models)

    def lane(self, share: Share) -> StreamLane:
        return FakeLane(self, share)

    def room(self) -> tuple[int, int]:
        self.cached_bytes = 0
        return self.free_bytes, self.memory_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        return any(isinstance(each, torch.OutOfMemoryError) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        return any(isinstance(each, LostError) for each in causes(error))

    def close(self) -> None:
        self.is_closed = True


class FakeLane:
    """Implements StreamLane."""

    threads: int | tuple[int, ...] = 1

    def __init__(self, device: FakeStreams, share: Share) -> None:
        self._device = device
        self._share = share

    def settle(self) -> None:
        """No place to sit."""

    @contextmanager
    def stream(self, urgent: bool) -> Iterator[None]:
        self._device.streams.append((self._share, urgent))
        yield

    def crossing(self, up: bool) -> Any:
        return nullcontext()

    def record(self, timed: bool = False) -> Event:
        return FakeEvent(self._device, self._share, timed)

    def follow(self, event: Any) -> None:
        self._device.followed.append((self._share, event.share))

    def hold(self, ns: int) -> None:
        """Nothing runs later than it is submitted."""

    def gather(self, arrays: Sequence[Any]) -> torch.Tensor:
        return tensor_of(np.concatenate(arrays))

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return tensor.clone() if into is None else into.copy_(tensor)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy().copy()

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        if self._device.refuses_capture is not None:
            raise self._device.refuses_capture
        if self._device.free_bytes < self._device.graph_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a graph")
        self._device.captures.append(self._share)
        graph = FakeGraph(self._device, work)
        if len(next(iter(graph.outputs.values()))) in self._device.refused_rows:
            self._device.captures.pop()
            raise RuntimeError("CUDA error: a kernel launch error has occurred due to cluster misconfiguration")
        return graph.replay, graph.outputs

    def unowned(self, tensors: Named) -> Named:
        return tensors


class FakeGraph:
    """Captured work: replays write the same tensors every time, which have no values before the first."""

    def __init__(self, device: FakeStreams, work: Callable[[], Named]) -> None:
        self._device = device
        self._work = work
        self.outputs = self._run()
        for tensor in self.outputs.values():
            tensor.fill_(torch.nan)

    def replay(self) -> None:
        self._device.replays += 1
        for name, tensor in self._run().items():
            self.outputs[name].copy_(tensor)

    def _run(self) -> Named:
        self._device.of_graphs.is_running = True
        try:
            return self._work()
        finally:
            self._device.of_graphs.is_running = False


class FakeEvent:
    """Implements Event."""

    def __init__(self, device: FakeStreams, share: Share, timed: bool) -> None:
        self._device = device
        self.share = share
        self._timed = timed

    def is_reached(self) -> bool:
        self._device.lookers.add(threading.current_thread().name)
        if self._device.gate.is_set() and self._device.fault is not None:
            raise self._device.fault
        return self._device.gate.is_set()

    def ns_since(self, earlier: Any) -> int:
        assert self._timed
        assert earlier._timed
        return 7


class FakeModel:
    """Unit i turns x into 2 x + i, besides a tensor that only the last unit adds. Implements StreamModel."""

    units = 4

    @property
    def dfg(self) -> Any:
        """Only batches in parts have a look at it."""
        return self

    def segment_io(self, start: int, end: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What units [start, end) read, and what they make: unit 0 makes `first`, the last one "y"."""
        made = ("y",) if end == self.units else ("x",) if start else ("x", "first")
        return ("x", "first") if start else ("x",), made

    def __init__(self, name: str, device: FakeStreams | None = None, weight_bytes: int = 100) -> None:
        self.path = Path(f"/models/{name}/1/model.pt2")
        self.name = name
        self.device = "cpu" if device is None else device.name
        self.inputs = (Tensor("x", "tensor(float)", (None, 3)),)
        self.outputs = (Tensor("y", "tensor(float)", (None, 3)),)
        self.unit_count = self.units
        self.weight_bytes = weight_bytes
        self._home = device
        if device is not None:
            device.models.append(self)
        self.waits_for_values = False
        self.runs = 0
        self.is_closed = False
        self.before_run: Callable[[], None] = lambda: None

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing to build."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        assert not self.is_closed
        is_eager = self._home is None or not getattr(self._home.of_graphs, "is_running", False)
        self.runs += is_eager
        try:
            if is_eager:
                self.before_run()
        except RuntimeError as error:  # as TorchModel has it
            raise ModelError(self.path, f"units {start} to {end} failed: {error}", "Look at its inputs") from error
        x = tensors["x"]
        first = x if start == 0 else tensors["first"]
        for unit in range(start, end):
            x = 2 * x + unit
        return {"y": x + first} if end == self.units else {"x": x, "first": first}

    def check_values(self, tensors: Mapping[str, Any]) -> None:
        """It has no indices."""

    def why_eager(self, start: int, end: int) -> str:
        return "operator 'nms' needs values on the host" if self.waits_for_values else ""

    def close(self) -> None:
        self.is_closed = True

    def expected(self, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        y = x
        for unit in range(self.units):
            y = 2 * y + unit
        return {"y": y + x}
