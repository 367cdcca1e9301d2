"""The simulation of plans against that of the core under the duty-cycle policy: the same query by query."""

from __future__ import annotations

import pytest

from cotenant.core.snapshot import DropRule
from cotenant.plan.arrivals import poisson_arrivals
from cotenant.plan.simulate import simulate_plan
from cotenant.plan.tables import TableCosts
from cotenant.plan.types import DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from cotenant.policies.duty_cycle import DutyCycle
from cotenant.policies.lane_rounds import LaneRound, LaneSlot
from cotenant.predict.table import LatencyRow, LatencyTable, TablePredictor
from cotenant.types import Outcome, Query, Tenant
from scenario import MS, TWO_LANES, play

MODELS = {"a": (4, 2), "b": (1, 5), "c": (6, 1), "d": (2, 2)}
"""Fixed ms and ms a row."""
SLOS = {"a": 60, "b": 90, "c": 50, "d": 45}
CPU = DeviceType("cpu", ((2,), (1, 1)), 1 << 30)
MOST = 8
S = 1_000_000_000


@pytest.mark.parametrize(
    ("times", "seed", "is_dropping"),
    [
        *((0.5, 1, True), (1.0, 2, True), (1.4, 3, True)),
        *((0.5, 1, False), (1.0, 2, False), (1.4, 3, False), (2.5, 4, False)),
    ],
)
def test_the_core_does_the_same(times: float, seed: int, is_dropping: bool) -> None:
    # each tenant in one lane: between lanes the policy chooses by shares, the simulation by who is free first
    rounds = ((("a", 4), ("b", 2)), (("c", 8), ("d", 2)))
    rates = {"a": 60.0, "b": 45.0, "c": 220.0, "d": 110.0}
    loads = [Load(name, name, rate * times, SLOS[name] * MS) for name, rate in rates.items()]
    arrivals = poisson_arrivals({load.tenant: load.rate_per_s for load in loads}, 5 * S, seed)
    plan = Plan(
        (
            DevicePlan(
                "cpu",
                tuple(
                    PartitionPlan(1, 50 * MS, tuple(Slot(name, batch, rates[name]) for name, batch in slots))
                    for slots in rounds
                ),
            ),
        )
    )
    table = {
        name: {1: {rows: (fixed + row * rows) * MS for rows in range(1, MOST + 1)}}
        for name, (fixed, row) in MODELS.items()
    }
    costs = TableCosts({"cpu": table}, dict.fromkeys(MODELS, 1))
    found = simulate_plan(plan, loads, [CPU], costs, arrivals=arrivals, is_dropping=is_dropping)

    queries = [
        Query(0, name, at, at + SLOS[name] * MS) for name, moments in arrivals.items() for at in moments.tolist()
    ]
    queries.sort(key=lambda query: query.arrival_ns)
    queries = [Query(number, each.tenant, each.arrival_ns, each.deadline_ns) for number, each in enumerate(queries)]
    predictor = TablePredictor(
        {
            name: LatencyTable(
                tuple(LatencyRow(0, rows, cores, (fixed + row * rows) * MS) for rows in (1, MOST) for cores in (1, 2))
            )
            for name, (fixed, row) in MODELS.items()
        }
    )
    policy = DutyCycle(
        TWO_LANES,
        DropRule.HOPELESS if is_dropping else DropRule.NONE,
        rounds=tuple(
            LaneRound(50 * MS, tuple(LaneSlot(name, batch, rates[name]) for name, batch in slots)) for slots in rounds
        ),
        lend=False,
    )
    made = play(
        policy,
        [Tenant(name, SLOS[name] * MS, max_batch=MOST, max_queue=1 << 20) for name in MODELS],
        predictor,
        queries,
    )
    missed = 0
    for name in MODELS:
        expected = [
            -1 if made.outcomes[query.id] is Outcome.DROPPED else made.ended_ns[query.id] - query.arrival_ns
            for query in queries
            if query.tenant == name
        ]
        got = found.answers[name].latency_ns.tolist()
        assert got == expected
        missed += sum(ns < 0 or ns > SLOS[name] * MS for ns in got)
    assert (missed > 0) == (times >= 1.0)
