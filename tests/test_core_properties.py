"""Random histories against the engine: what must hold after every single event, for every policy."""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cotenant import trace
from cotenant.core.actions import Launch, Plan, Release, Respond, SetTimer
from cotenant.core.engine import Engine
from cotenant.core.events import (
    DrainStarted,
    Event,
    LaunchEnded,
    PlanDue,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    TenantAdded,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.policies import POLICIES, AnyPolicy
from cotenant.predict.protocol import Predictor
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.types import Outcome, Query, Tenant, priority_rank
from scenario import CORES, ONE_LANE, TWO_LANES, make_policy, policy_of

TENANTS = {
    "quick": Tenant("quick", slo_ns=40, max_batch=4, max_queue=4),
    "long": Tenant("long", slo_ns=300, cuts=(0, 1, 3, 4, 7), weight=2.0, max_queue=3),
    "wide": Tenant("wide", slo_ns=90, cuts=(0, 2, 3), max_batch=6, priority=2, max_queue=6),
}
MODELS = {
    "quick": LatencyTable((LatencyRow(0, 1, 1, 9), LatencyRow(0, 4, 1, 20), LatencyRow(0, 1, 2, 6)), (1.0,)),
    "long": LatencyTable((LatencyRow(0, 1, 1, 120), LatencyRow(0, 1, 2, 70)), (1.0, 2.0, 1.0, 1.0, 0.5, 3.0, 1.0), 1.1),
    "wide": LatencyTable(
        (LatencyRow(0, 1, 2, 15), LatencyRow(0, 4, 2, 25), LatencyRow(1, 1, 2, 30)), (1.0, 1.0, 2.0), 1.05
    ),
}


def frozen(snapshot: Snapshot) -> tuple[object, ...]:
    """Everything that a snapshot shows, copied."""
    return (
        snapshot.now_ns,
        [(name, queue.tenant, tuple(queue.queries), tuple(queue.keys)) for name, queue in snapshot.queues.items()],
        [(b.id, b.tenant, tuple(b.queries), b.items, b.shape, b.next_unit) for b in snapshot.paused],
        [(n, run.launch, tuple(run.batch.queries), run.started_ns) for n, run in snapshot.running.items()],
        snapshot.free_mask,
    )


class Watched:
    """A policy under watch: it must leave the snapshot alone, and decide the same when asked again."""

    def __init__(self, policy: AnyPolicy) -> None:
        self._policy = policy
        self.name, self.drop, self.lanes = policy.name, policy.drop, policy.lanes
        self.grouped = policy.grouped

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        return self._policy.queue_key(query, tenant, predictor)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        if not self.grouped:
            assert any(lane.mask & snapshot.free_mask == lane.mask for lane in self.lanes), "asked without a free lane"
        before = frozen(snapshot)
        decision = self._policy.decide(snapshot, memory)
        assert frozen(snapshot) == before
        assert self._policy.decide(snapshot, memory) == decision
        return decision


class EngineMachine(RuleBasedStateMachine):
    """The world around an engine, and a second set of books to check it against."""

    policy_name = "edf"
    preempt = True

    @initialize(
        drop=st.sampled_from(DropRule),
        lanes=st.sampled_from([ONE_LANE, TWO_LANES]),
        stretch=st.sampled_from([0.0, 0.1, 1.0]),
    )
    def start(self, drop: DropRule, lanes: Any, stretch: float) -> None:
        self.policy = policy_of(self.policy_name, lanes, drop, self.preempt, stretch)
        self.partitions = set(self.policy.partitions)
        self.predictor = TablePredictor(MODELS)
        self.tenants = dict(TENANTS)
        self.engine = Engine(TENANTS.values(), Watched(self.policy), self.predictor, CORES)
        self.file = io.BytesIO()
        head = trace.header(self.policy, self.predictor, TENANTS.values(), CORES, created="")
        self.log = trace.TraceWriter(self.file, head)
        self.now = 0
        self.timer: int | None = None
        self.arrived: dict[int, Query] = {}
        self.queued: dict[int, Query] = {}
        self.ended: dict[int, Outcome] = {}
        self.running: dict[int, Launch] = {}
        self.batches: dict[int, tuple[Tenant, set[int], int]] = {}
        self.reached: dict[int, int] = {}
        self.draining = False
        self.suspended: set[str] = set()
        self.groups = 0

    # --- what can happen ---------------------------------------------------------------------------------------

    @rule(
        tenant=st.sampled_from([*TENANTS, "stranger"]),
        priority=st.sampled_from([0, 0, 0, 1, 3]),
        slo=st.sampled_from([None, None, None, 0, 10, 1000]),
        items=st.sampled_from([1, 1, 1, 2, 7]),
        shape=st.sampled_from([0, 0, 0, 1]),
        merge_key=st.sampled_from([0, 0, 0, 1]),
        timeout=st.sampled_from([None, None, 0, 5, 60]),
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
        self.tell(QueryArrived(query))

    @rule(step=st.integers(1, 60))
    def wait(self, step: int) -> None:
        target = self.now + step
        while self.timer is not None and self.timer <= target:
            self.now, self.timer = max(self.now, self.timer), None
            self.tell(TimerFired())
        self.now = target

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 5), fault=st.sampled_from([None] * 6 + ["it broke"]))
    def end_launch(self, pick: int, fault: str | None) -> None:
        self.tell(LaunchEnded(sorted(self.running)[pick % len(self.running)], fault))

    @rule(pick=st.integers(0, 40))
    def cancel(self, pick: int) -> None:
        """Of a live query, an ended one, or one that never came."""
        self.tell(QueryCancelled(pick))

    @precondition(lambda self: len(self.tenants) > 1)
    @rule(pick=st.integers(0, 2))
    def remove_tenant(self, pick: int) -> None:
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

    @rule(scale=st.sampled_from([0.5, 1.0, 3.0]))
    def recalibrate(self, scale: float) -> None:
        self.predictor = self.predictor.scaled(dict.fromkeys(TENANTS, scale))
        self.tell(PredictorChanged(self.predictor))

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def drain(self, really: bool) -> None:
        if really:
            self.draining = True
            self.tell(DrainStarted())

    # --- what must hold ----------------------------------------------------------------------------------------

    def expiry(self, query: Query) -> int | None:
        """When a waiting query has to be given up."""
        known = [] if query.expiry_ns is None else [query.expiry_ns]
        if self.policy.drop is not DropRule.NONE:
            known.append(query.deadline_ns)
        return min(known, default=None)

    def tell(self, event: Event) -> None:
        actions = self.engine.handle(event, self.now)
        self.log(self.now, event, actions)
        ended = self.running.pop(event.launch) if isinstance(event, LaunchEnded) else None
        started = [action for action in actions if isinstance(action, Launch)]
        if started:
            assert {launch.group for launch in started} == {self.groups}, "started together, but no group"
            assert not (self.policy.grouped and self.running), "a group starts while another one runs"
            self.groups += 1
        if ended is not None:
            self.reached[ended.batch] = ended.end
        for action in actions:
            if isinstance(action, Respond):
                self.check_respond(action, event, ended)
            elif isinstance(action, Launch):
                self.check_launch(action)
            elif isinstance(action, Release):
                assert action.batch in self.batches, "released twice, or never begun"
                assert all(launch.batch != action.batch for launch in self.running.values())
                assert not self.batches.pop(action.batch)[1] - set(self.ended)
            elif isinstance(action, Plan):
                assert self.policy.grouped
                assert self.running, "nothing to plan behind"
            else:
                assert isinstance(action, SetTimer)
                assert self.timer is None or action.at_ns < self.timer
                assert action.at_ns in [self.expiry(query) for query in self.queued.values()], "a needless timer"
                self.timer = action.at_ns
        if ended is not None and ended.last and isinstance(event, LaunchEnded) and event.error is None:
            assert not self.batches.pop(ended.batch)[1] - set(self.ended), "the last unit ran, but someone is left"
        if any(isinstance(action, Plan) for action in actions):
            self.tell(PlanDue())
        if isinstance(event, QueryArrived):
            is_refused = self.ended.get(event.query.id) is Outcome.REJECTED
            if self.draining or event.query.tenant not in self.tenants:
                assert is_refused

    def check_respond(self, respond: Respond, event: Event, ended: Launch | None) -> None:
        query = self.arrived[respond.query]
        assert query.id not in self.ended, "a second outcome"
        self.ended[query.id] = respond.outcome
        waited = self.queued.pop(query.id, None) is not None
        expiry = self.expiry(query)
        if waited and expiry is not None:
            assert self.now <= max(expiry, query.arrival_ns), "given up too late"
        match respond.outcome:
            case Outcome.ANSWERED | Outcome.LATE:
                assert isinstance(event, LaunchEnded)
                assert event.error is None
                assert ended is not None
                assert ended.last
                assert query.id in ended.queries
                assert (respond.outcome is Outcome.ANSWERED) == (self.now <= query.deadline_ns)
            case Outcome.REJECTED:
                assert isinstance(event, QueryArrived)
                assert event.query is query
            case Outcome.FAILED:
                if isinstance(event, TenantRemoved):
                    assert event.tenant == query.tenant
                elif isinstance(event, TenantSuspended):
                    assert event.tenant == query.tenant
                    assert not waited, "those who wait are served later"
                else:
                    assert isinstance(event, LaunchEnded)
                    assert event.error is not None or query.tenant in self.suspended
                    assert ended is not None
                    assert query.id in ended.queries
            case Outcome.CANCELLED:
                assert event == QueryCancelled(query.id)
            case Outcome.DROPPED:
                has_expired = expiry is not None and expiry <= self.now
                assert (waited and has_expired) or self.policy.drop is DropRule.HOPELESS
        assert (respond.outcome is Outcome.ANSWERED) == (respond.reason == "")

    def check_launch(self, launch: Launch) -> None:
        assert launch.partition in self.partitions
        assert launch.tenant not in self.suspended
        assert all(launch.partition.mask & other.partition.mask == 0 for other in self.running.values()), "overbooked"
        assert launch.predicted_ns > 0
        queries = [self.arrived[number] for number in launch.queries]
        assert queries
        assert all(query.id not in self.ended for query in queries)
        assert len({(query.tenant, query.shape, query.merge_key) for query in queries}) == 1
        assert all(launch.batch != other.batch for other in self.running.values())
        if launch.batch not in self.batches:
            assert launch.batch not in self.reached, "a batch that has ended"
            assert launch.start == 0
            assert all(self.queued.pop(query.id) for query in queries), "launched, but it was not waiting"
            assert all((self.expiry(query) or self.now + 1) > self.now for query in queries), "launched when expired"
            tenant = TENANTS[launch.tenant]
            assert launch.items == sum(query.items for query in queries)
            assert launch.items <= tenant.max_batch or len(queries) == 1
            self.batches[launch.batch] = (tenant, set(launch.queries), launch.items)
        else:
            assert launch.start == self.reached[launch.batch], "not where it was left"
        tenant, members, items = self.batches[launch.batch]
        assert launch.tenant == tenant.name == queries[0].tenant
        assert launch.items == items
        assert set(launch.queries) == members - set(self.ended)
        assert launch.start in tenant.cuts
        assert launch.end in tenant.cuts
        assert launch.start < launch.end
        assert launch.last == (launch.end == tenant.unit_count)
        assert self.policy.preempt or (launch.start == 0 and launch.last)
        assert launch.headroom_ns == min(query.deadline_ns for query in queries) - self.now - launch.predicted_ns
        self.running[launch.id] = launch

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
        expiries = [at for query in getattr(self, "queued", {}).values() if (at := self.expiry(query)) is not None]
        if expiries:
            assert self.timer is not None
            assert self.timer <= min(expiries)
            assert self.now <= min(expiries)

    @invariant()
    def nothing_waits_beside_a_free_lane(self) -> None:
        if not hasattr(self, "engine"):
            return
        busy = sum(launch.partition.mask for launch in self.running.values())
        if not busy if self.policy.grouped else any(lane.mask & busy == 0 for lane in self.policy.lanes):
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
        self.log.flush()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "log.jsonl"
            path.write_bytes(self.file.getvalue())
            head, records = trace.read(path)
            lines = [line for _, line in trace.replay(head, records, make_policy)]
        assert lines == self.file.getvalue().splitlines()[1:], "a replay decides otherwise"


@pytest.mark.parametrize("preempt", [False, True], ids=["whole", "preempt"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_history_keeps_the_contract(policy: str, preempt: bool) -> None:
    machine = type("Machine", (EngineMachine,), {"policy_name": policy, "preempt": preempt})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
    )
