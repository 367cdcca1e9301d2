"""The account of lost queries: one cause each, the right one of faults put in, alike live and from a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from cotenant.core.actions import Action, Respond
from cotenant.core.events import (
    AnswerLate,
    ApplicationArrived,
    ApplicationEnded,
    Event,
    LaunchEnded,
    ModelOpening,
    PredictorChanged,
    QueryArrived,
    QueryRefused,
    TenantAdded,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.snapshot import DropRule
from cotenant.predict.table import TablePredictor
from cotenant.trace import TraceError, TraceWriter, header, read
from cotenant.trace.losses import losses_of
from cotenant.trace.lost import Loss, LossAccount
from cotenant.types import LossCause, Outcome, Query, StageQuery, Tenant
from cotenant.work import Machine
from cotenant.world.simulated import TableWorld, World
from strict_engine import StrictEngine as Engine
from tests.support.scenario import CORES, MS, TWO_LANES, Recording, play, policy_of, tables

LATENCY_NS = {"vision": 78 * MS, "text": 23 * MS, "speech": 100 * MS, "tags": 7 * MS}
SLO_MS = {"vision": 250, "text": 120, "speech": 400, "tags": 30}
UNITS = 10
RATES = {name: 0.7 * 2 / 4 * 1e9 / ns for name, ns in LATENCY_NS.items()}
"""Each at 70 % of a quarter of two lanes."""


def tenants() -> list[Tenant]:
    return [Tenant(name, slo * MS, cuts=tuple(range(UNITS + 1))) for name, slo in SLO_MS.items()]


def arrivals(rates: Mapping[str, float], seconds: float = 12.0, seed: int = 1) -> list[Query]:
    random, due = Random(seed), list[tuple[int, str]]()
    for name, rate in rates.items():
        at = 0.0
        while (at := at + random.expovariate(rate)) < seconds:
            due.append((round(at * 1e9), name))
    return [Query(number, name, at, at + SLO_MS[name] * MS) for number, (at, name) in enumerate(sorted(due))]


def run(
    queries: list[Query], policy: str = "edf", drop: DropRule = DropRule.HOPELESS, world: World | None = None
) -> tuple[LossAccount, list[Loss], Recording]:
    """Play with an account; every lost query is in it once."""
    believed = tables(LATENCY_NS, UNITS)
    made, losses = policy_of(policy, TWO_LANES, drop, preempt=True, slack_share=1.0), list[Loss]()
    account = LossAccount(believed, made.lanes, tenants(), losses.append)
    seen = play(made, tenants(), believed, queries, world, log=account)
    lost = {number for number, outcome in seen.outcomes.items() if outcome is not Outcome.ANSWERED}
    assert sorted(loss.query for loss in losses) == sorted(lost)
    assert all(seen.outcomes[loss.query] is loss.outcome for loss in losses)
    assert sum(sum(causes.values()) for causes in account.lost.values()) == len(losses)
    assert sum(account.culprit.values()) == sum(loss.cause is LossCause.NEIGHBOUR for loss in losses)
    return account, losses, seen


def part(account: LossAccount, tenant: str, cause: LossCause) -> float:
    found = account.lost[tenant]
    return found[cause] / sum(found.values())


@pytest.mark.parametrize("guilty", LATENCY_NS)
def test_who_asks_for_four_times_his_share_loses_by_that_and_the_others_by_him(guilty: str) -> None:
    account, _, _ = run(arrivals({**RATES, guilty: 4 * RATES[guilty]}))
    assert part(account, guilty, LossCause.OWN_RATE) >= 0.9
    for other in account.lost.keys() - {guilty}:
        assert part(account, other, LossCause.NEIGHBOUR) >= 0.8
        assert account.culprit[other, guilty] >= 0.8 * account.lost[other][LossCause.NEIGHBOUR] - 1


@pytest.mark.parametrize(
    ("policy", "drop"),
    [("fcfs", DropRule.NONE), ("sjf", DropRule.EXPIRED)],
)
def test_a_burst_is_named_under_other_policies(policy: str, drop: DropRule) -> None:
    burst = [replace_query(query, 8_000_000_000) for query in arrivals({"text": 400.0}, 1.0, seed=2)]
    queries = sorted([*arrivals(RATES), *burst], key=lambda query: query.arrival_ns)
    queries = [renumbered(query, number) for number, query in enumerate(queries)]
    account, losses, _ = run(queries, policy, drop)
    hit = [loss for loss in losses if loss.tenant != "text" and 8e9 < loss.arrival_ns < 9e9]
    assert hit
    assert sum(loss.culprit == "text" for loss in hit) >= 0.8 * len(hit)
    assert part(account, "text", LossCause.OWN_RATE) >= 0.9


def replace_query(query: Query, later_ns: int) -> Query:
    return Query(query.id, query.tenant, query.arrival_ns + later_ns, query.deadline_ns + later_ns)


def renumbered(query: Query, number: int) -> Query:
    return Query(number, query.tenant, query.arrival_ns, query.deadline_ns)


def test_a_profile_three_times_too_short_is_slow_and_others_wait_behind_it() -> None:
    truth = tables({**LATENCY_NS, "vision": 3 * LATENCY_NS["vision"]}, UNITS)
    account, _, _ = run(arrivals(RATES), world=TableWorld(truth))
    assert part(account, "vision", LossCause.SLOW) >= 0.9
    for other in account.lost.keys() - {"vision"}:
        assert account.culprit[other, "vision"] >= 0.7 * sum(account.lost[other].values())


def test_nothing_is_lost_of_what_is_in_time() -> None:
    account, losses, seen = run([renumbered(query, number) for number, query in enumerate(arrivals({"tags": 1.0}))])
    assert losses == []
    assert account.lost == {}
    assert account.leading("tags") is None
    assert set(seen.outcomes.values()) == {Outcome.ANSWERED}


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["edf", "sjf", "fcfs", "most"]),
    st.sampled_from(DropRule),
    st.integers(0, 99),
    st.lists(st.floats(0.1, 6.0), min_size=4, max_size=4),
)
def test_the_causes_sum_to_all_losses(policy: str, drop: DropRule, seed: int, factors: list[float]) -> None:
    rates = {name: rate * factor for (name, rate), factor in zip(RATES.items(), factors, strict=True)}
    account, losses, _ = run(arrivals(rates, 1.5, seed), policy, drop)
    for loss in losses:
        assert (loss.culprit != "") == (loss.cause is LossCause.NEIGHBOUR)
        assert loss.culprit != loss.tenant
        if loss.delays is not None:
            assert loss.delays.total_ns >= 0
    assert account._pending == {}
    assert account._running == {}


def account_of(tenant: Tenant, latency_ns: int = 10 * MS) -> tuple[LossAccount, list[Loss]]:
    losses: list[Loss] = []
    return LossAccount(tables({tenant.name: latency_ns}), TWO_LANES[:1], [tenant], losses.append), losses


TENANT = Tenant("a", 100 * MS)


def query(number: int, came_ns: int = 0, allowed_ns: int = 100 * MS) -> Query:
    return Query(number, "a", came_ns, came_ns + allowed_ns)


@pytest.mark.parametrize(
    ("allowed_ns", "respond", "expected"),
    [
        (100 * MS, Respond(0, Outcome.FAILED, "", LossCause.FAILED), LossCause.FAILED),
        (100 * MS, Respond(0, Outcome.FAILED, "", LossCause.GONE), LossCause.GONE),
        (100 * MS, Respond(0, Outcome.CANCELLED, ""), LossCause.CLIENT),
        (2 * MS, Respond(0, Outcome.REJECTED, ""), LossCause.CLIENT),
        (2 * MS, Respond(0, Outcome.REJECTED, "", LossCause.SLO), LossCause.CLIENT),
        (50 * MS, Respond(0, Outcome.DROPPED, "", LossCause.GONE), LossCause.GONE),
        (100 * MS, Respond(0, Outcome.REJECTED, "", LossCause.SLO), LossCause.SLOW),
    ],
)
def test_what_the_core_knows_counts(allowed_ns: int, respond: Respond, expected: LossCause) -> None:
    account, losses = account_of(TENANT)
    account(0, QueryArrived(query(0, allowed_ns=allowed_ns)), [])
    account(5, TenantRemoved("b", ""), [respond])
    assert [loss.cause for loss in losses] == [expected]
    assert account.leading("a") is expected
    assert losses[0].culprit == ""


@pytest.mark.parametrize(
    ("asked", "expected"), [(2, [LossCause.SLOW] * 2), (2000, [LossCause.NEIGHBOUR, LossCause.OWN_RATE])]
)
def test_what_a_policy_chose_is_due_to_load_where_there_is_too_much_of_that(
    asked: int, expected: list[LossCause]
) -> None:
    """Where there is not, something else took the room for which it had to choose."""
    account, losses = account_of(TENANT)
    for number in range(asked):
        account(0, QueryArrived(query(number)), [])
    for number, (cause, culprit) in enumerate(((LossCause.NEIGHBOUR, "b"), (LossCause.OWN_RATE, UNSET))):
        account(5, TenantRemoved("b", ""), [Respond(number, Outcome.DROPPED, "", cause, culprit)])
    assert [loss.cause for loss in losses] == expected
    assert losses[0].culprit == ("b" if expected[0] is LossCause.NEIGHBOUR else "")


def test_an_slo_below_the_profile_is_told_from_what_launches_made_it_seem() -> None:
    account, losses = account_of(TENANT, 120 * MS)
    account(0, QueryArrived(query(0)), [Respond(0, Outcome.REJECTED, "", LossCause.SLO)])
    believed = TablePredictor(tables({"a": 50 * MS}).tables, {"a": 2.4})
    account(1, PredictorChanged(believed), [])
    account(2, QueryArrived(query(1)), [Respond(1, Outcome.REJECTED, "", LossCause.SLO)])
    assert [loss.cause for loss in losses] == [LossCause.SLO, LossCause.SLOW]


def test_a_query_that_came_late_is_of_the_front_end() -> None:
    account, losses = account_of(TENANT)
    account(95 * MS, QueryArrived(query(0)), [Respond(0, Outcome.REJECTED, "5.0 ms are left")])
    assert losses[0].cause is LossCause.FRONT_END
    assert losses[0].delays is not None
    assert losses[0].delays.front_end_ns == 95 * MS


def test_a_worker_that_was_away_is_a_failure_also_when_it_is_back() -> None:
    account, losses = account_of(TENANT)
    account(0, QueryArrived(query(0)), [])
    account(1 * MS, TenantSuspended("a", "died"), [])
    account(2 * MS, QueryArrived(query(1)), [])
    account(90 * MS, TenantSuspended("a", "died"), [])
    account(100 * MS, TenantResumed("a"), [Respond(0, Outcome.DROPPED, "")])
    account(102 * MS, TenantResumed("a"), [Respond(1, Outcome.DROPPED, "")])
    assert [loss.cause for loss in losses] == [LossCause.FAILED, LossCause.FAILED]
    assert losses[1].delays is not None
    assert losses[1].delays.away_ns == 98 * MS


def test_time_off_the_processor_is_steal_time_and_not_slow() -> None:
    for steal_ns, expected in ((95 * MS, LossCause.STEAL_TIME), (0, LossCause.SLOW)):
        believed, losses = tables({"a": 10 * MS, "b": 10 * MS}), list[Loss]()
        core = policy_of("fcfs", TWO_LANES[:1], DropRule.NONE, preempt=False, slack_share=1.0)
        both = [TENANT, Tenant("b", 100 * MS)]
        engine = Engine(both, core, believed, Machine.cpu((0,)))
        account = LossAccount(believed, core.lanes, both, losses.append)
        waits = Query(1, "b", 1, 1 + 100 * MS)
        for now_ns, event in (
            (0, QueryArrived(query(0))),
            (1, QueryArrived(waits)),
            (110 * MS, LaunchEnded(0, steal_ns=steal_ns)),
            (120 * MS, LaunchEnded(1)),
        ):
            account(now_ns, event, engine.handle(event, now_ns))
        assert [loss.cause for loss in losses] == [expected, LossCause.STEAL_TIME if steal_ns else LossCause.NEIGHBOUR]
        assert losses[1].culprit == ("" if steal_ns else "a")


@pytest.mark.parametrize(
    ("opened_ms", "expected"), [((0, 60), LossCause.GONE), ((0, None), LossCause.GONE), ((0, 40), LossCause.STEAL_TIME)]
)
def test_what_runs_long_while_a_model_is_opened_is_due_to_that(
    opened_ms: tuple[int, int | None], expected: LossCause
) -> None:
    believed, losses = tables({"a": 10 * MS}), list[Loss]()
    core = policy_of("fcfs", TWO_LANES[:1], DropRule.NONE, preempt=False, slack_share=1.0)
    engine = Engine([TENANT], core, believed, Machine.cpu((0,)))
    account = LossAccount(believed, core.lanes, [TENANT], losses.append)
    events: list[tuple[int, Event]] = [(0, ModelOpening("b")), (0, QueryArrived(query(0)))]
    events.append((110 * MS, LaunchEnded(0, steal_ns=90 * MS)))
    if opened_ms[1] is not None:
        events.insert(2, (opened_ms[1] * MS, ModelOpening("b", done=True)))
    for now_ns, event in events:
        account(now_ns, event, engine.handle(event, now_ns))
    assert [loss.cause for loss in losses] == [expected]


def test_requests_that_were_no_queries_and_answers_that_were_written_late_count() -> None:
    account, losses = account_of(TENANT)
    account(7, QueryRefused("a", 3, LossCause.GONE, "it is being reloaded"), [])
    account(9, AnswerLate(4, "a", 1, 8), [])
    assert account.lost == {"a": Counter({LossCause.GONE: 1, LossCause.REPLY: 1})}
    assert [(loss.query, loss.outcome, loss.ended_ns) for loss in losses] == [(-1, "rejected", 7), (4, "late", 8)]


def test_a_request_refused_for_a_full_queue_has_the_cause_of_a_query_that_was() -> None:
    inside, outside = account_of(TENANT), account_of(TENANT)
    for account, _ in (inside, outside):
        account(0, QueryArrived(query(0)), [])
    inside[0](7, QueryArrived(query(1)), [Respond(1, Outcome.REJECTED, "the queue of 'a' is full (2 waiting)")])
    outside[0](7, QueryRefused("a", 0, UNSET, "the queue of 'a' is full (2 waiting)"), [])
    assert outside[0].lost == inside[0].lost
    assert sum(outside[0].lost["a"].values()) == 1
    outside[0](8, QueryRefused("a", 3, LossCause.RATE_LIMIT, "too many"), [])
    assert outside[0].lost["a"][LossCause.RATE_LIMIT] == 1
    outside[0](9, QueryArrived(query(2)), [Respond(2, Outcome.REJECTED, "too many", LossCause.RATE_LIMIT)])
    assert outside[0].lost["a"][LossCause.RATE_LIMIT] == 2


def test_an_application_is_lost_for_what_its_stage_was_and_takes_the_others_along() -> None:
    account, losses = account_of(TENANT)
    account(0, ApplicationArrived(0, "read", 0, 300 * MS), [])
    for number in (1, 2):
        account(0, QueryArrived(StageQuery(number, "a", 0, 100 * MS, part_of=0, stage=f"s{number}")), [])
    account(5, TenantRemoved("x", ""), [Respond(1, Outcome.FAILED, "", LossCause.FAILED)])
    account(5, ApplicationEnded(0, Outcome.FAILED, "", 5), [])
    account(5, TenantRemoved("x", ""), [Respond(2, Outcome.CANCELLED, "withdrawn")])
    told = [(loss.query, loss.tenant, loss.cause) for loss in losses]
    assert told == [(1, "a", "failed"), (0, "read", "failed"), (2, "a", "failed")]


def test_a_trace_tells_the_same_as_the_run(tmp_path: Path) -> None:
    queries = arrivals({**RATES, "text": 4 * RATES["text"]}, 3.0)
    believed = tables(LATENCY_NS, UNITS)
    policy = policy_of("edf", TWO_LANES, DropRule.HOPELESS, preempt=True, slack_share=1.0)
    path, losses = tmp_path / "t.jsonl", list[Loss]()
    head = header(policy, believed, tenants(), Machine.cpu(CORES), created="")
    writer = TraceWriter(path.open("wb"), head)
    account = LossAccount(believed, policy.spec.lanes, tenants(), losses.append)

    def both(now_ns: int, event: Event, actions: list[Action]) -> None:
        writer(now_ns, event, actions)
        account(now_ns, event, actions)

    play(policy, tenants(), believed, queries, log=both)
    writer.close()
    again, told = losses_of(*read(path))
    assert told == losses != []
    assert (again.lost, again.culprit) == (account.lost, account.culprit)
    with pytest.raises(TraceError, match="the trace names no lanes of its policy"):
        losses_of(structs.replace(head, policy_options={}), [])


@pytest.mark.parametrize("seed", range(20))
def test_tenants_come_and_go_at_the_instant_of_what_else_happens(seed: int) -> None:
    """Many events at one time: whoever came just now is known to all that follow, and each loss has its cause."""
    random, now = Random(seed), 0
    names = ["a", "b", "c"]
    account, losses = account_of(TENANT)
    account(now, PredictorChanged(tables(dict.fromkeys(names, 10 * MS))), [])
    served, inside, lost = {"a"}, dict[int, Query](), 0
    for number in range(400):
        now += random.choice([0, 0, 0, 0, 0, 0, 1, 30 * MS])
        name = random.choice(names)
        if name not in served:
            account(now, TenantAdded(Tenant(name, 100 * MS)), [])
            served.add(name)
        elif random.random() < 0.2 and len(served) > 1:
            gone = [each for each, one in inside.items() if one.tenant == name]
            responds: list[Action] = [Respond(each, Outcome.FAILED, "", LossCause.GONE) for each in gone]
            account(now, TenantRemoved(name, ""), responds)
            served.remove(name)
            lost += len(gone)
            inside = {each: one for each, one in inside.items() if each not in gone}
        elif random.random() < 0.5:
            come = Query(number, name, now, now + 100 * MS)
            inside[number] = come
            account(now, QueryArrived(come), [])
        elif inside:
            ends = inside.pop(random.choice([*inside, max(inside), max(inside)]))
            outcome = random.choice([Outcome.REJECTED, Outcome.DROPPED, Outcome.LATE, Outcome.ANSWERED])
            cause = LossCause.SLO if outcome is Outcome.REJECTED else UNSET
            account(now, TimerFired(), [Respond(ends.id, outcome, "", cause)])
            lost += outcome is not Outcome.ANSWERED
    assert len(losses) == sum(sum(each.values()) for each in account.lost.values()) == lost > 50


def test_a_tenant_that_comes_back_begins_with_no_slow_launches_of_before() -> None:
    account, losses = account_of(TENANT)
    account(0, TenantRemoved("a", ""), [])
    account(0, TenantAdded(TENANT), [])
    account(0, QueryArrived(query(0)), [])
    account(0, TimerFired(), [Respond(0, Outcome.REJECTED, "", LossCause.SLO)])
    assert [loss.cause for loss in losses] == [LossCause.SLOW]
