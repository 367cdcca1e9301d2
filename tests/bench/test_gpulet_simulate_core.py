"""The quick simulation of plans against the core under the duty-cycle policy: the same query by query."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.papers.gpulet._arrivals import poisson_arrivals
from bench.papers.gpulet._simulate import noise_factors, simulate_plan
from cotenant.core.snapshot import DropRule
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Infeasible, Load, PartitionPlan, Plan
from cotenant.techniques.partitions.policy.duty_cycle import DutyCycle
from cotenant.techniques.partitions.world import simulate_plan as simulate_by_core
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Round, Slot, Work
from cotenant.workload import Poisson, TenantLoad, Workload, arrivals
from cotenant.world.simulated import TableWorld
from plan_samples import GPU, MS, costs, load, some_loads, table_costs
from scenario import ONE_LANE, TWO_LANES, play

MODELS = {"a": (4, 2), "b": (1, 5), "c": (6, 1), "d": (2, 2)}
"""Fixed ms and ms a row."""
SLOS = {"a": 60, "b": 90, "c": 50, "d": 45}
RATES = {"a": 60.0, "b": 45.0, "c": 220.0, "d": 110.0}
CPU = DeviceType("cpu", ((2,), (1, 1)), 1 << 30)
MOST = 8
S = 1_000_000_000

Lane = tuple[tuple[str, int], ...]
"""Slots: tenant and batch."""


class Noisy(TableWorld):
    """A table with noise from the stream of the quick simulation, one draw a launch."""

    def __init__(self, table: TablePredictor, noise: Iterator[float]) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self._exact = table
        self._stream = noise

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        return max(1, round(self._exact.latency_ns(work, size) * next(self._stream)))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Lane, ...]:
    """One lane or two that share no tenant, or twins that serve the same one: between lanes that differ the policy
    chooses by shares, the quick simulation by who is free first."""
    kind = draw(st.sampled_from(("one", "two", "twins")))
    names = draw(st.permutations(list(MODELS)))
    batches = draw(st.lists(st.integers(1, MOST), min_size=4, max_size=4))
    slots = tuple(zip(names, batches, strict=True))
    if kind == "one":
        return (slots[: draw(st.integers(1, 4))],)
    if kind == "twins":
        return (slots[:1], slots[:1])
    cut = draw(st.integers(1, 3))
    return slots[:cut], slots[cut:]


@given(
    rounds=rounds(),
    times=st.floats(0.3, 2.5),
    seed=st.integers(0, 10_000),
    is_dropping=st.booleans(),
    noise=st.sampled_from((0.0, 0.05, 0.3)),
    backfill=st.booleans(),
)
@example(((("a", 4), ("b", 2)), (("c", 8), ("d", 2))), 1.4, 3, True, 0.0, False)
@example(((("a", 4), ("b", 2)), (("c", 8), ("d", 2))), 2.5, 4, False, 0.0, False)
@example(((("c", 4),), (("c", 4),)), 1.0, 1, True, 0.3, False)
@example(((("a", 3), ("b", 4), ("c", 8)),), 0.9, 1, True, 0.05, True)
@settings(max_examples=40, deadline=None)
def test_the_core_does_the_same(
    rounds: tuple[Lane, ...], times: float, seed: int, is_dropping: bool, noise: float, backfill: bool
) -> None:
    backfill = (
        backfill and len(rounds) == 1
    )  # the quick simulation knows no guests: lent is where no lane has strangers
    names = list(dict.fromkeys(name for slots in rounds for name, _ in slots))
    loads = [Load(name, name, RATES[name] * times, SLOS[name] * MS) for name in names]
    arrived = poisson_arrivals({each.tenant: each.rate_per_s for each in loads}, 3 * S, seed)
    partitions = tuple(
        PartitionPlan(1, 50 * MS, tuple(Slot(name, batch, RATES[name]) for name, batch in slots)) for slots in rounds
    )
    table = {
        name: {size: {rows: (fixed + row * rows) * MS for rows in range(1, MOST + 1)} for size in (1, 2)}
        for name, (fixed, row) in MODELS.items()
    }
    found = simulate_plan(
        Plan((DevicePlan("cpu", partitions),)),
        loads,
        [CPU],
        table_costs({"cpu": table}, dict.fromkeys(MODELS, 1)),
        arrivals=arrived,
        is_dropping=is_dropping,
        noise=noise,
        seed=seed,
    )

    queries = [Query(0, name, at, at + SLOS[name] * MS) for name, each in arrived.items() for at in each.tolist()]
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
        TWO_LANES if len(rounds) == 2 else ONE_LANE,
        DropRule.HOPELESS if is_dropping else DropRule.NONE,
        rounds=tuple(
            Round(50 * MS, tuple(Slot(name, batch, RATES[name]) for name, batch in slots)) for slots in rounds
        ),
        backfill=backfill,
    )
    tenants = [Tenant(name, SLOS[name] * MS, max_batch=MOST, max_queue=1 << 20) for name in names]
    made = play(policy, tenants, predictor, queries, Noisy(predictor, noise_factors(noise, seed)))
    for name in names:
        expected = [
            -1 if made.outcomes[query.id] is Outcome.DROPPED else made.ended_ns[query.id] - query.arrival_ns
            for query in queries
            if query.tenant == name
        ]
        assert found.answers[name].latency_ns.tolist() == expected


@given(loads=some_loads(5, 250.0), seed=st.integers(0, 1000))
@example(loads=[load("small", 700, 30, "s"), load("middle", 150, 60, "m"), load("heavy", 40, 250, "h")], seed=1)
@settings(max_examples=25, deadline=None)
def test_the_core_under_a_plan_ends_every_query_alike(loads: list[Load], seed: int) -> None:
    """As `cotenant plan` runs it: several devices, interference between their partitions, queries dealt in turn."""
    plan = Elastic(with_interference=True).plan(loads, [GPU] * 4, costs())
    if isinstance(plan, Infeasible):
        return
    for device in plan.devices:
        names = [slot.tenant for partition in device.partitions for slot in partition.slots]
        if len(set(names)) < len(names):  # between lanes that differ the two choose differently
            return
    workload = Workload(tuple(TenantLoad(each.tenant, each.model, Poisson(each.rate_per_s)) for each in loads), 2 * S)
    times: dict[str, list[int]] = {each.tenant: [] for each in loads}
    for time_ns, position, _ in arrivals(workload, seed):
        times[loads[position].tenant].append(time_ns)
    arrived = {name: np.array(each, np.int64) for name, each in times.items()}
    quick = simulate_plan(plan, loads, [GPU] * 4, costs(), arrivals=arrived)
    slow = simulate_by_core(plan, loads, costs(), duration_s=2.0, seed=seed)
    for each in loads:
        mine, core = quick.outcome(each.tenant), slow.tenant(each.tenant)
        assert (core.answered, core.late, core.offered) == (mine.in_slo, mine.late, mine.offered)
