"""One workload through the simulator and through the driver of the server in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np

from cotenant import trace
from cotenant.core.actions import Action, Respond
from cotenant.core.events import Event
from cotenant.core.snapshot import Policy
from cotenant.execute.protocol import Tensors
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.serve.engine.clock import VirtualClock
from cotenant.serve.engine.driver import Driver
from cotenant.sim.driver import simulate
from cotenant.types import Query, Tenant, priority_rank
from cotenant.work import Machine
from cotenant.world.simulated import SimulatedExecutor, TableWorld
from scenario import CORES, MS
from strict_engine import StrictEngine as Engine

TENANTS = (
    Tenant("wide", 200 * MS, cuts=(0, 2, 5, 8), weight=3.0),
    Tenant("batchy", 80 * MS, cuts=(0, 1, 3), max_batch=6, max_queue=5),
    Tenant("urgent", 15 * MS, priority=2),
)
TABLES = {
    "wide": LatencyTable((LatencyRow(0, 1, 1, 45 * MS), LatencyRow(0, 1, 2, 30 * MS)), (1.0,) * 8, 1.05),
    "batchy": LatencyTable((LatencyRow(0, 1, 1, 7 * MS), LatencyRow(0, 6, 1, 18 * MS)), (2.0, 1.0, 1.0), 1.1),
    "urgent": LatencyTable((LatencyRow(0, 1, 1, 2 * MS),)),
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


def simulated(policy: Policy, queries: Sequence[Query], **world: Any) -> tuple[Lines, Told]:
    lines: Lines = []
    told: Told = []

    def log(now: int, event: Event, actions: list[Action]) -> None:
        lines.append(trace.encode(now, event, actions))

    engine = Engine(TENANTS, policy, TablePredictor(TABLES), Machine.cpu(CORES))
    simulate(
        engine,
        TableWorld(TablePredictor(TABLES), **world),
        queries,
        lambda respond, now: told.append((respond.query, respond, now)),
        log=log,
    )
    return lines, told


def served(policy: Policy, queries: Sequence[Query], **world: Any) -> tuple[Lines, Told]:
    lines: Lines = []
    told: Told = []
    clock = VirtualClock()

    def log(now: int, event: Event, actions: list[Action], _: object) -> None:
        lines.append(trace.encode(now, event, actions))

    engine = Engine(TENANTS, policy, TablePredictor(TABLES), Machine.cpu(CORES))
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
