"""The simulated executor: worlds that say how long launches really take.

A world is not the predictor of the policy: it has its own table, and noise of a named, seeded size.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import exp
from random import Random
from threading import Lock
from typing import Protocol

from cotenant.core.actions import Launch
from cotenant.core.predictor import Predictor
from cotenant.execute.batches import Batches, BatchTensors, joined
from cotenant.execute.protocol import OnEnd, Tensors, Timing


class World(Protocol):
    """What happens to launches. Rates may depend on all that runs: drivers ask for the next end after each start."""

    def start(self, launch: Launch, now_ns: int) -> None:
        """A launch begins."""

    def next_ns(self) -> int | None:
        """When the next launch ends if nothing else is started; None when nothing runs."""

    def pop(self) -> tuple[int, str | None]:
        """End that launch: its number, and the reason if it failed."""


class TableWorld:
    """Launches take what a table says, times a log-normal factor, whatever runs beside them.

    `noise` is the standard deviation of the logarithm of that factor, `failure_rate` the share of launches that fail;
    both are drawn from one generator seeded by `seed`.
    """

    def __init__(self, table: Predictor, *, noise: float = 0.0, failure_rate: float = 0.0, seed: int = 0) -> None:
        self._table = table
        self._noise = noise
        self._failure_rate = failure_rate
        self._random = Random(seed)
        self._ends: list[tuple[int, int, str | None]] = []

    def start(self, launch: Launch, now_ns: int) -> None:
        """See World."""
        duration = self._table.latency_ns(launch.work, launch.share.size, launch.share.device)
        if self._noise:
            duration = int(duration * exp(self._random.gauss(0.0, self._noise))) or 1
        error = None
        if self._failure_rate and self._random.random() < self._failure_rate:
            error = "injected fault"
        heappush(self._ends, (now_ns + duration, launch.id, error))

    def next_ns(self) -> int | None:
        """See World."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> tuple[int, str | None]:
        """See World."""
        _, launch, error = heappop(self._ends)
        return launch, error


class Timers(Protocol):
    """What the simulated executor needs of a clock."""

    def now_ns(self) -> int:
        """The present time."""

    def call_at(self, at_ns: int, priority: int, alarm: Callable[[], None]) -> None:
        """Ring at that time."""


class SimulatedExecutor:
    """Runs launches of a world on a clock, real or virtual. Its models give their inputs back as outputs."""

    def __init__(self, world: World, clock: Timers) -> None:
        self._world = world
        self._clock = clock
        self._lock = Lock()
        self._batches: Batches[Tensors] = Batches()
        self._running: dict[int, tuple[Launch, BatchTensors[Tensors], OnEnd]] = {}
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard

    @property
    def kept(self) -> int:
        """How many queries and batches tensors are kept of."""
        return len(self._batches)

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """See Executor."""
        with self._lock:
            batch = self._batches.begin(launch)
            if launch.work.start == 0:
                batch.kept = {name: joined(pieces) for name, pieces in batch.gather().items()}
            self._running[launch.id] = launch, batch, on_end
            self._world.start(launch, self._clock.now_ns())
            self._wait_for_next()

    def release(self, batch: int) -> None:
        """See Executor."""
        self._batches.release(batch)

    def close(self) -> None:
        """See Executor."""

    def _wait_for_next(self) -> None:
        at = self._world.next_ns()
        if at is not None:
            self._clock.call_at(at, 0, self._ring)

    def _ring(self) -> None:
        """End what is due. A ring that comes too early, since the world has changed its mind, does nothing."""
        with self._lock:
            at = self._world.next_ns()
            if at is None or at > self._clock.now_ns():
                return
            number, error = self._world.pop()
            launch, batch, on_end = self._running.pop(number)
            if error is None and launch.last:
                self._batches.finish(batch, batch.kept or {})
            elif error is None:
                self._batches.pause(launch, batch, batch.kept or {})
            self._wait_for_next()
        on_end(number, error, Timing())
