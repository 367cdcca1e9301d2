"""A model whose weights lie on a device, in the hands of an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cotenant.execute.protocol import LoadSpec
from cotenant.execute.strategy import WholeRun
from cotenant.graph.dfg import Dfg, Tensor
from cotenant.work import Share

MIB = 1 << 20


class StreamModel(Protocol):
    """What the executor needs of a `TorchModel`."""

    path: Path
    name: str
    device: str
    inputs: tuple[Tensor, ...]
    dfg: Dfg

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ready to run ranges of units."""

    def check_values(self, tensors: Mapping[str, Any]) -> None:
        """Raise TensorError for inputs, on the host, with an index that a kernel would take for a fault."""

    def why_eager(self, start: int, end: int) -> str:
        """Why these units cannot be captured; "" where nothing is known against it."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        """Submit units [start, end) to the calling thread's stream."""

    def close(self) -> None:
        """Let go of it."""


class Resident:
    """A model that is let go of when no launch of it is under way. Implements `Loaded`.

    `number` is its own, also among models of one tenant.
    """

    def __init__(
        self, number: int, model: StreamModel, spec: LoadSpec, on_leave: Callable[[Resident], None], is_lent: bool
    ) -> None:
        self.number = number
        self.model = model
        self.urgent = spec.urgent
        self.max_batch = spec.max_batch
        self._on_leave = on_leave
        self.ways: dict[Share, WholeRun | None] = {}
        """What runs the whole by a run strategy, by share that is prepared; None where its chains do."""
        self._launches = 0
        self._closing = self._closed = False
        self._is_lent = is_lent
        self._lock = threading.Lock()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs."""
        return tuple(tensor.name for tensor in self.model.dfg.outputs)

    def begin(self) -> bool:
        """A launch is on its way; never blocks. False when the model is closed."""
        with self._lock:
            if self._closing:
                return False
            self._launches += 1
            return True

    def end(self) -> None:
        """A launch has ended."""
        with self._lock:
            self._launches -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Take no more launches; let go of the model, unless it is lent, when those under way have ended."""
        with self._lock:
            self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._launches or not self._closing or self._closed:
                return
            self._closed = True
        self._on_leave(self)
        self.ways = {}
        if not self._is_lent:
            self.model.close()
