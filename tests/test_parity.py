"""One brain: the simulator and the server's driver write the same log, byte for byte, from the same workload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant import trace
from cotenant.core.actions import Action, Respond
from cotenant.core.engine import Engine
from cotenant.core.events import Event
from cotenant.core.snapshot import DropRule
from cotenant.execute.protocol import Tensors
from cotenant.execute.simulated import SimulatedExecutor, TableWorld
from cotenant.policies import POLICIES, AnyPolicy
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.serve.clock import VirtualClock
from cotenant.serve.driver import Driver
from cotenant.sim.driver import simulate
from cotenant.types import Partition, Query, Tenant, priority_rank
from scenario import CORES, MS, ONE_LANE, TWO_LANES, policy_of

TENANTS = (
    Tenant("wide", 200 * MS, cuts=(0, 2, 5, 8), weight=3.0),
    Tenant("batchy", 80 * MS, cuts=(0, 1, 3), max_batch=6, max_queue=5),
    Tenant("urgent", 15 * MS, priority=2),
)
TABLES = {
    "wide": LatencyTable((LatencyRow(0, 1, 1, 45 * MS), LatencyRow(0, 1, 2, 30 * MS)), (1.0,) * 8, 1.05),
    "batchy": LatencyTable((LatencyRow(0, 1, 2, 7 * MS), LatencyRow(0, 6, 2, 18 * MS)), (2.0, 1.0, 1.0), 1.1),
    "urgent": LatencyTable((LatencyRow(0, 1, 2, 2 * MS),)),
}
SHARES = {"wide": 0.25, "batchy": 0.5, "urgent": 0.25}
COUNT = 150


def workload(seed: int, gap_ns: float, grid_ns: int = 1) -> list[Query]:
    """Arrivals, some at one instant; a coarse grid makes ends of launches, time-outs and arrivals coincide."""
    rng = Random(seed)
    made: list[Query] = []
    now = 0
    for number in range(COUNT):
        now += round(rng.expovariate(1 / gap_ns)) // grid_ns * grid_ns if rng.random() < 0.85 else 0
        tenant = rng.choices(TENANTS, list(SHARES.values()))[0]
        timeout = rng.choice([None, None, None, 5 * MS, 30 * MS, 500 * MS])
        made.append(
            Query(
                number,
                tenant.name,
                now,
                now + min(tenant.slo_ns, timeout or tenant.slo_ns),
                priority_rank(rng.choice([0, 0, 1, 3]) or tenant.priority),
                items=rng.randint(1, 3) if tenant.max_batch > 1 else 1,
                merge_key=rng.randrange(2),
                expiry_ns=None if timeout is None else now + timeout,
            )
        )
    return made


Lines = list[bytes]
Told = list[tuple[int, Respond, int]]


def simulated(policy: AnyPolicy, queries: Sequence[Query], **world: Any) -> tuple[Lines, Told]:
    lines: Lines = []
    told: Told = []

    def log(now: int, event: Event, actions: list[Action]) -> None:
        lines.append(trace.encode(now, event, actions))

    engine = Engine(TENANTS, policy, TablePredictor(TABLES), CORES)
    simulate(
        engine,
        TableWorld(TablePredictor(TABLES), **world),
        queries,
        lambda respond, now: told.append((respond.query, respond, now)),
        log=log,
    )
    return lines, told


def served(policy: AnyPolicy, queries: Sequence[Query], **world: Any) -> tuple[Lines, Told]:
    lines: Lines = []
    told: Told = []
    clock = VirtualClock()

    def log(now: int, event: Event, actions: list[Action], _: object) -> None:
        lines.append(trace.encode(now, event, actions))

    engine = Engine(TENANTS, policy, TablePredictor(TABLES), CORES)
    driver = Driver(engine, SimulatedExecutor(TableWorld(TablePredictor(TABLES), **world), clock), clock, (log,))

    def make(query: Query, number: int, now: int) -> Query:
        assert (number, now) == (query.id, query.arrival_ns)  # the driver numbers and stamps as the workload does
        return query

    def arrive(query: Query) -> None:
        rows = {"x": np.full(query.items, query.id)}

        def done(respond: Respond, outputs: Tensors | None) -> None:
            told.append((respond.query, respond, clock.now_ns()))
            if outputs is not None:
                assert outputs["x"].tolist() == rows["x"].tolist(), "somebody else's rows"

        driver.submit(partial(make, query), rows, done)

    for query in queries:
        clock.call_at(query.arrival_ns, 2, partial(arrive, query))
    clock.run()
    assert driver.wait_idle(0)
    return lines, told


MODES = list(
    itertools.product(sorted(POLICIES), list(DropRule), [ONE_LANE, TWO_LANES], [(False, 0.1), (True, 0.0), (True, 0.2)])
)


@pytest.mark.parametrize(
    ("name", "drop", "lanes", "cut"),
    MODES,
    ids=[f"{name}-{drop}-{len(lanes)}-{'cut' if cut[0] else 'whole'}{cut[1]}" for name, drop, lanes, cut in MODES],
)
def test_simulator_and_server_write_the_same_log(
    name: str, drop: DropRule, lanes: tuple[Partition, ...], cut: tuple[bool, float]
) -> None:
    policy = policy_of(name, lanes, drop, *cut)
    for number, world in enumerate(({}, {"noise": 0.3, "seed": 5}, {"noise": 0.1, "failure_rate": 0.1, "seed": 6})):
        queries = workload(seed=number, gap_ns=(7 if len(lanes) == 2 else 10) * MS)
        lines, told = simulated(policy, queries, **world)
        other_lines, other_told = served(policy, queries, **world)
        assert other_lines == lines
        assert other_told == told
        assert sorted(number for number, _, _ in told) == list(range(COUNT))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    gap_ms=st.integers(1, 30),
    grid_ms=st.sampled_from([1, 2, 5]),
    policy=st.builds(
        policy_of,
        st.sampled_from(sorted(POLICIES)),
        st.sampled_from([ONE_LANE, TWO_LANES]),
        st.sampled_from(list(DropRule)),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 1.0]),
    ),
)
def test_coinciding_events_have_one_order(seed: int, gap_ms: int, grid_ms: int, policy: AnyPolicy) -> None:
    """Latencies, arrivals and time-outs on one coarse grid: nearly all events happen at the instant of another."""
    queries = workload(seed, gap_ms * MS, grid_ms * MS)
    assert served(policy, queries) == simulated(policy, queries)


def test_the_workload_shows_every_outcome_and_coinciding_events() -> None:
    """A parity of empty logs would prove nothing."""
    lines, told = simulated(POLICIES["edf"](ONE_LANE), workload(2, 7 * MS), failure_rate=0.1, seed=1)
    outcomes = {respond.outcome.value for _, respond, _ in told}
    assert {"answered", "rejected", "dropped", "failed"} <= outcomes
    lines, told = simulated(POLICIES["fcfs"](ONE_LANE, DropRule.NONE), workload(2, 8 * MS, 5 * MS))
    assert "late" in {respond.outcome.value for _, respond, _ in told}
    times = [line.split(b",", 1)[0] for line in lines]
    assert len(set(times)) < 0.9 * len(times)
