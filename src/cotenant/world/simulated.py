"""The simulated executor, and the protocol of worlds: how long launches really take.

A world is independent of the predictor of the policy: it has its own table, and seeded noise.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import exp
from random import Random
from threading import Lock
from typing import NamedTuple, Protocol

from typing_extensions import override

from cotenant.core.actions import Launch
from cotenant.core.predictor import Predictor
from cotenant.execute.batches import Batches, BatchTensors
from cotenant.execute.protocol import OnEnd, OnExpanded, Timing
from cotenant.work import Share, Work


class World(Protocol):
    """Progress of launches. Speeds may depend on all running launches, so drivers call `next_ns` after each start."""

    def start(self, launch: Launch, now_ns: int) -> None:
        """Begin a launch."""

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """Let a launch go on in a larger share from its next stop on, if it can: see `core.actions.Expand`."""

    def next_ns(self) -> int | None:
        """Time of the next end or expansion of a launch, if no other starts before; None without any."""

    def pop(self) -> WorldEvent:
        """Remove and return the next event. At one instant, expansions come before ends."""


class WorldEvent(NamedTuple):
    """A launch ended, with `error` if it failed; or it expanded and goes on."""

    launch: int
    error: str | None = None
    expanded: bool = False


class _Flight(NamedTuple):
    """The rest of a running launch that can expand, from `began_ns` on."""

    began_ns: int
    work: Work
    share: Share
    stops: tuple[int, ...]
    factor: float
    end: tuple[int, int, str | None]


class TableWorld(World):
    """A world without contention: latency of a launch = its table entry times a log-normal factor. Launches can expand.

    `noise` is the standard deviation of the logarithm of that factor, `failure_rate` the share of launches that fail.
    Both are drawn from one generator with this `seed`.
    """

    def __init__(self, table: Predictor, *, noise: float = 0.0, failure_rate: float = 0.0, seed: int = 0) -> None:
        self._table = table
        self._noise = noise
        self._failure_rate = failure_rate
        self._random = Random(seed)
        self._ends: list[tuple[int, int, str | None]] = []
        self._flights: dict[int, _Flight] = {}
        self._expansions: list[tuple[int, int]] = []

    @override
    def start(self, launch: Launch, now_ns: int) -> None:
        factor = exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0
        error = None
        if self._failure_rate and self._random.random() < self._failure_rate:
            error = "injected fault"
        self._begin(
            launch, now_ns, factor, (now_ns + self._takes_ns(launch.work, launch.share, factor), launch.id, error)
        )

    def _begin(self, launch: Launch, now_ns: int, factor: float, end: tuple[int, int, str | None]) -> None:
        """Add a launch with this end."""
        heappush(self._ends, end)
        if launch.stops:
            self._flights[launch.id] = _Flight(now_ns, launch.work, launch.share, launch.stops, factor, end)

    @override
    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        flight = self._flights[launch]
        for stop in flight.stops:
            at = flight.began_ns + self._takes_ns(flight.work.until(stop), flight.share, flight.factor)
            if at >= now_ns:
                break
        else:
            return
        rest = flight.work.since(stop)
        end = (at + self._takes_ns(rest, share, flight.factor), *flight.end[1:])
        self._ends.remove(flight.end)
        heapify(self._ends)
        heappush(self._ends, end)
        stops = tuple([each for each in flight.stops if each > stop])
        self._flights[launch] = _Flight(at, rest, share, stops, flight.factor, end)
        heappush(self._expansions, (at, launch))

    def _takes_ns(self, work: Work, share: Share, factor: float) -> int:
        duration = self._table.latency_ns(work, share.size, share.device)
        return duration if factor == 1.0 else int(duration * factor) or 1

    @override
    def next_ns(self) -> int | None:
        if self._expansions:
            return min(self._expansions[0][0], self._ends[0][0])
        return self._ends[0][0] if self._ends else None

    @override
    def pop(self) -> WorldEvent:
        if self._expansions and self._expansions[0][0] <= self._ends[0][0]:
            return WorldEvent(heappop(self._expansions)[1], expanded=True)
        _, launch, error = heappop(self._ends)
        if self._flights:
            self._flights.pop(launch, None)
        return WorldEvent(launch, error)


class Timers(Protocol):
    """The clock of the simulated executor."""

    def now_ns(self) -> int:
        """Current time."""

    def call_at(self, at_ns: int, priority: int, alarm: Callable[[], None]) -> None:
        """Call `alarm` at this time."""


class SimulatedExecutor:
    """Executor that runs launches in a world, on a real or virtual clock. Outputs of models are their inputs."""

    def __init__(self, world: World, clock: Timers) -> None:
        self._world = world
        self._clock = clock
        self._lock = Lock()
        self._batches = Batches(has_tasks=True)
        self._running: dict[int, tuple[Launch, BatchTensors, OnEnd]] = {}
        self._expanding: dict[int, OnExpanded] = {}
        self.put = self._batches.put
        self.take = self._batches.take
        self.discard = self._batches.discard

    @property
    def kept(self) -> int:
        """Number of queries and batches with kept tensors."""
        return len(self._batches)

    def start(self, launch: Launch, on_end: OnEnd) -> None:
        """Run a launch; call `on_end` when the world ends it."""
        with self._lock:
            batch = self._batches.begin(launch)
            if batch.task_rows is not None:
                batch.kept = batch.task_rows
            elif launch.work.start == 0:
                batch.kept = batch.whole()
            self._running[launch.id] = launch, batch, on_end
            self._world.start(launch, self._clock.now_ns())
            self._wait_for_next()

    def enqueue(self, launch: Launch) -> None:
        """Do nothing: a launch begins at its start."""

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        """Let a launch go on in a larger share from its next stop on; call `on_expanded` there."""
        with self._lock:
            self._expanding[launch] = on_expanded
            self._world.expand(launch, share, self._clock.now_ns())
            self._wait_for_next()
        return False

    def release(self, batch: int) -> None:
        """Drop the tensors of a batch."""
        self._batches.release(batch)

    def close(self, until_s: float | None = None) -> None:
        """Do nothing: there is nothing to close."""

    def _wait_for_next(self) -> None:
        at = self._world.next_ns()
        if at is not None:
            self._clock.call_at(at, 0, self._ring)

    def _ring(self) -> None:
        """Report the next event if it is due. It may have moved to a later time since the alarm was set."""
        with self._lock:
            at = self._world.next_ns()
            if at is None or at > self._clock.now_ns():
                return
            number, error, expanded = self._world.pop()
            on_expanded = self._expanding.pop(number, None)
            if not expanded:
                launch, batch, on_end = self._running.pop(number)
                if error is None and launch.part:
                    joined = self._batches.join(launch, tuple(batch.kept), {}, {})
                    if joined is not None:
                        self._batches.finish(launch, *joined)
                elif error is None and launch.last:
                    self._batches.finish(launch, batch, batch.kept)
                elif error is None:
                    self._batches.pause(launch, batch, batch.kept)
            self._wait_for_next()
        if not expanded:
            on_end(number, error, Timing())
        elif on_expanded is not None:
            on_expanded(number)
