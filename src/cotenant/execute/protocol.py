"""What every executor offers to a driver, and those of real models to a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
from msgspec import Struct

from cotenant.core.actions import Launch
from cotenant.work import Share

Tensors = Mapping[str, npt.NDArray[Any]]
Sessions = Sequence[tuple[int | tuple[int, ...], Sequence[tuple[int, int]]]]
"""What to load of a model: a number of threads, or cores, and the ranges of units to be run with them."""
Shapes = Mapping[str, Sequence[int]]
"""Full shape of each input."""


class Timing(Struct, frozen=True, gc=False):
    """Where the time of a launch went: gathering inputs, running units, splitting outputs."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


OnEnd = Callable[[int, str | None, Timing], None]
"""Called once per launch with its number, the reason of a failure or None, and where the time went; from any thread."""


OnGrew = Callable[[int], None]
"""Called with the number of a launch that goes on in a larger share; from any thread."""


class Executor(Protocol):
    """Runs launches and keeps the tensors of queries and batches. Every method is thread-safe and quick."""

    def put(self, query: int, inputs: Tensors) -> None:
        """Keep the inputs of a query until it ends."""

    def take(self, query: int) -> Tensors:
        """Hand out the outputs of a query whose last unit has run, and forget the query."""

    def discard(self, query: int) -> None:
        """Forget a query that ended without an answer."""

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """Run a launch; never blocks."""

    def grow(self, launch: int, share: Share, on_grew: OnGrew) -> None:
        """Let a launch under way go on in this share from its next stop on, and say so there; never blocks.

        One that has no stop left, has just ended, or runs where shares cannot grow, goes on as it was.
        """

    def release(self, batch: int) -> None:
        """Forget the intermediate tensors of a batch."""

    def close(self) -> None:
        """Stop; waits for launches under way."""


class Loaded(Protocol):
    """A model that an executor has loaded."""

    def close(self) -> None:
        """Let go of it; launches under way end normally."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The worker process of a tenant, for the metrics page. `restarts` counts the workers lost, by kind of loss.

    `start_ns` is the time that the last one took to come up, `load_ns` that to load its model then.
    """

    tenant: str
    pid: int
    resident_bytes: int
    start_ns: int = 0
    load_ns: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
