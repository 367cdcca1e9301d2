"""Counters of what the server did, per tenant: for the statistics extension and for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import Event, LaunchEnded, QueryArrived
from cotenant.execute.protocol import Timing
from cotenant.types import ANSWERS, Outcome, Query

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
_WINDOW = 1000


@dataclass(slots=True)
class Sum:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count events that took `ns` together."""
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class TenantCounters:
    """Everything counted of one tenant since it was added."""

    slo_ns: int
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    arrived: int = 0
    rows: int = 0
    launches: int = 0
    placed_launches: int = 0
    reruns: int = 0
    """How often a query was run again, since a batch that it was in had failed."""
    success: Sum = field(default_factory=Sum)
    fail: Sum = field(default_factory=Sum)
    queue: Sum = field(default_factory=Sum)
    compute_input: Sum = field(default_factory=Sum)
    compute_infer: Sum = field(default_factory=Sum)
    compute_output: Sum = field(default_factory=Sum)
    latency_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    headroom_ns: int = 0
    last_ms: int = 0

    def end(self, outcome: Outcome, latency_ns: int, rows: int) -> None:
        """Count how a query of so many rows ended."""
        self.outcomes[outcome] += 1
        if outcome is not Outcome.CANCELLED:
            self.recent.append(outcome is Outcome.ANSWERED)
        if outcome not in ANSWERS:
            self.fail.add(latency_ns)
            return
        self.success.add(latency_ns)
        self.rows += rows
        self.last_ms = time.time_ns() // 1_000_000
        self.latency_buckets[bisect_left(LATENCY_BUCKETS_S, latency_ns / 1e9)] += 1

    @property
    def attainment(self) -> float:
        """Share of the last queries that were answered in time; 1 before the first."""
        return sum(self.recent) / len(self.recent) if self.recent else 1.0


class Counters:
    """An observer of the driver. Everything is counted under the driver's lock; readers take a moment's view."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, TenantCounters] = {}
        self._open: dict[int, Query] = {}
        self._running: dict[int, tuple[Launch, TenantCounters]] = {}

    def add(self, tenant: str, slo_ns: int) -> None:
        """Start counting for a tenant."""
        self.by_tenant[tenant] = TenantCounters(slo_ns)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer."""
        if isinstance(event, QueryArrived):
            query = event.query
            self._open[query.id] = query
            counted = self.by_tenant.get(query.tenant)
            if counted is not None:
                counted.arrived += 1
        elif isinstance(event, LaunchEnded):
            launch, owner = self._running.pop(event.launch)
            if timing is not None:
                _add_timing(owner, launch, timing, actions)
        for action in actions:
            if isinstance(action, Launch):
                self._launched(action, time_ns)
            elif isinstance(action, Respond):
                self._responded(action, time_ns)
        if type(event) is LaunchEnded and event.error is not None:
            owner.reruns += sum([query in self._open for query in launch.queries])
        return None

    def _launched(self, launch: Launch, time_ns: int) -> None:
        counted = self.by_tenant[launch.work.tenant]
        self._running[launch.id] = launch, counted
        counted.headroom_ns = launch.headroom_ns
        if launch.work.is_first:
            counted.launches += 1
            for query in launch.queries:
                counted.queue.add(time_ns - self._open[query].arrival_ns)

    def _responded(self, respond: Respond, time_ns: int) -> None:
        query = self._open.pop(respond.query)
        counted = self.by_tenant.get(query.tenant)
        if counted is not None:
            counted.end(respond.outcome, time_ns - query.arrival_ns, query.items)


def _add_timing(counted: TenantCounters, launch: Launch, timing: Timing, actions: list[Action]) -> None:
    """Each query of a batch takes all of its time. Those are counted that this launch has answered."""
    counted.placed_launches += bool(timing.pieces)
    queries = len(launch.queries)
    answered = sum([isinstance(action, Respond) and action.outcome in ANSWERS for action in actions])
    counted.compute_input.add(timing.input_ns * queries, answered)
    counted.compute_infer.add(timing.infer_ns * queries, answered)
    counted.compute_output.add(timing.output_ns * queries, answered)
