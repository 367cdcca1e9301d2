"""A device with streams and a model for it, made of ordinary tensors: work runs at once, events wait for a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.streams import Captured, Event, Named, StreamLane, causes
from cotenant.work import Share

WAIT_S = 20.0
GPU = "cuda:0"


class LostError(RuntimeError):
    """What the fake device says when it is gone."""


class FakeStreams:
    """Implements StreamDevice. While `gate` is closed, no event is reached."""

    name = GPU

    def __init__(self, *, has_graphs: bool = True, memory_bytes: int = 1 << 40) -> None:
        self.has_graphs = has_graphs
        self.memory_bytes = memory_bytes
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        """What waiting for an event raises."""
        self.streams: list[tuple[Share, bool]] = []
        self.captures: list[Share] = []
        self.replays = 0
        self.refuses_capture = False
        self.waiters: set[str] = set()
        self.models: list[FakeModel] = []
        self.is_closed = False

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - sum(model.weight_bytes for model in self.models if model.device == self.name)

    def lane(self, partition: Share) -> StreamLane:
        return FakeLane(self, partition)

    def synchronize(self) -> None:
        """Weights are there at once."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return any(isinstance(each, torch.OutOfMemoryError) for each in causes(error))

    def is_lost(self, error: BaseException) -> bool:
        return any(isinstance(each, LostError) for each in causes(error))

    def close(self) -> None:
        self.is_closed = True


class FakeLane:
    """Implements StreamLane."""

    threads: int | tuple[int, ...] = 1

    def __init__(self, device: FakeStreams, partition: Share) -> None:
        self._device = device
        self._partition = partition

    def settle(self) -> None:
        """No place to sit."""

    def attend(self) -> None:
        """No place to sit."""

    @contextmanager
    def stream(self, urgent: bool) -> Iterator[None]:
        self._device.streams.append((self._partition, urgent))
        yield

    def record(self) -> Event:
        return FakeEvent(self._device)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy().copy()

    def capture(self, work: Callable[[], Named], owner: int) -> Captured:
        if self._device.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._device.captures.append(self._partition)
        return FakeGraph(self._device, work)


class FakeGraph:
    """Implements Captured: replays write the same tensors every time."""

    def __init__(self, device: FakeStreams, work: Callable[[], Named]) -> None:
        self._device = device
        self._work = work
        self.outputs = {name: tensor.clone() for name, tensor in work().items()}

    def replay(self) -> None:
        self._device.replays += 1
        for name, tensor in self._work().items():
            self.outputs[name].copy_(tensor)


class FakeEvent:
    """Implements Event."""

    def __init__(self, device: FakeStreams) -> None:
        self._device = device

    def wait(self) -> None:
        self._device.waiters.add(threading.current_thread().name)
        assert self._device.gate.wait(WAIT_S)
        if self._device.fault is not None:
            raise self._device.fault

    def ns_since(self, earlier: Any) -> int:
        return 7


class FakeModel:
    """Unit i turns x into 2 x + i, besides a tensor that only the last unit adds. Implements StreamModel."""

    units = 4

    def __init__(self, name: str, device: FakeStreams | None = None, weight_bytes: int = 100) -> None:
        self.path = Path(f"/models/{name}/1/model.pt2")
        self.name = name
        self.device = "cpu" if device is None else device.name
        self.weight_bytes = weight_bytes
        self._home = device
        if device is not None:
            device.models.append(self)
        self.moves: list[str] = []
        self.runs = 0
        self.is_closed = False
        self.before_run: Callable[[], None] = lambda: None

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing to build."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        assert not self.is_closed
        assert self._home is None or self.device == self._home.name, "its weights are elsewhere"
        self.runs += 1
        try:
            self.before_run()
        except RuntimeError as error:  # as TorchModel has it
            raise ModelError(self.path, f"units {start} to {end} failed: {error}", "Look at its inputs") from error
        x = tensors["x"]
        first = x if start == 0 else tensors["first"]
        for unit in range(start, end):
            x = 2 * x + unit
        return {"y": x + first} if end == self.units else {"x": x, "first": first}

    def move(self, device: str) -> None:
        if self._home is not None and device == self._home.name and self._home.free_bytes < self.weight_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate its weights")
        self.moves.append(device)
        self.device = device

    def close(self) -> None:
        self.is_closed = True

    def expected(self, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        y = x
        for unit in range(self.units):
            y = 2 * y + unit
        return {"y": y + x}
