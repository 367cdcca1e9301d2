"""Counters of what the server did, per tenant: for the statistics extension and for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cotenant.core.actions import Action, Launch, Probe, Respond
from cotenant.core.events import (
    AnswerLate,
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
from cotenant.predict.table import TablePredictor
from cotenant.serve.engine.slo_watch import SloWatch, Turn
from cotenant.types import ANSWERS, Outcome, Query, StageQuery

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
_WINDOW = 1000
_FAR = 3.0
"""Observed over profiled latency, either way, from which on the log says so: neighbours and front-ends explain less."""
_FAR_NS = 10_000_000
"""The same as a difference: handing a launch over takes several times as long as a tiny model."""
_log = logging.getLogger("cotenant.server")


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
    """Everything counted of one tenant since it was first added.

    `apart` are the queries of `outcomes` that are left out of attainment, see `metrics.is_excluded`. Of all others
    `recent` says whether they were answered in time, and `latency_buckets` how long they took, those that never were
    answered in the last one; `latency_ns` is the time of the answered ones together.
    """

    slo_ns: int
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    apart: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
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
    latency_ns: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    headroom_ns: int | None = None
    probes: int = 0
    latency_factor: float = 1.0
    """Observed over profiled latency, as it is believed now."""
    last_ms: int = 0
    watch: SloWatch = field(default_factory=SloWatch)

    def end(self, outcome: Outcome, latency_ns: int, rows: int, limit_ns: int | None = None) -> bool | None:
        """Count how a query of so many rows ended that its client allowed so much time.

        Says whether it was answered in time; None where it is counted apart.
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
            self.apart[outcome] += 1
            return None
        self.recent.append(is_in_time)
        if is_answer:
            self.latency_ns += latency_ns
        self.latency_buckets[bisect_left(LATENCY_BUCKETS_S, latency_ns / 1e9) if is_answer else -1] += 1
        return is_in_time

    @property
    def attainment(self) -> float | None:
        """Share of the last queries that were answered in time, those counted apart left out; None without any."""
        return sum(self.recent) / len(self.recent) if self.recent else None


class Counters:
    """An observer of the driver. Everything is counted under a lock; readers take a moment's view.

    A query is counted when it ends; one that is answered, and whose front-end says when its answer is written, then.
    `on_turn` is told, under that lock, of tenants that begin or cease to miss their SLO: the SLO, the turn, and what
    they lost most by, as far as that is known.
    """

    def __init__(self, on_turn: Callable[[str, int, Turn, str], None] = lambda *_: None) -> None:
        self.by_tenant: dict[str, TenantCounters] = {}
        """Of those that are served now."""
        self._gone: dict[str, TenantCounters] = {}
        """Of those that are not: they go on should their tenants come back."""
        self._on_turn = on_turn
        self.leading_cause: Callable[[str], str | None] = lambda _: None
        """What a tenant lost most of its last queries by: for those to set who keep an account of that."""
        self._lock = threading.Lock()
        self._open: dict[int, Query] = {}
        self._left_out: set[int] = set()
        """Queries of the server itself."""
        self._told_later: set[int] = set()
        """Queries whose front-ends say when their answers are written."""
        self._unwritten: dict[int, tuple[Query, Outcome]] = {}
        self._running: dict[int, tuple[Launch, TenantCounters]] = {}
        self._doubted: set[str] = set()
        """Tenants with profiles that are known to be far off."""

    def add(self, tenant: str, slo_ns: int) -> None:
        """Count for a tenant from now on; what was counted under its name before stays."""
        counted = self.by_tenant.get(tenant) or self._gone.pop(tenant, None)
        if counted is None:
            self.by_tenant[tenant] = TenantCounters(slo_ns)
        else:
            counted.slo_ns, counted.latency_factor = slo_ns, 1.0
            self.by_tenant[tenant] = counted
        self._doubted.discard(tenant)

    def remove(self, tenant: str) -> None:
        """A tenant is not served any more."""
        counted = self.by_tenant.pop(tenant, None)
        if counted is not None:
            self._gone[tenant] = counted

    def leave_out(self, query: int) -> None:
        """This query, which is just arriving, is no client's: it is not counted."""
        self._left_out.add(query)

    def tell_later(self, query: int) -> None:
        """`replied` comes when the answer of this query, which is just arriving, is written."""
        self._told_later.add(query)

    def replied(self, query: int, now_ns: int) -> Query | None:
        """An answer is written; or will never be, and is counted as if it were. From any thread.

        Gives the query where its answer was there in time, and is written too late.
        """
        with self._lock:
            return self._written(query, now_ns)

    def arrive(self, query: Query) -> None:
        """A query of an application came in; those of the core are seen to come."""
        with self._lock:
            self._arrived(query)

    def __call__(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> Event | None:
        """See Observer."""
        with self._lock:
            return self._observe(time_ns, event, actions, timing)

    def _observe(self, time_ns: int, event: Event, actions: list[Action], timing: Timing | None) -> AnswerLate | None:
        """Gives what is to be told of an answer that was there in time, and whose client left too late to have it."""
        if isinstance(event, QueryArrived):
            self._arrived(event.query)
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
        elif type(event) is ApplicationEnded:
            self._responded(event.query, event.outcome, time_ns)
        elif type(event) is QueryCancelled:
            late = self._written(event.query, time_ns)  # its client went away just as it was answered
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
        """Keep what is believed of tenants, and say once of each that its profile is far from what is observed."""
        for tenant, factor in predictor.scales.items():
            counted = self.by_tenant.get(tenant)
            if counted is None:
                continue
            counted.latency_factor = factor
            off_ns = abs(factor - 1) * predictor.tables[tenant].rows[0].latency_ns
            if tenant not in self._doubted and not 1 / _FAR <= factor <= _FAR and off_ns > _FAR_NS:
                self._doubted.add(tenant)
                _log.warning(
                    "launches of %r take %.2g times what its profile says; the server believes what it observes, plans "
                    "and simulations do not: measure it again with 'cotenant profile --fresh' on an idle machine",
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
        if number in self._told_later:
            self._told_later.remove(number)
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
        # what a stage has of its whole's time is not its client's doing
        limit_ns = None if isinstance(query, StageQuery) else query.deadline_ns - arrival_ns
        is_in_time = counted.end(outcome, time_ns - arrival_ns, query.items, limit_ns)
        if is_in_time is not None and (turn := counted.watch.ended(is_in_time, time_ns)) is not None:
            self._on_turn(query.tenant, counted.slo_ns, turn, self.leading_cause(query.tenant) or "")


def _add_timing(counted: TenantCounters, launch: Launch, timing: Timing, actions: list[Action]) -> None:
    """Each query of a batch takes all of its time. Those are counted that this launch has answered."""
    counted.placed_launches += bool(timing.task_times)
    queries = len(launch.queries)
    answered = sum([isinstance(action, Respond) and action.outcome in ANSWERS for action in actions])
    counted.compute_input.add(timing.input_ns * queries, answered)
    counted.compute_infer.add(timing.infer_ns * queries, answered)
    counted.compute_output.add(timing.output_ns * queries, answered)
