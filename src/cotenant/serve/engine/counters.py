"""Counters per tenant: for the protocol's statistics extension and for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET

from cotenant.core.actions import Action, Launch, Probe, Respond
from cotenant.core.events import (
    AnswerLate,
    ApplicationArrived,
    ApplicationEnded,
    Event,
    LaunchEnded,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    QueryRefused,
    TenantRemoved,
)
from cotenant.execute.protocol import Timing
from cotenant.metrics import is_excluded
from cotenant.predict.scales import farthest_scale
from cotenant.predict.table import TablePredictor
from cotenant.serve.engine.slo_watch import SloChange, SloWatch
from cotenant.types import ANSWERS, Outcome, Query, StageQuery

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
_WINDOW = 1000
_FAR = 3.0
"""Ratio of observed to profiled latency, either way, above which the log warns. Co-runners explain smaller ratios."""
_FAR_NS = 10_000_000
"""Least difference in ns for this warning: the overhead of a launch is several times the latency of a tiny model."""
_log = logging.getLogger("cotenant.server")


@dataclass(slots=True)
class Sum:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count `count` events with a total time of `ns`."""
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class TenantCounters:
    """Counters of one tenant since it was first added.

    `excluded`: queries of `outcomes` that do not count for attainment, as `metrics.is_excluded` says. For the others,
    `recent` holds whether each was answered in time, and `latency_buckets` counts latencies. Unanswered queries count
    in the last bucket. `latency_ns` is the total latency of the answered queries.
    """

    slo_ns: int
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    excluded: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    arrived: int = 0
    rows: int = 0
    launches: int = 0
    placed_launches: int = 0
    reruns: int = 0
    """Reruns of queries after their batch failed."""
    success: Sum = field(default_factory=Sum)
    fail: Sum = field(default_factory=Sum)
    queue: Sum = field(default_factory=Sum)
    compute_input: Sum = field(default_factory=Sum)
    compute_infer: Sum = field(default_factory=Sum)
    compute_output: Sum = field(default_factory=Sum)
    latency_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    latency_ns: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    headroom_ns: int | None = None
    probes: int = 0
    latency_factor: float = 1.0
    """Ratio of observed to profiled latency, current estimate."""
    last_ms: int = 0
    watch: SloWatch = field(default_factory=SloWatch)

    def end(self, outcome: Outcome, latency_ns: int, rows: int, limit_ns: int | None = None) -> bool | None:
        """Count the outcome of a query with `rows` rows and the client's time limit `limit_ns`.

        Returns whether it was answered in time; None if it is excluded from attainment.
        """
        self.outcomes[outcome] += 1
        is_answer, is_in_time = outcome in ANSWERS, outcome is Outcome.ANSWERED
        if is_answer:
            self.success.add(latency_ns)
            self.rows += rows
            self.last_ms = time.time_ns() // 1_000_000
        else:
            self.fail.add(latency_ns)
        if is_excluded(outcome, latency_ns, self.slo_ns, limit_ns):
            self.excluded[outcome] += 1
            return None
        self.recent.append(is_in_time)
        if is_answer:
            self.latency_ns += latency_ns
        self.latency_buckets[bisect_left(LATENCY_BUCKETS_S, latency_ns / 1e9) if is_answer else -1] += 1
        return is_in_time

    @property
    def attainment(self) -> float | None:
        """Share of the last queries answered in time, without excluded queries; None before the first."""
        return sum(self.recent) / len(self.recent) if self.recent else None


class Counters:
    """Counters of all tenants. An observer of the driver; all counting happens under one lock.

    A query is counted when it ends, or when its answer is written if its front-end reports that. `on_slo_change` is
    called under the lock when a tenant begins or ceases to miss its SLO, with tenant, SLO in ns, change and main cause.
    """

    def __init__(self, on_slo_change: Callable[[str, int, SloChange, str], None] = lambda *_: None) -> None:
        self.by_tenant: dict[str, TenantCounters] = {}
        """Counters of the tenants served now."""
        self._gone: dict[str, TenantCounters] = {}
        """Counters of removed tenants, continued if a tenant returns."""
        self._on_slo_change = on_slo_change
        self.leading_cause: Callable[[str], str | None] = lambda _: None
        """Returns the main cause of a tenant's recent losses; set by the server to its loss account."""
        self.on_predictor: Callable[[TablePredictor], None] = lambda _: None
        """Called with a new predictor."""
        self._lock = threading.Lock()
        self._open: dict[int, Query] = {}
        self._left_out: set[int] = set()
        """Queries that the server itself submitted."""
        self._awaiting_reply: set[int] = set()
        """Queries for which a front-end will report the written answer."""
        self._unwritten: dict[int, tuple[Query, Outcome]] = {}
        self._running: dict[int, tuple[Launch, TenantCounters]] = {}
        self._inaccurate: set[str] = set()
        """Tenants with profiles far from their observed latencies, already logged."""

    def add(self, tenant: str, slo_ns: int) -> None:
        """Start counting for a tenant; earlier counts under its name are kept."""
        counted = self.by_tenant.get(tenant) or self._gone.pop(tenant, None)
        if counted is None:
            self.by_tenant[tenant] = TenantCounters(slo_ns)
        else:
            counted.slo_ns, counted.latency_factor = slo_ns, 1.0
            self.by_tenant[tenant] = counted
        self._inaccurate.discard(tenant)

    def remove(self, tenant: str) -> None:
        """Remove a tenant that is no longer served."""
        counted = self.by_tenant.pop(tenant, None)
        if counted is not None:
            self._gone[tenant] = counted

    def leave_out(self, query: int) -> None:
        """Exclude an arriving query of the server itself from all counters."""
        self._left_out.add(query)

    def expect_reply(self, query: int) -> None:
        """Count an arriving query when `replied` reports its written answer, not when it ends."""
        self._awaiting_reply.add(query)

    def replied(self, query: int, now_ns: int) -> Query | None:
        """Count a query as its answer is written, or will never be written. Safe on any thread.

        Returns the query if it ended in time and its answer was written after the deadline.
        """
        with self._lock:
            return self._written(query, now_ns)

    def arrive(self, query: Query) -> None:
        """Count the arrival of a query of an application; arrivals in the core are observed."""
        with self._lock:
            self._arrived(query)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """Observe an event, as `driver.Observer`."""
        with self._lock:
            return self._observe(time_ns, event, actions, timing)

    def _observe(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> AnswerLate | None:
        """Count an event. Returns AnswerLate if a client left after the deadline with an in-time answer unwritten."""
        if isinstance(event, QueryArrived):
            self._arrived(event.query)
        elif isinstance(event, ApplicationArrived):
            self.by_tenant[event.application].probes += event.predicted_ns is not UNSET
        elif isinstance(event, LaunchEnded):
            launch, owner = self._running.pop(event.launch)
            if timing is not None:
                _add_timing(owner, launch, timing, actions)
        for action in actions:
            if isinstance(action, Launch):
                self._launched(action, time_ns)
            elif isinstance(action, Respond):
                self._responded(action.query, action.outcome, time_ns)
            elif type(action) is Probe:
                self.by_tenant[self._open[action.query].tenant].probes += 1
        if type(event) is LaunchEnded and event.error is not None:
            owner.reruns += sum([query in self._open for query in launch.queries])
        elif type(event) is PredictorChanged:
            if isinstance(event.predictor, TablePredictor):
                self._believed(event.predictor)
                self.on_predictor(event.predictor)
        elif type(event) is ApplicationEnded:
            self._responded(event.query, event.outcome, time_ns)
        elif type(event) is QueryCancelled:
            late = self._written(event.query, time_ns)  # the client left just as the query was answered
            if late is not None:
                return AnswerLate(late.id, late.tenant, late.arrival_ns, time_ns)
        elif type(event) is QueryRefused:
            counted = self.by_tenant.get(event.tenant) or self._gone.get(event.tenant)
            if counted is not None:
                counted.arrived += 1
                counted.end(Outcome.REJECTED, time_ns - event.arrival_ns, 0)
        elif type(event) is TenantRemoved:
            self.remove(event.tenant)
        return None

    def _believed(self, predictor: TablePredictor) -> None:
        """Store the estimated latency factors, and warn once per tenant if its profile is far off."""
        for tenant, found in predictor.scales.items():
            counted = self.by_tenant.get(tenant)
            if counted is None:
                continue
            factor = farthest_scale(found)
            counted.latency_factor = factor
            off_ns = abs(factor - 1) * predictor.tables[tenant].rows[0].latency_ns
            if tenant not in self._inaccurate and not 1 / _FAR <= factor <= _FAR and off_ns > _FAR_NS:
                self._inaccurate.add(tenant)
                _log.warning(
                    "launches of tenant %r take %.2g times their profiled latency; the server uses observed latency, "
                    "plans and simulations use the profile: run 'cotenant profile --fresh' on an idle machine",
                    *(tenant, factor),
                )

    def _launched(self, launch: Launch, time_ns: int) -> None:
        counted = self.by_tenant.get(launch.work.tenant) or self._gone[launch.work.tenant]
        self._running[launch.id] = launch, counted
        deadline_ns = min([self._open[query].deadline_ns for query in launch.queries])
        counted.headroom_ns = deadline_ns - time_ns - launch.predicted_ns
        if launch.work.is_first:
            counted.launches += 1
            for query in launch.queries:
                counted.queue.add(time_ns - self._open[query].arrival_ns)

    def _arrived(self, query: Query) -> None:
        self._open[query.id] = query
        if query.id in self._left_out:
            return
        counted = self.by_tenant.get(query.tenant)
        if counted is not None:
            counted.arrived += 1

    def _responded(self, number: int, outcome: Outcome, time_ns: int) -> None:
        query = self._open.pop(number)
        if number in self._left_out:
            self._left_out.remove(number)
            return
        if number in self._awaiting_reply:
            self._awaiting_reply.remove(number)
            if outcome in ANSWERS:
                self._unwritten[number] = query, outcome
                return
        self._ended(query, outcome, time_ns)

    def _written(self, number: int, time_ns: int) -> Query | None:
        found = self._unwritten.pop(number, None)
        if found is None:
            return None
        query, outcome = found
        is_late = time_ns > query.deadline_ns
        self._ended(query, Outcome.LATE if is_late else outcome, time_ns)
        return query if is_late and outcome is Outcome.ANSWERED else None

    def _ended(self, query: Query, outcome: Outcome, time_ns: int) -> None:
        counted = self.by_tenant.get(query.tenant) or self._gone.get(query.tenant)
        if counted is None:
            return
        arrival_ns = query.arrival_ns
        # the time limit of a stage comes from its application, not from the client
        limit_ns = None if isinstance(query, StageQuery) else query.deadline_ns - arrival_ns
        is_in_time = counted.end(outcome, time_ns - arrival_ns, query.items, limit_ns)
        if is_in_time is not None and (change := counted.watch.ended(is_in_time, time_ns)) is not None:
            self._on_slo_change(query.tenant, counted.slo_ns, change, self.leading_cause(query.tenant) or "")


def _add_timing(counted: TenantCounters, launch: Launch, timing: Timing, actions: list[Action]) -> None:
    """Add the timing of a launch: each query of the batch takes all of its time; only answered queries count."""
    counted.placed_launches += bool(timing.task_times)
    queries = len(launch.queries)
    answered = sum([isinstance(action, Respond) and action.outcome in ANSWERS for action in actions])
    counted.compute_input.add(timing.input_ns * queries, answered)
    counted.compute_infer.add(timing.infer_ns * queries, answered)
    counted.compute_output.add(timing.output_ns * queries, answered)
