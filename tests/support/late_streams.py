"""A device with streams that run submitted work later, in any order that events allow, as a GPU does.

Captured work, and copies, run on a thread of the device, which picks among the streams by a seed. Until then their
results are not there. Eager work is computed at once, whatever the streams have not done by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from cotenant.execute.gpu.streams import Event, Named, Replay, StreamLane
from cotenant.execute.torch.arrays import tensor_of
from cotenant.work import Share

Stream = tuple[Share, str]


class LateEvent:
    """Implements Event."""

    def __init__(self) -> None:
        self.at_ns = 0

    def is_reached(self) -> bool:
        return self.at_ns > 0

    def ns_since(self, earlier: Any) -> int:
        assert self.at_ns
        return int(self.at_ns - earlier.at_ns)


class LateStreams:
    """Implements StreamDevice over tensors of the CPU."""

    name = "cpu"
    timed_every = 1
    capturing = nullcontext()
    why_no_graphs = ""

    def __init__(self, seed: int = 0) -> None:
        self.copies = {"up": 0, "down": 0}
        self.replays = 0
        self._rng = Random(seed)
        self._queues: dict[Stream, deque[tuple[Callable[[], None], LateEvent | None]]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, stream: Stream, work: Callable[[], None], after: LateEvent | None = None) -> None:
        with self._changed:
            self._queues.setdefault(stream, deque()).append((work, after))
            self._changed.notify()

    def lane(self, share: Share) -> StreamLane:
        return LateLane(self, share)

    def room(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False

    def is_lost(self, error: BaseException) -> bool:
        return False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _ready(self) -> list[Stream]:
        return [
            key for key, queue in self._queues.items() if queue and (queue[0][1] is None or queue[0][1].is_reached())
        ]

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ready() or self._is_closed)
                    ready = self._ready()
                    if not ready:
                        return
                    work, _ = self._queues[self._rng.choice(ready)].popleft()
                work()


class LateLane:
    """Implements StreamLane."""

    threads: int | tuple[int, ...] = 1

    def __init__(self, device: LateStreams, share: Share) -> None:
        self._device = device
        self._share = share
        self._mine = threading.local()

    @property
    def _current(self) -> Stream | None:
        """None on threads that do not submit."""
        found: Stream | None = getattr(self._mine, "stream", None)
        return found

    def settle(self) -> None:
        self._mine.stream = self._share, "main"

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before, self._mine.stream = self._mine.stream, (self._share, name)
        try:
            yield
        finally:
            self._mine.stream = before

    def stream(self, urgent: bool) -> Any:
        return self._on("urgent" if urgent else "main")

    def crossing(self, up: bool) -> Any:
        return self._on("up" if up else "down")

    def record(self, timed: bool = False) -> Event:
        event = LateEvent()
        self._submit(lambda: setattr(event, "at_ns", perf_counter_ns()))
        return event

    def follow(self, event: Any) -> None:
        self._submit(lambda: None, event)

    def hold(self, ns: int) -> None:
        """Nothing is timed."""

    def gather(self, arrays: Sequence[Any]) -> torch.Tensor:
        return tensor_of(np.concatenate(arrays))

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return self._copied("up", tensor, torch.full_like(tensor, torch.nan) if into is None else into)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copied("down", tensor, torch.full_like(tensor, torch.nan))

    def to_numpy(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy().copy()

    def capture(self, work: Callable[[], Named]) -> tuple[Replay, Named]:
        outputs = {name: torch.full_like(value, torch.nan) for name, value in work().items()}

        def run() -> None:
            self._device.replays += 1
            for name, value in work().items():
                outputs[name].copy_(value)

        return lambda: self._submit(run), outputs

    def unowned(self, tensors: Named) -> Named:
        return tensors

    def _copied(self, way: str, tensor: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        self._device.copies[way] += 1
        self._submit(lambda: there.copy_(tensor))
        return there

    def _submit(self, work: Callable[[], Any], after: LateEvent | None = None) -> None:
        assert self._current is not None
        self._device.submit(self._current, work, after)
