"""The simulator's driver and worlds: order at one instant, charged decisions, noise, determinism."""

from __future__ import annotations

import io
import math
import statistics
from random import Random

import pytest

from cotenant import trace
from cotenant.core.actions import Launch
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.errors import ProtocolViolationError
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Work
from cotenant.world.simulated import TableWorld, WorldEvent
from scenario import CORES, MS, ONE_LANE, play, tables
from strict_engine import StrictEngine as Engine

A = Tenant("a", 20 * MS)
PREDICTOR = tables({"a": 10 * MS})


def test_at_one_instant_ends_come_before_the_timer_and_the_timer_before_arrivals() -> None:
    queries = [Query(0, "a", 0, 20 * MS), Query(1, "a", 0, 10 * MS), Query(2, "a", 10 * MS, 30 * MS)]
    made = play(Fcfs(ONE_LANE, DropRule.EXPIRED), [A], PREDICTOR, queries)
    kinds = [(at // MS, type(event).__name__) for at, event in made.events]
    assert kinds == [
        (0, "QueryArrived"),
        (0, "QueryArrived"),
        (10, "LaunchEnded"),
        (10, "TimerFired"),
        (10, "QueryArrived"),
        (20, "LaunchEnded"),
    ]
    assert made.outcomes == {0: Outcome.ANSWERED, 1: Outcome.DROPPED, 2: Outcome.ANSWERED}
    assert made.ended_ns == {0: 10 * MS, 1: 10 * MS, 2: 20 * MS}


def test_the_time_of_a_decision_is_charged_before_the_launch() -> None:
    queries = [Query(0, "a", 0, 20 * MS), Query(1, "a", 0, 21 * MS)]
    made = play(Edf(ONE_LANE), [A], PREDICTOR, queries, decision_ns=70_000)
    assert made.ended_ns == {0: 10 * MS + 70_000, 1: 20 * MS + 140_000}


def test_a_run_without_queries_ends_at_once() -> None:
    assert play(Edf(ONE_LANE), [A], PREDICTOR, []).end_ns == 0


def test_a_policy_that_leaves_work_undone_is_named() -> None:
    class Idle(Fcfs):
        name = "idle"

        def decide(self, snapshot: Snapshot, memory: object) -> Decision:
            return Decision()

    with pytest.raises(ProtocolViolationError, match="2 queries never ended: policy 'idle'"):
        play(Idle(ONE_LANE, DropRule.NONE), [A], PREDICTOR, [Query(n, "a", 0, 20 * MS) for n in range(2)])


def launches(count: int) -> list[Launch]:
    return [Launch(n, n, (n,), Work("a", 0, 1, 0, 1), True, ONE_LANE[0], 0) for n in range(count)]


def test_a_world_without_noise_does_what_its_table_says() -> None:
    world = TableWorld(PREDICTOR)
    assert world.next_ns() is None
    for launch in launches(3):
        world.start(launch, 100 * (3 - launch.id))
    assert [world.next_ns(), world.pop(), world.pop(), world.pop(), world.next_ns()] == [
        100 + 10 * MS,
        WorldEvent(2),
        WorldEvent(1),
        WorldEvent(0),
        None,
    ]


def test_noise_is_log_normal_and_of_the_size_that_was_asked() -> None:
    world = TableWorld(PREDICTOR, noise=0.2, seed=3)
    factors = []
    for launch in launches(4000):
        world.start(launch, 0)
        end = world.next_ns()
        assert end is not None
        factors.append(math.log(end / (10 * MS)))
        world.pop()
    assert statistics.fmean(factors) == pytest.approx(0, abs=4 * 0.2 / math.sqrt(4000))
    assert statistics.stdev(factors) == pytest.approx(0.2, rel=4 / math.sqrt(2 * 4000))


def test_faults_come_at_the_rate_that_was_asked() -> None:
    world = TableWorld(PREDICTOR, failure_rate=0.25, seed=4)
    for launch in launches(4000):
        world.start(launch, 0)
    faults = sum(world.pop()[1] == "injected fault" for _ in range(4000))
    assert faults == pytest.approx(1000, abs=4 * math.sqrt(4000 * 0.25 * 0.75))


def recorded(seed: int) -> bytes:
    rng = Random(1)
    file = io.BytesIO()
    policy = Edf(ONE_LANE)
    tenants = [Tenant("a", 25 * MS, max_batch=3), Tenant("b", 90 * MS, cuts=(0, 1, 2))]
    predictor = tables({"a": 5 * MS, "b": 20 * MS}, batch_slope=0.5)
    predictor = type(predictor)({"a": predictor.tables["a"], "b": tables({"b": 20 * MS}, 2).tables["b"]})
    log = trace.TraceWriter(file, trace.header(policy, predictor, tenants, Machine.cpu(CORES), created=""))
    queries, now = [], 0
    for number in range(300):
        now += rng.randint(0, 16 * MS)
        owner = rng.choice(tenants)
        queries.append(Query(number, owner.name, now, now + owner.slo_ns))
    world = TableWorld(predictor, noise=0.3, failure_rate=0.05, seed=seed)
    simulate(
        Engine(tenants, policy, predictor, Machine.cpu(CORES)), world, queries, lambda respond, now_ns: None, log=log
    )
    log.flush()
    return file.getvalue()


def test_the_same_seed_gives_the_same_trace_byte_for_byte() -> None:
    assert recorded(5) == recorded(5)
    assert recorded(5) != recorded(6)
