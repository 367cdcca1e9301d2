"""What decisions cost as tenants, queues and victims grow, counted in steps and not in time; and that they are bounded.

A step is a call of a function, of Python or of C, or an element of a column that numpy makes or reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from cotenant.core.actions import Action, Launch, Respond, SetTimer
from cotenant.core.engine import Engine
from cotenant.core.events import Event, LaunchEnded, PredictorChanged, QueryArrived, TimerFired
from cotenant.core.fair_queues import FairQueues
from cotenant.core.queues import TenantQueue
from cotenant.core.snapshot import Decision, DropRule, Policy, Snapshot
from cotenant.policies import policy_class, policy_names
from cotenant.policies.decision_context import MOST_AT_ONCE
from cotenant.policies.shedding import many_jobs
from cotenant.predict.table import TablePredictor
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from installed import known
from looked import Looked
from scenario import MS, TWO_LANES, play, tables

EIGHT = tuple(Share((core,)) for core in range(8))
SELECTING = ("most", "weighted", "fair", "shares")
GROWTH = 2.7
"""Of twice as much, at most: n log n grows by less, a square by 4."""


class Steps:
    """Counts steps while it is open."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Steps:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: object, kind: str, what: object) -> None:
        if kind in ("call", "c_call"):
            self.count += 1


class Column(np.ndarray):  # type: ignore[type-arg]
    """An array that counts what it is read for, and gives such arrays."""

    elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out"):
            options["out"] = tuple(plain(each) for each in options["out"])
        made = getattr(ufunc, method)(*[plain(each) for each in inputs], **options)
        Column.elements += max(np.size(each) for each in inputs)
        return counted(made)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Column.elements += np.size(found)
        return found


def plain(what: Any) -> Any:
    return what.view(np.ndarray) if isinstance(what, Column) else what


def counted(what: Any) -> Any:
    return what.view(Column) if isinstance(what, np.ndarray) else what


class CountingNumpy:
    """The module, with counting arrays."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if name not in ("array", "concatenate", "lexsort", "where", "ones", "zeros", "empty", "arange"):
            return found

        def call(*given: Any, **options: Any) -> Any:
            made = found(*given, **options)
            Column.elements += np.size(made)
            return counted(made)

        return call


def decided(policy: Policy, shown: Snapshot, memory: object, monkeypatch: pytest.MonkeyPatch) -> tuple[Decision, int]:
    """A decision, and the steps that it took."""
    monkeypatch.setattr(many_jobs, "np", CountingNumpy())
    Column.elements = 0
    with Steps() as steps:
        decision = policy.decide(shown, memory)
    monkeypatch.undo()
    return decision, steps.count + Column.elements


def burst(tenants: int, queries: int, room_ms: float) -> tuple[dict[str, TenantQueue], FairQueues, TablePredictor]:
    """Queries of 10 ms, of these tenants by turns, which all come at once and have about so much time."""
    every = [Tenant(f"t{at}", round(room_ms * MS) + at, max_queue=10**6) for at in range(tenants)]
    queues, accounts = {each.name: TenantQueue(each) for each in every}, FairQueues()
    random = Random(tenants)
    predictor = tables({each.name: round(random.uniform(9, 11) * MS) for each in every})
    accounts.set_quotas(every, len(EIGHT), lambda tenant: predictor.latency_ns(tenant.work(0, 1), 1), MS)
    for number in range(queries):
        tenant = every[number % tenants]
        query = Query(number, tenant.name, MS, MS + round(random.uniform(0.8, 1) * room_ms * MS))
        accounts.enter(query, predictor.latency_ns(tenant.work(0, 1), 1), MS)
        queues[tenant.name].push((query.rank, query.deadline_ns, number), query)
    return queues, accounts, predictor


def snapshot(queues: dict[str, TenantQueue], accounts: FairQueues, predictor: TablePredictor) -> Snapshot:
    return Snapshot(MS, queues, [], {}, 0xFF, predictor, fair_queues=accounts.known)


def assert_grows_slowly(found: Sequence[int]) -> None:
    for less, more in pairwise(found):
        assert more < GROWTH * less, found


@pytest.mark.parametrize("name", SELECTING)
def test_steps_grow_with_tenants_no_faster_than_n_log_n(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of three queries of each have to go, and of the others some have to wait for what is to come. The first
    decision makes what holds for a second; the second one comes with that."""
    first, second = list[int](), list[int]()
    for tenants in (100, 200, 400, 800):
        shown = snapshot(*burst(tenants, 3 * tenants, 3 * tenants * 10 / 8 * 0.99))
        decision, steps = decided(policy_class(name)(EIGHT), shown, None, monkeypatch)
        assert decision.drops
        first.append(steps)
        second.append(decided(policy_class(name)(EIGHT), shown, decision.memory, monkeypatch)[1])
    assert_grows_slowly(first)
    assert_grows_slowly(second)


@pytest.mark.parametrize("name", SELECTING)
def test_steps_grow_with_victims_no_faster_than_n_log_n(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[int]()
    for queries in (150, 300, 600):
        shown = snapshot(*burst(20, queries, queries * 10 / 8 * 0.55))
        decision, steps = decided(policy_class(name)(EIGHT), shown, None, monkeypatch)
        assert 0.3 * queries < len(decision.drops) <= MOST_AT_ONCE
        found.append(steps)
    assert_grows_slowly(found)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("waiting", [1000, 10_000])
def test_who_comes_to_a_long_queue_or_leaves_it_is_all_that_is_looked_at(name: str, waiting: int) -> None:
    queues, accounts, predictor = burst(1, waiting, 10**9)
    [queue], policy = queues.values(), policy_class(name)(EIGHT)
    queue.queries = Looked(queue.queries)
    shown = snapshot(queues, accounts, predictor)
    memory = policy.decide(shown, None).memory
    random = Random(1)
    for number in range(waiting, waiting + 20):
        query = Query(number, "t0", MS, MS + random.randrange(10**15))
        queue.push((query.rank, query.deadline_ns, number), query)
        at = random.choice([0, random.randrange(len(queue.keys))])
        queue.remove(queue.keys[at], queue.queries[at])
        queue.queries.looks = 0
        memory = policy.decide(shown, memory).memory
        assert queue.queries.looks < 60


# --- bounded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known(*SELECTING, "edf", "sjf", "fcfs", "joint"))
@pytest.mark.parametrize("slower", [2.2, 1e6], ids=["half", "all"])
def test_many_go_in_several_decisions_and_no_lane_waits_for_that(name: str, slower: float) -> None:
    """The predictor says that everything takes longer: few of 3,000 queries can be in time now, or none but one."""
    count, names = 3000, [f"t{at}" for at in range(5)]
    room_ms = count * 10 / 8 * 1.1
    tenants = [Tenant(each, round(room_ms * MS), max_queue=count) for each in (*names, "late")]
    slow = tables({each: round(10 * MS * slower) for each in names} | {"late": 10 * MS})
    policy: Policy = policy_class(name)(EIGHT, DropRule.HOPELESS)
    engine = Engine(tenants, policy, tables(dict.fromkeys([*names, "late"], 10 * MS)), Machine.cpu(tuple(range(8))))
    most, timers, running, outcomes = 0, list[int](), list[Launch](), dict[int, Outcome]()

    def handle(event: Event, now_ns: int) -> None:
        nonlocal most
        actions: list[Action] = engine.handle(event, now_ns)
        gone = [each for each in actions if isinstance(each, Respond) and each.outcome is not Outcome.ANSWERED]
        most = max(most, len(gone))
        outcomes.update({each.query: each.outcome for each in actions if isinstance(each, Respond)})
        timers[:] = [each.at_ns for each in actions if isinstance(each, SetTimer)] or timers
        running.extend(each for each in actions if isinstance(each, Launch))

    for number in range(count):
        handle(QueryArrived(Query(number, names[number % 5], 0, round(room_ms * MS)), more=number < count - 1), 0)
    handle(QueryArrived(Query(count, "late", 0, round(room_ms * MS) + 1)), 0)
    handle(PredictorChanged(slow), 0)
    for launch in [*running]:
        running.remove(launch)
        handle(LaunchEnded(launch.id), 10 * MS)
    now = 10 * MS
    for _ in range(2 * count // MOST_AT_ONCE):
        if len(running) == len(EIGHT) or not engine.waiting("late"):
            break
        [now] = timers  # with no launch under way it is a timer that goes on
        assert now < 11 * MS
        handle(TimerFired(), now)
    assert most <= 2 * MOST_AT_ONCE + 1
    assert len(running) == len(EIGHT) or not engine.waiting("late")
    if slower > 10:
        assert sum(outcome is not Outcome.ANSWERED for outcome in outcomes.values()) >= count - len(EIGHT)


# --- cores of no lane ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy_names())
def test_cores_of_no_lane_change_no_decision(name: str) -> None:
    """A server's machine is all its cores, a simulator's its lanes: both have to decide the same."""
    latencies = {"short": 4 * MS, "long": 30 * MS, "other": 12 * MS}
    tenants = [Tenant("short", 40 * MS), Tenant("long", 200 * MS, cuts=(0, 1, 2, 3)), Tenant("other", 90 * MS)]
    predictor = TablePredictor({**tables(latencies).tables, "long": tables(latencies, units=3).tables["long"]})
    for seed in range(6):
        random, queries, now = Random(seed), list[Query](), 0
        for number in range(300):
            now += round(random.expovariate(1 / random.choice([2, 5, 9])) * MS)
            tenant = random.choice(tenants)
            queries.append(Query(number, tenant.name, now, now + tenant.slo_ns))
        logs = list[list[tuple[int, list[Action]]]]()
        for cores in ((0, 1), (0, 1, 2, 3)):
            logs.append([])
            play(
                policy_class(name)(TWO_LANES),
                tenants,
                predictor,
                queries,
                cores=cores,
                log=lambda now_ns, _, actions, log=logs[-1]: log.append((now_ns, actions)),  # type: ignore[misc]
            )
        assert logs[0] == logs[1]
