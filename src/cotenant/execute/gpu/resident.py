"""A model with weights on a device, owned by an executor."""

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
    """The part of `TorchModel` that the executor uses."""

    path: Path
    name: str
    device: str
    inputs: tuple[Tensor, ...]
    dfg: Dfg

    def prepare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Build these ranges of units."""

    def check_values(self, tensors: Mapping[str, Any]) -> None:
        """Raise TensorError for inputs on the host with an index outside its table, which would end the context."""

    def why_eager(self, start: int, end: int) -> str:
        """Why these units cannot be captured; "" if no reason is known."""

    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        """Submit units [start, end) to the calling thread's stream."""

    def close(self) -> None:
        """Free its weights."""


class Resident:
    """A model that is closed when no launch of it is under way. Implements `Loaded`.

    `number` is unique among all models, also of one tenant. With `is_shared` the caller keeps the model and closes it.
    """

    def __init__(
        self, number: int, model: StreamModel, spec: LoadSpec, on_leave: Callable[[Resident], None], is_shared: bool
    ) -> None:
        self.number = number
        self.model = model
        self.urgent = spec.urgent
        self.max_batch = spec.max_batch
        self._on_leave = on_leave
        self.ways: dict[Share, WholeRun | None] = {}
        """By prepared share: the run strategy of whole launches; None for the model's own chains."""
        self._launches = 0
        self._closing = self._closed = False
        self._is_shared = is_shared
        self._lock = threading.Lock()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs."""
        return tuple(tensor.name for tensor in self.model.dfg.outputs)

    def begin(self) -> bool:
        """Count a launch; never blocks. Returns False when the model is closed."""
        with self._lock:
            if self._closing:
                return False
            self._launches += 1
            return True

    def end(self) -> None:
        """Count the end of a launch."""
        with self._lock:
            self._launches -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Refuse new launches; close the model after launches under way, unless it is shared."""
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
        if not self._is_shared:
            self.model.close()
