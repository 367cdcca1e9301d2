"""Random histories against the engine: the world around it, a second set of books, and a walk that gets deep."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from cotenant import trace
from cotenant.core.actions import Enqueue, Expand, Launch, LookAhead, Probe, Release, Respond, SetTimer, group_of
from cotenant.core.events import (
    DrainStarted,
    Event,
    LaunchEnded,
    LaunchExpanded,
    LookAheadDue,
    PolicyChanged,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    QueryWithdrawn,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import AT_ARRIVALS, WHEN_FREE, Decision, DropRule, Policy, Snapshot
from cotenant.execute.batches import Batches, BatchTensors
from cotenant.execute.runner import joined
from cotenant.policies.registry import rebuild_policy
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import ANSWERS, Outcome, Query, Tenant, priority_rank
from cotenant.work import Machine
from scenario import CORES, ONE_LANE, TWO_LANES, policy_of
from strict_engine import StrictEngine as Engine

TENANTS = {
    "quick": Tenant("quick", slo_ns=40, max_batch=4, priority=1, max_queue=4),
    "long": Tenant("long", slo_ns=300, cuts=(0, 1, 3, 4, 7), weight=2.0, max_queue=3),
    "wide": Tenant("wide", slo_ns=200, cuts=(0, 1, 2, 3), max_batch=6, priority=2, max_queue=6, splits=((0, 1, 2, 3),)),
}
CHANGED = {
    "quick": replace(TENANTS["quick"], slo_ns=50, priority=2, max_queue=3),
    "long": replace(TENANTS["long"], cuts=(0, 2, 3, 5, 7), weight=1.0),
    "wide": replace(TENANTS["wide"], slo_ns=150, weight=3.0),
}
"""The same tenants with other models, which take the same queries."""
MODELS = {
    "quick": LatencyTable((LatencyRow(0, 1, 1, 9), LatencyRow(0, 4, 1, 20), LatencyRow(0, 1, 2, 6)), (1.0,)),
    "long": LatencyTable((LatencyRow(0, 1, 1, 120), LatencyRow(0, 1, 2, 70)), (1.0, 2.0, 1.0, 1.0, 0.5, 3.0, 1.0), 1.1),
    "wide": LatencyTable(
        tuple(LatencyRow(*point, cores, ns) for *point, ns in ((0, 1, 15), (0, 4, 25), (1, 1, 30)) for cores in (1, 2)),
        (1.0, 1.0, 2.0),
        1.05,
    ),
}

PATIENT = ("model_wise", "prema", "slack_blocks")
"""Policies that let work wait for more lanes than are free, as long as something runs."""


def frozen(snapshot: Snapshot) -> tuple[object, ...]:
    """Everything that a snapshot shows, copied."""
    return (
        snapshot.now_ns,
        [(name, queue.tenant, tuple(queue.queries), tuple(queue.keys)) for name, queue in snapshot.queues.items()],
        [(b.id, b.tenant, tuple(b.queries), b.items, b.shape, b.next_unit, b.share) for b in snapshot.paused],
        [(n, run.launch, tuple(run.batch.queries), run.started_ns) for n, run in snapshot.running.items()],
        dict(snapshot.waiting),
        snapshot.free_mask,
    )


class Watched:
    """A policy under watch: it must leave the snapshot alone, and decide the same when asked again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.spec = policy.spec

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return self._policy.queue_key(query, tenant, predictor)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        if self.spec.requests is WHEN_FREE:
            lanes = self.spec.lanes
            assert any(lane.mask & snapshot.free_mask == lane.mask for lane in lanes), "asked without a free lane"
        before = frozen(snapshot)
        decision = self._policy.decide(snapshot, memory)
        assert frozen(snapshot) == before
        assert self._policy.decide(snapshot, memory) == decision
        return decision


class EngineMachine(RuleBasedStateMachine):
    """The world around an engine, and a second set of books to check it against.

    Batches are real ones, of numbers: each row of a query is its own, and every answer must be the rows that were sent.
    """

    policy_name = "edf"
    preempt = True
    options: ClassVar[dict[str, Any]] = {}
    places: ClassVar[list[str]] = ["queued", "running", "paused", "paused"]
    seen: ClassVar[Counter[str]] = Counter()
    """What all histories of this machine have reached."""

    @initialize(
        drop=st.sampled_from(DropRule),
        lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
        slack_share=st.sampled_from([0.0, 0.1, 1.0]),
    )
    def start(self, drop: DropRule, lanes: Any, slack_share: float) -> None:
        made: Any = policy_of(self.policy_name, lanes, drop, self.preempt, slack_share)
        self.policy = replace(made, **self.options)
        self.asks_again = getattr(self.policy, "enqueue_ms", 0.0) > 0
        self.partitions = set(self.policy.spec.shares)
        self.predictor = TablePredictor(MODELS)
        self.tenants = dict(TENANTS)
        self.engine = Engine(TENANTS.values(), Watched(self.policy), self.predictor, Machine.cpu(CORES))
        self.file = io.BytesIO()
        head = trace.header(self.policy, self.predictor, TENANTS.values(), Machine.cpu(CORES), created="")
        self.log = trace.TraceWriter(self.file, head)
        self.now = 0
        self.timer: int | None = None
        self.arrived: dict[int, Query] = {}
        self.probes: set[int] = set()
        self.queued: dict[int, Query] = {}
        self.waits_since: dict[int, int] = {}
        self.group_of: dict[int, tuple[int, int]] = {}
        self.tensors = Batches()
        self.flights: dict[int, BatchTensors] = {}
        self.ended: dict[int, Outcome] = {}
        self.running: dict[int, Launch] = {}
        self.enqueued: dict[int, Launch] = {}
        self.expanding: list[int] = []
        self.batches: dict[int, tuple[Tenant, set[int], int]] = {}
        self.reached: dict[int, int] = {}
        self.members: dict[int, set[int]] = {}
        self.draining = False
        self.suspended: set[str] = set()

    # --- events that can happen --------------------------------------------------------------------------------

    @rule(
        tenant=st.sampled_from([*TENANTS, "wide", "wide", "stranger"]),
        priority=st.sampled_from([0, 0, 0, 1, 3]),
        slo=st.sampled_from([None, None, None, None, 0, 10, 1000]),
        items=st.sampled_from([1, 1, 1, 2, 7]),
        shape=st.sampled_from([0, 0, 0, 0, 1]),
        merge_key=st.sampled_from([0, 0, 0, 0, 1]),
        timeout=st.sampled_from([None, None, None, 0, 5, 60]),
    )
    def arrive(
        self, tenant: str, priority: int, slo: int | None, items: int, shape: int, merge_key: int, timeout: int | None
    ) -> None:
        owner = self.tenants.get(tenant)
        slo = (owner.slo_ns if owner else 50) if slo is None else slo
        query = Query(
            len(self.arrived),
            tenant,
            self.now,
            self.now + slo,
            priority_rank(priority),
            items,
            shape,
            merge_key,
            None if timeout is None else self.now + timeout,
        )
        self.arrived[query.id] = query
        self.queued[query.id] = query
        self.waits_since[query.id] = self.now
        self.tensors.put(query.id, {"x": self.rows_of(query.id)})
        self.tell(QueryArrived(query))

    @rule(
        tenant=st.sampled_from(["wide", "wide", "quick", "long"]),
        items=st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=5),
        ends=st.integers(0, 4),
    )
    def arrive_together(self, tenant: str, items: list[int], ends: int) -> None:
        """Queries that may be merged, and then some launches that end: what batches are made of."""
        for count in items:
            self.arrive(tenant, 0, None, count, 0, 0, None)
        for _ in range(ends):
            if self.running:
                self.end_launch(0, None)

    @rule(step=st.integers(1, 30))
    def wait(self, step: int) -> None:
        target = self.now + step
        while self.timer is not None and self.timer <= target:
            self.now, self.timer = max(self.now, self.timer), None
            self.tell(TimerFired())
        self.now = target
        expanded, self.expanding = self.expanding, []
        for number in expanded:
            if number in self.running:
                self.tell(LaunchExpanded(number))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 5), fault=st.sampled_from([None] * 6 + ["it broke"]))
    def end_launch(self, pick: int, fault: str | None) -> None:
        self.tell(LaunchEnded(sorted(self.running)[pick % len(self.running)], fault))

    @rule(pick=st.integers(0, 40))
    def cancel(self, pick: int) -> None:
        """Of a live query, an ended one, or one that never came."""
        self.tell(QueryCancelled(pick))

    @precondition(lambda self: len(self.ended) < len(self.arrived))
    @rule(
        place=st.sampled_from(["queued", "running", "paused", "paused", "enqueued"]),
        pick=st.integers(0, 9),
        stage=st.booleans(),
    )
    def leave(self, place: str, pick: int, stage: bool) -> None:
        """A query that is in this place, if there is one, is not wanted any more."""
        there = [query for query in self.arrived if query not in self.ended and self.place(query) == place]
        if there:
            number = there[pick % len(there)]
            batch = self.batch_of(number)
            if batch is not None and len(self.batches[batch][1] - set(self.ended)) > 1:
                self.seen[f"left others of a batch, {place}"] += 1
            self.seen[f"left, {place}"] += 1
            self.tell(QueryWithdrawn(number, "nobody waits for it") if stage else QueryCancelled(number))

    @precondition(lambda self: len(self.tenants) > 1)
    @rule(pick=st.integers(0, 2), really=st.sampled_from([False, False, True]))
    def remove_tenant(self, pick: int, really: bool) -> None:
        if not really:
            return
        name = sorted(self.tenants)[pick % len(self.tenants)]
        del self.tenants[name]
        self.suspended.discard(name)
        self.tell(TenantRemoved(name, "unloaded"))

    @rule(tenant=st.sampled_from([*TENANTS, "stranger"]))
    def suspend_tenant(self, tenant: str) -> None:
        """One that is suspended already, or unknown, is left alone."""
        if tenant in self.tenants:
            self.suspended.add(tenant)
        self.tell(TenantSuspended(tenant, "its worker died"))

    @precondition(lambda self: self.suspended)
    @rule()
    def resume_all(self) -> None:
        for name in sorted(self.suspended):
            self.resume_tenant(name)

    @rule(tenant=st.sampled_from([*TENANTS, "stranger"]))
    def resume_tenant(self, tenant: str) -> None:
        self.suspended.discard(tenant)
        self.tell(TenantResumed(tenant))

    @precondition(lambda self: len(self.tenants) < len(TENANTS))
    @rule()
    def add_tenant(self) -> None:
        name = next(name for name in TENANTS if name not in self.tenants)
        self.tenants[name] = TENANTS[name]
        self.tell(TenantAdded(TENANTS[name]))

    @rule(tenant=st.sampled_from(sorted(TENANTS)))
    def change_tenant(self, tenant: str) -> None:
        """A reload: nothing else comes between its events."""
        if tenant not in self.tenants:
            return
        models = TENANTS, CHANGED
        self.tenants[tenant] = models[self.tenants[tenant] is TENANTS[tenant]][tenant]
        self.probes -= {number for number in self.probes if self.arrived[number].tenant == tenant}
        self.suspended.add(tenant)
        self.seen["a model changed"] += 1
        self.tell(TenantChanged(self.tenants[tenant]))
        self.tell(PredictorChanged(self.predictor))
        self.resume_tenant(tenant)

    @rule(scale=st.sampled_from([0.5, 1.0, 3.0]))
    def recalibrate(self, scale: float) -> None:
        self.predictor = self.predictor.scaled(dict.fromkeys(TENANTS, scale))
        self.tell(PredictorChanged(self.predictor))

    @rule(really=st.sampled_from([False] * 30 + [True]))
    def drain(self, really: bool) -> None:
        if really:
            self.draining = True
            self.tell(DrainStarted())

    # --- what must hold ----------------------------------------------------------------------------------------

    def rows_of(self, query: int) -> Any:
        """The numbers that a query brings, which no other one has."""
        return np.arange(self.arrived[query].items) + 100 * query

    def batch_of(self, query: int) -> int | None:
        return next((number for number, (_, members, _) in self.batches.items() if query in members), None)

    @property
    def has_paused(self) -> bool:
        """Whether a batch waits at a cut."""
        begun = [*self.running.values(), *self.enqueued.values()]
        return bool(set(self.batches) - {launch.batch for launch in begun})

    def place(self, query: int) -> str:
        """Where a live query is."""
        if query in self.queued:
            return "queued"
        batch = self.batch_of(query)
        if any(launch.batch == batch for launch in self.enqueued.values()):
            return "enqueued"
        return "running" if any(launch.batch == batch for launch in self.running.values()) else "paused"

    def expiry(self, query: Query) -> int | None:
        """When a live query has to be dropped, as things stand."""
        known = [] if query.expiry_ns is None else [query.expiry_ns]
        if self.policy.spec.drop is not DropRule.NONE and self.place(query.id) not in ("running", "enqueued"):
            known.append(query.deadline_ns)
        return min(known, default=None)

    def put_back(self, batch: int, why: str) -> None:
        """The queries of a batch that cannot go on wait again."""
        _, members, _ = self.batches[batch]
        for query in sorted(members - set(self.ended)):
            members.remove(query)
            self.queued[query] = self.arrived[query]
            self.waits_since[query] = self.now
            self.seen[why] += 1

    def compute(self, event: Event) -> Launch | None:
        """The executor's work before a launch is reported as ended, and its effects on the batch."""
        if isinstance(event, TenantSuspended) and event.tenant in self.tenants:
            busy = {launch.batch for launch in self.running.values()}
            for number, (tenant, _, _) in list(self.batches.items()):
                if tenant.name == event.tenant and number not in busy:
                    self.put_back(number, "paused when the worker died")
        if isinstance(event, TenantChanged):
            last = {launch.batch: launch.last for launch in self.running.values()}
            behind = {launch.batch for launch in self.enqueued.values()}  # these are released
            for number, (tenant, _, _) in list(self.batches.items()):
                if tenant.name == event.tenant.name and number not in behind and not last.get(number, False):
                    place = "running" if number in last else "paused"
                    self.put_back(number, f"{place} when the model changed")
        if not isinstance(event, LaunchEnded):
            self.seen["the policy changed, paused"] += isinstance(event, PolicyChanged) and self.has_paused
            return None
        ended, batch = self.running.pop(event.launch), self.flights.pop(event.launch)
        whole = ended.work.start == 0 and ended.last
        is_doomed = all(query in self.ended for query in ended.queries)
        self.seen["nobody was left when it ended"] += is_doomed
        self.seen["nobody was left when it ended, at a cut"] += is_doomed and not ended.last and event.error is None
        self.seen["failed between cuts"] += event.error is not None and not whole
        self.seen["several went on at a cut"] += len(ended.queries) > 1 and ended.work.start > 0
        if event.error is None and ended.last:
            self.tensors.finish(ended, batch, {"y": batch.kept})
        elif event.error is None:
            self.tensors.pause(ended, batch, batch.kept)
            if ended.work.tenant in self.suspended:
                self.put_back(ended.batch, "ended just before the worker died")
        elif len(batch.queries) > 1:
            left = [query for query in ended.queries if query in self.batches[ended.batch][1] - set(self.ended)]
            size = 1 if ended.work.tenant in self.suspended else (len(left) + 1) // 2
            for at, query in enumerate(left):
                self.group_of[query] = (ended.id, at // size)
            self.put_back(ended.batch, "a merged batch failed")
        return ended

    def tell(self, event: Event) -> None:
        ended = self.compute(event)
        actions = self.engine.handle(event, self.now)
        self.log(self.now, event, actions)
        started = [action for action in actions if isinstance(action, Launch)]
        behind = [action.launch for action in actions if isinstance(action, Enqueue)]
        if decided := [*[launch for launch in started if launch.id not in self.enqueued], *behind]:
            groups = dict.fromkeys(group_of(launch) for launch in decided)
            assert set(groups) <= {launch.id for launch in decided}, "a group whose first launch is another one's"
            assert len(groups) == 1 or not self.policy.spec.grouped, "two groups at once"
        assert not (started and self.policy.spec.grouped and self.running), "a group starts while another one runs"
        assert not (started and self.enqueued) or {launch.id for launch in started} == set(self.enqueued), "not all"
        assert not (behind and self.enqueued), "two groups wait"
        assert all(set(launch.after) == set(self.running) for launch in behind), "not behind all that runs"
        if ended is not None:
            self.reached[ended.batch] = ended.work.end
        for action in actions:
            if isinstance(action, Respond):
                self.check_respond(action, event, ended)
            elif isinstance(action, Launch):
                self.check_launch(action)
            elif isinstance(action, Enqueue):
                self.check_decided(action.launch, self.enqueued)
                self.enqueued[action.launch.id] = action.launch
            elif isinstance(action, Release):
                assert action.batch in self.batches, "released twice, or never begun"
                for number in [each.id for each in self.enqueued.values() if each.batch == action.batch]:
                    del self.enqueued[number]
                    self.seen["enqueued, and never ran"] += 1
                    self.put_back(action.batch, "enqueued, and put back")
                assert all(launch.batch != action.batch for launch in self.running.values())
                assert not self.batches.pop(action.batch)[1] - set(self.ended)
                self.tensors.release(action.batch)
            elif isinstance(action, LookAhead):
                assert self.policy.spec.grouped
                assert self.running, "nothing to plan behind"
            elif isinstance(action, Expand):
                self.check_expansion(action)
            elif isinstance(action, Probe):
                self.check_probe(action, event)
            else:
                assert isinstance(action, SetTimer)
                assert self.timer is None or action.at_ns < self.timer
                live = [query for query in self.arrived.values() if query.id not in self.ended]
                is_expiry = action.at_ns in [self.expiry(query) for query in live]
                assert is_expiry or self.asks_again, "a needless timer"
                self.timer = action.at_ns
        if ended is not None and ended.last and isinstance(event, LaunchEnded) and event.error is None:
            assert not self.batches.pop(ended.batch)[1] - set(self.ended), "the last unit ran, but someone is left"
        if any(isinstance(action, LookAhead) for action in actions):
            self.tell(LookAheadDue())
        if isinstance(event, QueryArrived):
            is_refused = self.ended.get(event.query.id) is Outcome.REJECTED
            if self.draining or event.query.tenant not in self.tenants:
                assert is_refused

    def check_probe(self, probe: Probe, event: Event) -> None:
        """From now on it is another query: with a late deadline, a time-out at its own, and merged with no other."""
        assert isinstance(event, QueryArrived)
        query = event.query
        assert probe.query == query.id
        assert self.policy.spec.drop is DropRule.HOPELESS
        assert probe.predicted_ns > self.tenants[query.tenant].slo_ns
        launches = [*self.running.values(), *self.enqueued.values()]
        others = {number for number in self.probes if number not in self.ended and self.arrived[number] is not query}
        others = {number for number in others if self.arrived[number].tenant == query.tenant}
        assert not others & {number for launch in launches for number in launch.queries}, "two probes at once"
        expiry_ns = query.deadline_ns if query.expiry_ns is None else min(query.expiry_ns, query.deadline_ns)
        deadline_ns = max(query.deadline_ns, self.now + 8 * probe.predicted_ns)
        made = structs.replace(query, deadline_ns=deadline_ns, expiry_ns=expiry_ns)
        self.arrived[query.id] = self.queued[query.id] = made
        self.group_of[query.id] = (-1, query.id)
        self.probes.add(query.id)
        self.seen["a probe"] += 1

    def check_respond(self, respond: Respond, event: Event, ended: Launch | None) -> None:
        query = self.arrived[respond.query]
        assert query.id not in self.ended, "a second outcome"
        expiry, place = self.expiry(query), self.place(query.id)
        self.ended[query.id] = respond.outcome
        waited = self.queued.pop(query.id, None) is not None
        if waited and expiry is not None:
            assert self.now <= max(expiry, self.waits_since[query.id]), "given up too late"
        if respond.outcome in ANSWERS:
            assert self.tensors.take(query.id)["y"].tolist() == self.rows_of(query.id).tolist(), "somebody else's rows"
        else:
            self.tensors.discard(query.id)
        match respond.outcome:
            case Outcome.ANSWERED | Outcome.LATE:
                assert isinstance(event, LaunchEnded)
                assert event.error is None
                assert ended is not None
                assert ended.last
                assert query.id in ended.queries
                self.seen["answered"] += 1
                self.seen["answered after others had left"] += len(ended.queries) < len(self.members[ended.batch])
                self.seen["answered after its batch had failed"] += self.group_of.get(query.id, (-1, 0))[0] >= 0
                assert (respond.outcome is Outcome.ANSWERED) == (self.now <= query.deadline_ns)
                self.seen["answered at its deadline"] += self.now == query.deadline_ns
            case Outcome.REJECTED:
                assert isinstance(event, QueryArrived)
                assert event.query.id == query.id
            case Outcome.FAILED:
                if isinstance(event, TenantRemoved):
                    assert event.tenant == query.tenant
                else:
                    assert isinstance(event, LaunchEnded)
                    assert event.error is not None
                    assert ended is not None
                    assert ended.queries == (query.id,)
                    assert self.members[ended.batch] == {query.id}, "it may have failed by another one's fault"
            case Outcome.CANCELLED:
                assert event == QueryCancelled(query.id) or isinstance(event, QueryWithdrawn)
                assert event.query == query.id
            case Outcome.DROPPED:
                has_expired = expiry is not None and expiry <= self.now
                is_begun = place in ("running", "enqueued")
                may_stop = self.policy.spec.requests is AT_ARRIVALS or not is_begun
                assert has_expired or (self.policy.spec.drop is DropRule.HOPELESS and may_stop)
                self.seen[f"expired, {place}"] += has_expired
        assert (respond.outcome is Outcome.ANSWERED) == (respond.reason == "")

    def check_launch(self, launch: Launch) -> None:
        """It runs from now on, as was decided now or when it was enqueued."""
        enqueued = self.enqueued.pop(launch.id, None)
        if enqueued is None:
            self.check_decided(launch, self.running)
        else:
            assert launch == structs.replace(enqueued, queries=launch.queries)
            self.seen["enqueued, and ran"] += 1
            self.seen["enqueued, and ran for fewer"] += len(launch.queries) < len(enqueued.queries)
        assert launch.work.tenant not in self.suspended
        assert all(launch.share.mask & other.share.mask == 0 for other in self.running.values()), "overbooked"
        assert launch.queries
        assert set(launch.queries) == self.batches[launch.batch][1] - set(self.ended)
        batch = self.flights[launch.id] = self.tensors.begin(launch)
        if launch.work.start == 0:
            batch.kept = joined(batch.gather()["x"])
        self.running[launch.id] = launch

    def check_expansion(self, expand: Expand) -> None:
        launch = self.running[expand.launch]
        assert launch.stops
        assert expand.launch not in self.expanding, "it expands already"
        assert launch.share.mask & ~expand.share.mask == 0
        others = [other.share.mask for other in self.running.values() if other is not launch]
        assert all(expand.share.mask & mask == 0 for mask in others), "overbooked"
        assert launch.share.size < expand.share.size <= launch.basis.wanted
        self.running[expand.launch] = structs.replace(launch, share=expand.share)
        self.expanding.append(expand.launch)
        self.seen["expanded"] += 1

    def check_decided(self, launch: Launch, beside: dict[int, Launch]) -> None:
        assert launch.share in self.partitions
        assert launch.work.tenant not in self.suspended
        assert all(launch.share.mask & other.share.mask == 0 for other in beside.values()), "overbooked"
        assert launch.predicted_ns > 0
        queries = [self.arrived[number] for number in launch.queries]
        assert queries
        assert all(query.id not in self.ended for query in queries)
        assert len({(query.tenant, query.shape, query.merge_key) for query in queries}) == 1
        others = [*self.running.values(), *self.enqueued.values()]
        assert all(launch.batch != other.batch for other in others)
        if launch.batch not in self.batches:
            assert launch.batch not in self.reached, "a batch that has ended"
            assert launch.work.start == 0
            assert all(self.queued.pop(query.id) for query in queries), "launched, but it was not waiting"
            urgency = {(query.rank, query.deadline_ns) for query in queries}
            self.seen["another one was as urgent"] += any(
                (q.rank, q.deadline_ns) in urgency for q in self.queued.values()
            )
            assert all((self.expiry(query) or self.now + 1) > self.now for query in queries), "launched when expired"
            tenant = self.tenants[launch.work.tenant]
            assert launch.work.items == sum(query.items for query in queries)
            assert launch.work.items <= tenant.max_batch or len(queries) == 1
            self.batches[launch.batch] = (tenant, set(launch.queries), launch.work.items)
            self.members[launch.batch] = set(launch.queries)
            groups = {self.group_of.get(query) for query in launch.queries}
            assert len(groups) == 1, "merged with others after a batch had failed"
        else:
            assert launch.work.start == self.reached[launch.batch], "not where it was left"
        tenant, members, items = self.batches[launch.batch]
        assert launch.work.tenant == tenant.name == queries[0].tenant
        assert launch.work.items == items
        assert set(launch.queries) == members - set(self.ended)
        assert launch.work.start in tenant.cuts
        assert launch.work.end in tenant.cuts
        assert launch.work.start < launch.work.end
        assert launch.last == (launch.work.end == tenant.unit_count)
        assert self.policy.spec.preempt or (launch.work.start == 0 and launch.last)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.live == len(self.arrived) - len(self.ended)
        assert self.engine.running == len(self.running)
        assert {tenant.name for tenant in self.engine.tenants} == set(self.tenants)
        for name in TENANTS:
            assert self.engine.waiting(name) == sum(query.tenant == name for query in self.queued.values())

    @invariant()
    def expiring_queries_have_a_timer(self) -> None:
        if not hasattr(self, "engine"):
            return
        live = [query for query in self.arrived.values() if query.id not in self.ended]
        expiries = [at for query in live if (at := self.expiry(query)) is not None]
        if expiries:
            assert self.timer is not None
            assert self.timer <= min(expiries)
            assert self.now <= min(expiries)

    @invariant()
    def nothing_waits_beside_a_free_lane(self) -> None:
        if not hasattr(self, "engine"):
            return
        busy = sum(launch.share.mask for launch in self.running.values())
        waits_for_all = self.policy.spec.grouped or self.policy_name in PATIENT
        if not busy if waits_for_all else any(lane.mask & busy == 0 for lane in self.policy.spec.lanes):
            assert all(query.tenant in self.suspended for query in self.queued.values())
            in_flight = {launch.batch for launch in self.running.values()}
            assert set(self.batches) <= in_flight, "a batch is paused beside a free lane"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.draining = True
        self.tell(DrainStarted())
        for name in sorted(self.suspended):
            self.resume_tenant(name)
        while self.running:
            self.now += 1
            self.tell(LaunchEnded(min(self.running)))
        assert self.engine.live == 0
        assert set(self.ended) == set(self.arrived)
        assert not self.batches, "intermediate tensors that nobody released"
        assert len(self.tensors) == 0, "tensors that nobody let go of"
        self.log.flush()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "log.jsonl"
            path.write_bytes(self.file.getvalue())
            head, records = trace.read(path)
            lines = [line for _, line in trace.replay(head, records, rebuild_policy)]
        assert lines == self.file.getvalue().splitlines()[1:], "a replay decides otherwise"


WALKS, STEPS = 60, 60


def walk(machine: EngineMachine, rng: Random) -> None:
    """A history in which everything is likely: hypothesis finds short ones, and seldom gets deep."""
    machine.start(rng.choice(list(DropRule)), rng.choice([ONE_LANE, TWO_LANES]), rng.choice([0.0, 0.0, 0.1, 1.0]))
    for _ in range(STEPS):
        step = rng.random()
        if step < 0.15:
            slo, timeout = rng.choice([None, None, None, 0, 10, 1000]), rng.choice([None, None, 5, 30, 60, 150])
            machine.arrive(
                *(rng.choice([*TENANTS, "stranger"]), rng.choice([0, 0, 1, 3]), slo, rng.choice([1, 2, 7])),
                *(rng.randrange(2), rng.randrange(2), timeout),
            )
        elif step < 0.35:
            some = [rng.choice([1, 1, 2]) for _ in range(rng.randint(2, 5))]
            machine.arrive_together(rng.choice(["wide", "wide", "quick", "long"]), some, rng.randrange(3))
        elif step < 0.5:
            machine.wait(rng.choice([1, 5, 5, 20, 60]))
        elif step < 0.7 and machine.running:
            machine.end_launch(rng.randrange(6), rng.choice([None, None, None, "it broke"]))
        elif step < 0.88 and len(machine.ended) < len(machine.arrived):
            place = rng.choice(machine.places)
            machine.leave(place, rng.randrange(10), rng.random() < 0.5)
        elif step < 0.9:
            machine.change_tenant(rng.choice(sorted(TENANTS)))
        elif step < 0.94:
            machine.suspend_tenant(rng.choice([*TENANTS, "stranger"]))
        elif step < 0.97:
            machine.resume_all()
        elif step < 0.98 and len(machine.tenants) == len(TENANTS):
            machine.remove_tenant(rng.randrange(3), True)
        elif len(machine.tenants) < len(TENANTS):
            machine.add_tenant()
        else:
            machine.recalibrate(rng.choice([0.5, 1.0, 2.0]))
        machine.books_agree()
        machine.expiring_queries_have_a_timer()
        machine.nothing_waits_beside_a_free_lane()
    machine.teardown()
