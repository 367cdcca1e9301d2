"""The engine, event by event: admission, expiry, failures, and policies that break the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from msgspec import UNSET, UnsetType, structs

from cotenant.core.actions import Launch, Release, Respond, SetTimer
from cotenant.core.events import (
    DrainStarted,
    LaunchEnded,
    PolicyChanged,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    QueryRefused,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import (
    AT_ARRIVALS,
    WHEN_FREE,
    Ask,
    Decision,
    Drop,
    DropRule,
    Moment,
    PolicySpec,
    Snapshot,
    Start,
)
from cotenant.errors import InvalidValueError, ProtocolViolationError
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import Machine, Share, Work
from scenario import CORES, MS, ONE_LANE, TWO_LANES, play, tables
from strict_engine import StrictEngine as Engine

A = Tenant("a", slo_ns=100 * MS, max_queue=2)
B = Tenant("b", slo_ns=100 * MS, cuts=(0, 2, 4), max_batch=4)
PREDICTOR = tables({"a": 10 * MS}, 1)
PREDICTOR = type(PREDICTOR)({**PREDICTOR.tables, **tables({"b": 40 * MS}, 4, batch_slope=0.1).tables})


def query(number: int, tenant: str = "a", arrival_ns: int = 0, slo_ns: int = 100 * MS, **more: int) -> Query:
    return Query(number, tenant, arrival_ns, arrival_ns + slo_ns, **more)


def engine(drop: DropRule = DropRule.HOPELESS, **options: float) -> Engine:
    return Engine([A, B], Edf(ONE_LANE, drop, **options), PREDICTOR, Machine.cpu(CORES))


def responds(actions: list[object]) -> list[tuple[int, Outcome]]:
    return [(action.query, action.outcome) for action in actions if isinstance(action, Respond)]


# --- admission -------------------------------------------------------------------------------------------------


def test_a_query_is_launched_at_once_on_a_free_lane() -> None:
    actions = engine().handle(QueryArrived(query(0)), 0)
    assert actions == [Launch(0, 0, (0,), Work("a", 0, 1, 0, 1), True, ONE_LANE[0], 10 * MS)]


@pytest.mark.parametrize(
    ("late", "reason", "cause"),
    [
        (query(9, "nobody"), "tenant 'nobody' is not served", LossCause.GONE),
        (query(9, slo_ns=9 * MS), "10.0 ms of work do not fit into 9.0 ms", UNSET),
        (query(9, expiry_ns=0), "its time-out has passed", UNSET),
    ],
    ids=["stranger", "hopeless", "timed out"],
)
def test_refusals_say_why(late: Query, reason: str, cause: LossCause | UnsetType) -> None:
    assert engine().handle(QueryArrived(late), 0) == [Respond(9, Outcome.REJECTED, reason, cause)]


def test_a_full_queue_refuses() -> None:
    core = engine()
    for number in range(3):  # one runs, two wait
        assert responds(core.handle(QueryArrived(query(number)), 0)) == []
    [respond] = core.handle(QueryArrived(query(3)), 0)
    assert respond == Respond(3, Outcome.REJECTED, "the queue of 'a' is full (2 waiting)")
    assert core.waiting("a") == 2


def test_a_request_refused_for_a_full_queue_is_a_lost_arrival_of_its_tenants_account() -> None:
    inside, outside = engine(), engine()
    for core in (inside, outside):
        for number in range(3):
            core.handle(QueryArrived(query(number)), 0)
        assert core.gate("a", 0).max_waiting == 2
    inside.handle(QueryArrived(query(3)), 1)
    assert outside.handle(QueryRefused("a", 0, UNSET, "the queue is full"), 1) == []
    assert outside.handle(QueryRefused("nobody", 0, UNSET, "the queue is full"), 1) == []
    seen = [core.snapshot(1).fair_queues["a"] for core in (inside, outside)]
    assert seen[0].attainment == seen[1].attainment
    assert seen[0].demand == seen[1].demand > 0
    outside.handle(QueryRefused("a", 0, LossCause.GONE, "it is being reloaded"), 1)
    assert outside.snapshot(1).fair_queues["a"].demand == seen[0].demand


def test_a_tenant_has_no_more_than_its_rate_and_gets_it_anew_when_it_is_changed() -> None:
    core = Engine([replace(A, max_rate=1.0), B], Edf(ONE_LANE), PREDICTOR, Machine.cpu(CORES))
    core.handle(QueryArrived(query(0)), 0)
    said = "tenant 'a' sends more queries a second than its max_rate"
    assert core.handle(QueryArrived(query(1)), 1) == [Respond(1, Outcome.REJECTED, said, LossCause.RATE_LIMIT)]
    assert core.gate("a", 1).opens_ns == 1000 * MS
    core.handle(TenantChanged(replace(A, max_rate=1.0)), 2)
    assert core.gate("a", 2).opens_ns == 0


def test_draining_refuses_new_queries_and_serves_those_inside() -> None:
    core = engine()
    core.handle(QueryArrived(query(0)), 0)
    core.handle(QueryArrived(query(1)), 0)
    assert core.handle(DrainStarted(), 1) == []
    assert core.handle(QueryArrived(query(2)), 1) == [
        Respond(2, Outcome.REJECTED, "the server is shutting down", LossCause.GONE)
    ]
    assert responds(core.handle(LaunchEnded(0), 10 * MS)) == [(0, Outcome.ANSWERED)]
    assert responds(core.handle(LaunchEnded(1), 20 * MS)) == [(1, Outcome.ANSWERED)]
    assert core.live == 0


def test_what_does_not_fit_is_admitted_unless_hopeless_queries_are_dropped() -> None:
    for drop in (DropRule.NONE, DropRule.EXPIRED):
        assert any(isinstance(action, Launch) for action in engine(drop).handle(QueryArrived(query(0, slo_ns=1)), 0))


# --- expiry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [DropRule.EXPIRED, DropRule.HOPELESS])
def test_a_waiting_query_ends_at_its_deadline_while_the_device_is_busy(drop: DropRule) -> None:
    tenants = [Tenant("long", 500 * MS), Tenant("short", 30 * MS)]
    predictor = tables({"long": 200 * MS, "short": 5 * MS})
    queries = [Query(0, "long", 0, 500 * MS), Query(1, "short", 7 * MS, 37 * MS)]
    made = play(Edf(ONE_LANE, drop), tenants, predictor, queries)
    assert (made.outcomes[1], made.ended_ns[1]) == (Outcome.DROPPED, 37 * MS)
    assert made.reasons[1] == "timed out after 30.0 ms in the queue"
    assert (made.outcomes[0], made.ended_ns[0]) == (Outcome.ANSWERED, 200 * MS)


@pytest.mark.parametrize("drop", DropRule)
def test_the_clients_own_time_out_holds_under_every_rule(drop: DropRule) -> None:
    tenants = [Tenant("long", 500 * MS)]
    queries = [Query(0, "long", 0, 500 * MS), Query(1, "long", 0, 500 * MS, expiry_ns=12_345_678)]
    made = play(Fcfs(ONE_LANE, drop), tenants, tables({"long": 200 * MS}), queries)
    assert (made.outcomes[1], made.ended_ns[1]) == (Outcome.DROPPED, 12_345_678)


def test_without_a_drop_rule_late_answers_are_given() -> None:
    tenants = [Tenant("a", 15 * MS)]
    queries = [Query(number, "a", 0, 15 * MS) for number in range(3)]
    made = play(Fcfs(ONE_LANE, DropRule.NONE), tenants, tables({"a": 10 * MS}), queries)
    assert made.outcomes == {0: Outcome.ANSWERED, 1: Outcome.LATE, 2: Outcome.LATE}
    assert made.reasons[2] == "late by 15.0 ms"


def test_hopeless_queries_go_before_their_deadline_and_expired_ones_at_it() -> None:
    tenants = [Tenant("a", 15 * MS)]
    queries = [Query(number, "a", 0, 15 * MS) for number in range(2)]
    hopeless = play(Fcfs(ONE_LANE, DropRule.HOPELESS), tenants, tables({"a": 10 * MS}), queries)
    assert (hopeless.outcomes[1], hopeless.ended_ns[1]) == (Outcome.DROPPED, 10 * MS)
    assert hopeless.reasons[1] == "hopeless: 10.0 ms of work left, 5.0 ms to the deadline"
    expired = play(Fcfs(ONE_LANE, DropRule.EXPIRED), tenants, tables({"a": 10 * MS}), queries)
    assert (expired.outcomes[1], expired.ended_ns[1]) == (Outcome.LATE, 20 * MS)


def test_an_answer_exactly_at_the_deadline_is_in_time() -> None:
    made = play(Edf(ONE_LANE), [Tenant("a", 10 * MS)], tables({"a": 10 * MS}), [Query(0, "a", 5, 5 + 10 * MS)])
    assert made.outcomes == {0: Outcome.ANSWERED}


def test_nothing_that_has_expired_is_launched_though_the_timer_is_handed_over_late() -> None:
    core = engine(DropRule.EXPIRED)
    core.handle(QueryArrived(query(0)), 0)
    assert core.handle(QueryArrived(query(1, slo_ns=20 * MS)), 0) == [SetTimer(20 * MS)]
    actions = core.handle(LaunchEnded(0), 25 * MS)
    assert responds(actions) == [(0, Outcome.ANSWERED), (1, Outcome.DROPPED)]
    assert not any(isinstance(action, Launch) for action in actions)
    assert core.handle(TimerFired(), 25 * MS) == []


def test_the_timer_moves_to_an_earlier_expiry_and_is_set_again_after_it_fired() -> None:
    core = engine(DropRule.EXPIRED)
    core.handle(QueryArrived(query(0)), 0)
    assert core.handle(QueryArrived(query(1, slo_ns=50 * MS)), 1) == [SetTimer(50 * MS)]
    assert core.handle(QueryArrived(query(2, "b", slo_ns=80 * MS)), 2) == []
    assert core.handle(QueryArrived(query(3, "b", slo_ns=30 * MS)), 3) == [SetTimer(30 * MS)]
    actions = core.handle(TimerFired(), 30 * MS)
    assert responds(actions) == [(3, Outcome.DROPPED)]
    assert actions[-1] == SetTimer(50 * MS)


# --- failures, cancellations, tenants that go -------------------------------------------------------------------


def test_a_failed_launch_fails_its_queries_and_releases_the_batch() -> None:
    core = engine(preempt=False)
    core.handle(QueryArrived(query(0, "b")), 0)
    assert core.handle(LaunchEnded(0, "out of memory"), 5) == [
        Respond(0, Outcome.FAILED, "out of memory", LossCause.FAILED),
        Release(0),
    ]
    assert (core.live, core.running) == (0, 0)


def test_a_batch_that_fails_is_run_again_in_halves_until_one_is_left_who_fails_alone() -> None:
    """One of them is at fault, the others are answered; who left before is not asked, and no newcomer joins them."""
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2, 3, 4):
        core.handle(QueryArrived(query(number, "b", slo_ns=500 * MS)), 0)
    [_, launch] = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    assert launch.queries == (1, 2, 3, 4)
    core.handle(QueryCancelled(2), 11 * MS)
    fault = "token 99 is out of range"
    release, again = core.handle(LaunchEnded(launch.id, fault), 20 * MS)
    assert release == Release(launch.batch)
    core.handle(QueryArrived(query(5, "b", slo_ns=500 * MS)), 20 * MS)
    begun: list[tuple[int, ...]] = []
    ended: list[object] = []
    while isinstance(again, Launch):
        begun.append(again.queries)
        actions = core.handle(LaunchEnded(again.id, fault if 3 in again.queries else None), 30 * MS)
        ended += [action for action in actions if isinstance(action, Respond)]
        again = next((action for action in actions if isinstance(action, Launch)), None)
    assert begun == [(1, 3), (1,), (1,), (3,), (4,), (4,), (5,), (5,)]
    assert ended == [
        Respond(1, Outcome.ANSWERED),
        Respond(3, Outcome.FAILED, "token 99 is out of range", LossCause.FAILED),
        Respond(4, Outcome.ANSWERED),
        Respond(5, Outcome.ANSWERED),
    ]


def test_the_members_of_a_batch_in_which_a_worker_died_are_run_alone() -> None:
    """In halves, whoever kills workers would kill one at each step."""
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2, 3, 4):
        core.handle(QueryArrived(query(number, "b", slo_ns=500 * MS)), 0)
    [_, launch] = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    core.handle(TenantSuspended("b", "its worker died"), 11 * MS)
    assert core.handle(LaunchEnded(launch.id, "its worker died"), 12 * MS) == [Release(launch.batch)]
    assert core.waiting("b") == 4
    [again] = core.handle(TenantResumed("b"), 20 * MS)
    assert isinstance(again, Launch)
    assert again.queries == (1,)


def test_who_comes_back_waits_in_the_order_of_the_policy_of_that_time() -> None:
    core = engine(preempt=False)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2):
        core.handle(QueryArrived(query(number, "b", number * MS, slo_ns=500 * MS)), number * MS)
    [_, launch] = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    core.handle(PolicyChanged(Fcfs(ONE_LANE)), 11 * MS)
    core.handle(QueryArrived(query(3, "b", 12 * MS, slo_ns=400 * MS)), 12 * MS)  # more urgent, and came last
    _, again = core.handle(LaunchEnded(launch.id, "it broke"), 20 * MS)
    assert isinstance(again, Launch)
    assert again.queries == (1,)


def test_one_that_is_left_of_a_merged_batch_is_run_alone_too() -> None:
    """The rows of those who left are still in the tensors, and may be what made it fail."""
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2):
        core.handle(QueryArrived(query(number, "b")), 0)
    [_, launch] = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    core.handle(QueryCancelled(1), 11 * MS)
    _, alone = core.handle(LaunchEnded(launch.id, "it broke"), 12 * MS)
    assert isinstance(alone, Launch)
    assert (alone.queries, alone.work.items, alone.work.start) == ((2,), 1, 0)


def test_a_worker_that_dies_sends_paused_queries_back_to_the_queue() -> None:
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0, "b", slo_ns=500 * MS)), 0)
    core.handle(QueryArrived(query(1)), 1)  # more urgent: goes on at the cut
    core.handle(LaunchEnded(0), 10 * MS)
    assert core.handle(TenantSuspended("b", "its worker died"), 11 * MS) == [Release(0)]
    assert core.waiting("b") == 1
    assert responds(core.handle(LaunchEnded(1), 20 * MS)) == [(1, Outcome.ANSWERED)]
    [again] = core.handle(TenantResumed("b"), 30 * MS)
    assert isinstance(again, Launch)
    assert (again.queries, again.work.start) == ((0,), 0)


# --- another model for a tenant ---------------------------------------------------------------------------------------

NEW_B = replace(B, cuts=(0, 3), slo_ns=200 * MS, max_queue=7)
NEW_PREDICTOR = type(PREDICTOR)({**PREDICTOR.tables, **tables({"b": 30 * MS}, 3, batch_slope=0.1).tables})


def change(core: Engine, now_ns: int) -> list[object]:
    """What a driver tells when a model is reloaded: nothing else comes between."""
    told = (TenantChanged(NEW_B), PredictorChanged(NEW_PREDICTOR), TenantResumed("b"))
    return [action for event in told for action in core.handle(event, now_ns)]


def test_queries_that_wait_are_for_the_new_model() -> None:
    core = engine(preempt=False)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2):
        core.handle(QueryArrived(query(number, "b", slo_ns=500 * MS)), 0)
    assert change(core, 5 * MS) == []
    assert core.waiting("b") == 2
    _, launch = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    assert (launch.queries, launch.work.end, launch.last) == ((1, 2), 3, True)
    assert responds(core.handle(LaunchEnded(launch.id), 50 * MS)) == [(1, Outcome.ANSWERED), (2, Outcome.ANSWERED)]
    assert core.tenants == (A, NEW_B)


def test_a_batch_in_its_last_launch_ends_with_the_old_model() -> None:
    core = engine(preempt=False)
    [launch] = core.handle(QueryArrived(query(0, "b", slo_ns=500 * MS)), 0)
    assert isinstance(launch, Launch)
    assert core.ending("b") == {0}
    core.handle(QueryArrived(query(1, "b", slo_ns=500 * MS)), 1)
    assert change(core, 5 * MS) == []
    answered, following = core.handle(LaunchEnded(launch.id), 40 * MS)
    assert answered == Respond(0, Outcome.ANSWERED)
    assert isinstance(following, Launch)
    assert (following.queries, following.work.end) == ((1,), 3)


def test_a_batch_that_would_need_another_launch_is_run_anew() -> None:
    core = engine(slack_share=0.0)
    [launch] = core.handle(QueryArrived(query(0, "b", slo_ns=500 * MS)), 0)
    assert isinstance(launch, Launch)
    assert (launch.work.end, core.ending("b")) == (2, frozenset())
    assert change(core, 5 * MS) == [SetTimer(500 * MS)]  # its lane is not free yet
    release, again = core.handle(LaunchEnded(launch.id), 20 * MS)
    assert release == Release(launch.batch)
    assert isinstance(again, Launch)
    assert (again.queries, again.work.start, again.work.end) == ((0,), 0, 3)
    assert responds(core.handle(LaunchEnded(again.id), 50 * MS)) == [(0, Outcome.ANSWERED)]


def test_a_paused_batch_is_run_anew_too() -> None:
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0, "b", slo_ns=500 * MS)), 0)
    core.handle(QueryArrived(query(1)), 1)
    core.handle(LaunchEnded(0), 10 * MS)
    assert change(core, 11 * MS) == [Release(0)]
    _, again = core.handle(LaunchEnded(1), 20 * MS)
    assert isinstance(again, Launch)
    assert (again.queries, again.work.start, again.work.end) == ((0,), 0, 3)


def test_a_suspended_tenant_that_is_changed_is_served_again() -> None:
    core = engine()
    core.handle(TenantSuspended("b", "its worker died"), 0)
    core.handle(QueryArrived(query(0, "b", slo_ns=500 * MS)), 1)
    [launch] = change(core, 2)
    assert isinstance(launch, Launch)
    assert launch.work.end == 3


def test_a_change_orders_one_queue_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(preempt=False)
    for number, tenant in enumerate("abab"):
        core.handle(QueryArrived(query(number, tenant, slo_ns=500 * MS)), 0)
    asked: list[int] = []
    real = Edf.queue_key

    def queue_key(self: Edf, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        asked.append(query.id)
        return real(self, query, tenant, predictor)

    monkeypatch.setattr(Edf, "queue_key", queue_key)
    core.handle(TenantChanged(NEW_B), 1)
    assert asked == [1, 3]


def test_who_is_not_there_cannot_be_changed() -> None:
    with pytest.raises(ProtocolViolationError, match="'c' cannot be changed"):
        engine().handle(TenantChanged(replace(B, name="c")), 0)


@pytest.mark.parametrize("drop", list(DropRule))
def test_a_paused_batch_ends_when_its_time_has_come(drop: DropRule) -> None:
    """Behind more urgent load, for ever: at the client's own time-out, and at the deadline if the rule says so."""
    core = engine(drop, slack_share=0.0)
    core.handle(QueryArrived(query(0, "b", slo_ns=300 * MS, expiry_ns=400 * MS)), 0)
    core.handle(QueryArrived(query(1, rank=0)), 1)
    actions = core.handle(LaunchEnded(0), 20 * MS)
    assert [action.queries for action in actions if isinstance(action, Launch)] == [(1,)]
    due = 400 * MS if drop is DropRule.NONE else 300 * MS
    core.handle(TimerFired(), due - 1)
    reason = f"timed out after {due / MS:.1f} ms between two of its segments"
    assert core.handle(TimerFired(), due)[:2] == [Respond(0, Outcome.DROPPED, reason), Release(0)]
    assert (core.live, core.running) == (1, 1)


def test_a_time_out_of_the_client_ends_what_runs_and_a_deadline_does_not() -> None:
    core = engine(DropRule.EXPIRED)
    core.handle(QueryArrived(query(0, expiry_ns=150 * MS)), 0)
    assert core.handle(TimerFired(), 100 * MS) == [SetTimer(150 * MS)]
    reason = "timed out after 150.0 ms while it was running"
    assert core.handle(TimerFired(), 150 * MS) == [Respond(0, Outcome.DROPPED, reason)]
    assert core.running == 1
    assert core.handle(LaunchEnded(0), 151 * MS) == []


def test_cancelling_a_running_query_frees_the_lane_only_when_the_launch_ends() -> None:
    core = engine()
    core.handle(QueryArrived(query(0)), 0)
    assert core.handle(QueryCancelled(0), 1) == [
        Respond(0, Outcome.CANCELLED, "cancelled by the client", LossCause.CLIENT)
    ]
    assert core.handle(QueryCancelled(0), 2) == []
    assert core.running == 1
    assert core.handle(QueryArrived(query(1)), 3) == [SetTimer(100 * MS)]
    actions = core.handle(LaunchEnded(0), 10 * MS)
    assert [type(action) for action in actions] == [Launch]


def test_a_member_that_is_cancelled_leaves_its_batch_running_for_the_others() -> None:
    core = engine(slack_share=0.0)
    core.handle(QueryArrived(query(0)), 0)
    for number in (1, 2):
        core.handle(QueryArrived(query(number, "b")), 0)
    [_, launch] = core.handle(LaunchEnded(0), 10 * MS)
    assert isinstance(launch, Launch)
    assert (launch.queries, launch.work.start, launch.work.end) == ((1, 2), 0, 2)
    core.handle(QueryCancelled(1), 11 * MS)
    [resumed] = core.handle(LaunchEnded(launch.id), 20 * MS)
    assert isinstance(resumed, Launch)
    assert (resumed.queries, structs.astuple(resumed.work)[2:5]) == ((2,), (2, 2, 4))
    assert responds(core.handle(LaunchEnded(resumed.id), 30 * MS)) == [(2, Outcome.ANSWERED)]


def test_a_removed_tenant_fails_its_queries_wherever_they_are() -> None:
    core = engine()
    for number in range(3):
        core.handle(QueryArrived(query(number)), 0)
    assert responds(core.handle(TenantRemoved("a", "unloaded"), 1)) == [
        (0, Outcome.FAILED),
        (1, Outcome.FAILED),
        (2, Outcome.FAILED),
    ]
    assert core.handle(LaunchEnded(0), 2) == []
    assert responds(core.handle(QueryArrived(query(3)), 3)) == [(3, Outcome.REJECTED)]
    core.handle(TenantAdded(A), 4)
    assert any(isinstance(action, Launch) for action in core.handle(QueryArrived(query(4)), 5))


@pytest.mark.parametrize(
    "event",
    [LaunchEnded(5), TenantAdded(A), TenantRemoved("c", ""), QueryArrived(query(0))],
    ids=["unknown launch", "known tenant", "unknown tenant", "same query"],
)
def test_impossible_events_raise(event: object) -> None:
    core = engine()
    core.handle(QueryArrived(query(0)), 0)
    with pytest.raises(ProtocolViolationError):
        core.handle(event, 1)  # type: ignore[arg-type]


def test_a_lane_outside_the_device_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"lane is .*\(2,\).*, expected a share of the machine"):
        Engine([A], Edf((Share((2,)),)), PREDICTOR, Machine.cpu(CORES))


def test_a_share_that_spans_two_devices_is_refused() -> None:
    machine = Machine.of({"cpu": (0,), "other": (0,)})
    lanes = tuple(machine.share((0,), each.device) for each in machine.devices)
    spec = structs.replace(SCRIPTED, lanes=lanes, shares=(*lanes, Share.joined(*lanes)))
    spanning = Scripted(lambda snapshot: Decision(), spec)
    with pytest.raises(InvalidValueError, match=r"lane is .*, expected a share of the machine"):
        Engine([A], spanning, PREDICTOR, machine)


# --- policies that break the contract ---------------------------------------------------------------------------


SCRIPTED = PolicySpec(name="scripted", lanes=TWO_LANES, shares=TWO_LANES, drop=DropRule.NONE)


@dataclass
class Scripted:
    """Decides whatever the test says."""

    script: Callable[[Snapshot], Decision]
    spec: PolicySpec = SCRIPTED

    def queue_key(self, query: Query, tenant: Tenant, predictor: object) -> tuple[int, ...]:
        return (query.id,)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        return self.script(snapshot)


def begin(number: int = 0, **changes: object) -> Start:
    start = Start(Work("b", 0, 1, 0, 4), (query(number, "b"),), TWO_LANES[0], 5)
    return structs.replace(start, **changes)  # type: ignore[arg-type]


STRANGER = query(77, "b")
WRONG: dict[str, tuple[Decision, str]] = {
    "same core twice": (Decision((begin(), structs.replace(begin(), share=ONE_LANE[0]))), "not all free"),
    "core of nobody": (Decision((begin(share=Share((9,))),)), "not all free"),
    "unknown query": (Decision((begin(queries=(STRANGER,)),)), "launches query 77, which is not waiting"),
    "same query twice": (Decision((begin(), begin(share=TWO_LANES[1]))), "do not run each unit of each row once"),
    "query of another": (Decision((begin(work=Work("a", 0, 1, 0, 1)),)), "which is not waiting"),
    "empty batch": (Decision((begin(queries=()),)), "empty batch"),
    "unknown tenant": (Decision((begin(work=Work("c", 0, 1, 0, 4)),)), "a batch of an unknown tenant"),
    "not at a cut": (Decision((begin(work=Work("b", 0, 1, 0, 3)),)), "ends a segment of 'b' at unit 3"),
    "no unit": (Decision((begin(work=Work("b", 0, 1, 0, 0)),)), "at unit 0"),
    "beyond the end": (Decision((begin(work=Work("b", 0, 1, 0, 6)),)), "at unit 6"),
    "unknown batch": (Decision((begin(queries=(), batch=3),)), "resumes batch 3, which is not paused"),
    "drop of a stranger": (Decision(drops=(Drop(77, ""),)), "drops query 77, which is not live"),
    "drop twice": (Decision(drops=(Drop(0, ""), Drop(0, ""))), "drops query 0, which is not live"),
    "other rows": (Decision((begin(work=Work("b", 0, 2, 0, 4)),)), "expected 1 rows of 'b'"),
    "other shape": (Decision((begin(work=Work("b", 1, 1, 0, 4)),)), "at shape 0"),
    "not from its unit": (Decision((begin(work=Work("b", 0, 1, 2, 4)),)), "do not run each unit of each row once"),
    "basis of anything": (Decision((begin(basis={"group": 0}),)), "a basis that is no Struct"),
    "start after drop": (Decision((begin(),), (Drop(0, ""),)), "which is not waiting"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_policy_that_breaks_the_contract_is_caught(case: str) -> None:
    decision, message = WRONG[case]
    core = Engine([A, B], Scripted(lambda snapshot: decision), PREDICTOR, Machine.cpu(CORES))
    with pytest.raises(ProtocolViolationError, match=message):
        core.handle(QueryArrived(query(0, "b")), 0)


@pytest.mark.parametrize("case", WRONG)
def test_nothing_of_a_decision_that_breaks_the_contract_is_booked(case: str) -> None:
    """What is right in it stands before what is wrong; afterwards another policy finds everything as it was."""
    wrong, _ = WRONG[case]
    right = Start(Work("a", 0, 1, 0, 1), (query(5),), Share((2,)), 5)
    broken = Decision((right, *wrong.starts), (Drop(6, ""), *wrong.drops))
    ask = Scripted(lambda s: broken if s.queues["b"].queries else Decision())
    core = Engine([replace(A, max_queue=9), B], ask, PREDICTOR, Machine.cpu((0, 1, 2)))
    core.handle(QueryArrived(query(5)), 0)
    core.handle(QueryArrived(query(6)), 0)
    with pytest.raises(ProtocolViolationError):
        core.handle(QueryArrived(query(0, "b")), 0)
    assert (core.live, core.running, core.waiting("a"), core.waiting("b")) == (3, 0, 2, 1)
    actions = core.handle(PolicyChanged(Edf((*TWO_LANES, Share((2,))), DropRule.NONE)), 0)
    assert [(action.id, action.batch) for action in actions if isinstance(action, Launch)] == [(0, 0), (1, 1), (2, 2)]


def test_a_paused_batch_is_resumed_once_and_not_without_its_queries() -> None:
    decisions = [Decision((begin(work=Work("b", 0, 1, 0, 2)),))]
    core = Engine([A, B], Scripted(lambda _: decisions.pop(0)), PREDICTOR, Machine.cpu(CORES))
    core.handle(QueryArrived(query(0, "b")), 0)
    go_on = begin(queries=(), batch=0, work=Work("b", 0, 1, 2, 4))
    twice = Decision((go_on, structs.replace(go_on, share=TWO_LANES[1])))
    decisions += [twice, Decision((go_on,), (Drop(0, ""),)), Decision((go_on,))]
    with pytest.raises(ProtocolViolationError, match="do not run each unit of each row once"):
        core.handle(LaunchEnded(0), 0)
    with pytest.raises(ProtocolViolationError, match="resumes batch 0, of which it drops every query"):
        core.handle(TimerFired(), 0)
    [launch] = core.handle(TimerFired(), 0)
    assert (launch.batch, launch.work.start, launch.last) == (0, 2, True)


@pytest.mark.parametrize(
    "members",
    [
        (query(0, "b"), query(1, "b", merge_key=1)),
        (query(0, "b"), query(1, "b", shape=1)),
        (query(0, "b"), query(1, "b", items=4)),
    ],
    ids=["key", "shape", "rows"],
)
def test_a_policy_that_merges_what_does_not_fit_together_is_caught(members: tuple[Query, Query]) -> None:
    ask = Scripted(lambda s: Decision((begin(queries=members),) if len(s.queues["b"].queries) == 2 else ()))
    core = Engine([A, B], ask, PREDICTOR, Machine.cpu(CORES))
    core.handle(QueryArrived(members[0]), 0)
    with pytest.raises(ProtocolViolationError, match="merges queries of 'b'"):
        core.handle(QueryArrived(members[1]), 0)


def test_a_policy_keeps_its_memory_from_decision_to_decision() -> None:
    seen = []

    @dataclass
    class Counting(Scripted):
        def decide(self, snapshot: Snapshot, memory: object) -> Decision:
            seen.append(memory)
            return Decision(memory=len(seen))

    core = Engine([A], Counting(lambda snapshot: Decision()), PREDICTOR, Machine.cpu(CORES))
    for number in range(3):
        core.handle(QueryArrived(query(number)) if number < 2 else QueryCancelled(0), number)
    assert seen == [None, 1, 2]


def test_a_policy_with_a_table_of_its_own_is_refused() -> None:
    spec = structs.replace(SCRIPTED, requests={**WHEN_FREE, Moment.OTHER: Ask.SELECT})
    with pytest.raises(InvalidValueError, match="expected WHEN_FREE, AT_ARRIVALS or IN_GROUPS"):
        Engine([A, B], Scripted(lambda snapshot: Decision(), spec), PREDICTOR, Machine.cpu(CORES))


@pytest.mark.parametrize(("requests", "expected"), [(WHEN_FREE, [0]), (AT_ARRIVALS, [0, 1, 2])])
def test_a_policy_is_asked_at_the_events_that_its_table_names(
    requests: Mapping[Moment, Ask], expected: list[int]
) -> None:
    """With every lane busy only a policy that selects is asked at arrivals, once for those that come together."""
    seen: list[int] = []

    def decide(snapshot: Snapshot) -> Decision:
        seen.append(snapshot.now_ns)
        free = [lane for lane in TWO_LANES if lane.mask & snapshot.free_mask == lane.mask]
        heads = snapshot.queues["b"].queries if free else ()
        starts = zip(heads, free, strict=False)
        return Decision(tuple([begin(queries=(head,), share=lane) for head, lane in starts]))

    policy = Scripted(decide, structs.replace(SCRIPTED, requests=requests))
    core = Engine([A, B], policy, PREDICTOR, Machine.cpu(CORES))
    for number, more in enumerate((True, False)):
        core.handle(QueryArrived(query(number, "b"), more), 0)
    assert core.running == 2
    core.handle(QueryArrived(query(2, "b")), 1)
    core.handle(QueryArrived(query(3, "b"), more=True), 2)
    core.handle(QueryArrived(query(4, "b")), 2)
    assert seen == expected
