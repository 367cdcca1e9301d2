"""The simulation of plans: against queueing theory, and what holds for every plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.papers.gpulet._arrivals import curve_arrivals, poisson_arrivals
from bench.papers.gpulet._headroom import Trial, plan_simulated
from bench.papers.gpulet._nexus import SquishyBinPacking
from bench.papers.gpulet._sim_world import turns
from bench.papers.gpulet._simulate import PlanChange, simulate_plan
from cotenant.errors import InvalidValueError, PlanError
from cotenant.techniques.partitions.plan.application import Application, Stage, stage_loads
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.poisson_headroom import poisson_rate, with_poisson_headroom
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    CoRunner,
    Costs,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Planner,
    padded,
)
from cotenant.work import Slot, Work
from plan_samples import GIB, GPU, MS, costs, load, some_loads, table_costs

COSTS = costs()
ALONE = WithoutInterference(COSTS)
ONE = DeviceType("one", ((2,), (1, 1)), GIB)


class Flat(Costs):
    """Every batch of every model takes as long; beside others twice as long."""

    def __init__(self, ns: Mapping[str, int], slowdown: float = 1.0) -> None:
        self._ns = ns
        self._slowdown = slowdown

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        return self._ns[work.tenant]

    def batches(self, model: str) -> tuple[int, ...]:
        return (1, 2, 4, 8)

    def memory_bytes(self, model: str) -> int:
        return 1

    def factor(self, model: str, batch: int, size: int, others: object, device: str) -> float:
        return self._slowdown if others else 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        return 0.0


def plan_of(*devices: tuple[tuple[Slot, ...], ...], size: int = 1, duty_ms: float = 10.0) -> Plan:
    return Plan(
        tuple(
            DevicePlan(ONE.name, tuple(PartitionPlan(size, int(duty_ms * MS), slots) for slots in device))
            for device in devices
        )
    )


def even(rate: float, count: int, start_ns: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return start_ns + (np.arange(count) * NS_PER_S / rate).astype(np.int64)


@pytest.mark.parametrize("load_share", [0.3, 0.6, 0.8])
def test_one_row_at_a_time_is_a_queue_with_fixed_service(load_share: float) -> None:
    """M/D/1: mean wait rho * D / (2 * (1 - rho)), nobody there with probability 1 - rho (Pollaczek and Khinchine)."""
    service = 10 * MS
    rate = load_share * NS_PER_S / service
    loads = [Load("a", "m", rate, NS_PER_S)]
    plan = plan_of(((Slot("a", 1, rate),),))
    found = simulate_plan(
        plan, loads, [ONE], Flat({"m": service}), duration_ns=int(200_000 / rate * 1e9), seed=5, is_dropping=False
    )
    waits = found.answers["a"].latency_ns - service
    assert waits.min() >= 0
    assert waits.mean() == pytest.approx(load_share * service / (2 * (1 - load_share)), rel=0.05)
    assert np.mean(waits == 0) == pytest.approx(1 - load_share, abs=0.01)
    (use,) = found.partitions
    assert use.busy_ns == len(waits) * service
    assert (use.turns, use.rows, use.end_ns) == (len(waits), len(waits), 0)


def test_a_batch_is_what_waits_and_no_more_than_planned() -> None:
    arrivals = {"a": np.array([0, 1, 2, 3, 4, 5], np.int64)}
    found = simulate_plan(
        plan_of(((Slot("a", 4, 1.0),),)), [Load("a", "m", 1.0, 100)], [ONE], Flat({"m": 10}), arrivals=arrivals
    )
    # the first goes alone, then four, then the one that is left
    assert found.answers["a"].latency_ns.tolist() == [10, 19, 18, 17, 16, 25]
    assert found.partitions[0].turns == 3


def test_slots_take_turns() -> None:
    arrivals = {"a": np.array([0, 1, 1, 1, 1], np.int64), "b": np.array([2, 2], np.int64)}
    loads = [Load("a", "m", 1.0, 100), Load("b", "m", 1.0, 100)]
    plan = plan_of(((Slot("a", 2, 1.0), Slot("b", 2, 1.0)),))
    found = simulate_plan(plan, loads, [ONE], Flat({"m": 10}), arrivals=arrivals)
    assert found.answers["b"].latency_ns.tolist() == [18, 18]
    assert found.answers["a"].latency_ns.tolist() == [10, 29, 29, 39, 39]


def test_what_runs_beside_a_launch_slows_it() -> None:
    loads = [Load("a", "m", 1.0, 100), Load("b", "m", 1.0, 100)]
    plan = plan_of(((Slot("a", 1, 1.0),), (Slot("b", 1, 1.0),)))
    arrivals = {"a": np.array([0, 100], np.int64), "b": np.array([5], np.int64)}
    flat = Flat({"m": 10})
    alone = simulate_plan(plan, loads, [ONE], flat, arrivals=arrivals)
    beside = simulate_plan(plan, loads, [ONE], flat, actual=Flat({"m": 10}, 2.0), arrivals=arrivals)
    assert [alone.answers[name].latency_ns.tolist() for name in ("a", "b")] == [[10, 10], [10]]
    assert [beside.answers[name].latency_ns.tolist() for name in ("a", "b")] == [[10, 10], [20]]


def test_hopeless_rows_make_way() -> None:
    rate = 300.0
    loads = [Load("a", "m", rate, 25 * MS)]
    plan = plan_of(((Slot("a", 2, rate),),))
    flat = Flat({"m": 10 * MS})
    kept = simulate_plan(plan, loads, [ONE], flat, seed=2, is_dropping=False).outcome("a")
    dropped = simulate_plan(plan, loads, [ONE], flat, seed=2).outcome("a")
    assert kept.dropped == dropped.late == 0
    assert kept.violation_share > 0.9  # half as much again as it can serve
    assert dropped.in_slo / dropped.offered > 0.9 * 200 / rate
    assert dropped.offered == dropped.in_slo + dropped.dropped == kept.in_slo + kept.late


def test_a_batch_is_made_smaller_for_its_first_row() -> None:
    table = table_costs({"one": {"m": {1: {1: 10, 4: 40}}}}, {"m": 1})
    arrivals = {"a": np.array([0, 1, 9, 9], np.int64)}
    found = simulate_plan(plan_of(((Slot("a", 4, 1.0),),)), [Load("a", "m", 1.0, 31)], [ONE], table, arrivals=arrivals)
    # three wait at 10, but all of them together would be too late for the one that came at 1
    assert found.answers["a"].latency_ns.tolist() == [10, 29, 21, 31]


@pytest.mark.parametrize("planner", [SquishyBinPacking(), Elastic(), Elastic(with_interference=True)])
@given(loads=some_loads(4, 250.0))
@example(loads=[Load("t0", "deep", 151.25, 30 * MS)])  # in two slots, of which one is as full as it may be
@settings(max_examples=25, deadline=None)
def test_a_plan_serves_even_arrivals_in_time(planner: Planner, loads: list[Load]) -> None:
    """What comes evenly is within the SLO, as the planner promises; a little headroom for where rows share turns.

    Dealt to several slots, rows come to each of them up to one gap of the stream earlier than evenly, and that can be
    late.
    """
    believed = COSTS if isinstance(planner, Elastic) and planner.with_interference else ALONE
    plan = planner.plan(padded(loads, 0.15), [GPU] * 4, COSTS)
    if isinstance(plan, Infeasible):
        return
    arrivals = {
        each.tenant: even(each.rate_per_s, int(3 * each.rate_per_s) + 2, 7919 * n) for n, each in enumerate(loads)
    }
    found = simulate_plan(plan, loads, [GPU] * 4, believed, arrivals=arrivals, is_dropping=False)
    slots = [slot.tenant for device in plan.devices for part in device.partitions for slot in part.slots]
    late = 0
    for each in loads:
        gap_ns = NS_PER_S / each.rate_per_s if slots.count(each.tenant) > 1 else 0
        late += int(np.sum(found.answers[each.tenant].latency_ns > each.slo_ns + gap_ns))
    assert late <= 0.01 * sum(map(len, arrivals.values()))


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), st.integers(0, 300))
def test_turns_are_in_proportion_all_the_time(weights: list[float], count: int) -> None:
    who = turns(weights, count)
    assert len(who) == count
    for number, weight in enumerate(weights):
        got = np.cumsum(who == number)
        due = np.arange(1, count + 1) * weight / sum(weights)
        assert np.all(np.abs(got - due) < len(weights))


def test_the_same_seed_gives_the_same_answers() -> None:
    loads = [load("small", 300, 30), load("middle", 80, 60)]
    plan = Elastic(with_interference=True).plan(loads, [GPU] * 2, COSTS)
    assert isinstance(plan, Plan)

    def latencies(seed: int, noise: float = 0.1) -> list[int]:
        found = simulate_plan(plan, loads, [GPU] * 2, COSTS, seed=seed, duration_ns=2 * NS_PER_S, noise=noise)
        return [ns for each in loads for ns in found.answers[each.tenant].latency_ns.tolist()]

    assert latencies(1) == latencies(1)
    assert latencies(1) != latencies(2)
    assert latencies(1) != latencies(1, 0.0)


class TestApplications:
    """Queries of several models."""

    FLAT = Flat({"quick": 10, "slow": 30})

    def run(self, stages: tuple[Stage, ...], slo_ns: int, arrivals: list[int], batch: int = 1) -> list[int]:
        app = Application("app", slo_ns, 1.0, stages)
        loads = stage_loads(app, [ONE], self.FLAT)
        plan = plan_of(*((((Slot(each.tenant, batch, 1.0),),)) for each in loads))
        times = {"app": np.array(arrivals, np.int64)}
        found = simulate_plan(plan, loads, [ONE] * 9, self.FLAT, arrivals=times, applications=[app])
        assert [outcome.name for outcome in found.outcomes] == ["app"]
        return found.answers["app"].latency_ns.tolist()

    def test_one_after_the_other(self) -> None:
        assert self.run((Stage("a", "quick"), Stage("b", "slow", ("a",))), 100, [0, 500]) == [40, 40]

    def test_side_by_side(self) -> None:
        assert self.run((Stage("a", "quick"), Stage("b", "slow")), 100, [0, 500]) == [30, 30]

    def test_a_stage_waits_for_all_that_it_needs(self) -> None:
        stages = (Stage("a", "quick"), Stage("b", "slow"), Stage("c", "quick", ("a", "b")))
        assert self.run(stages, 100, [0, 500]) == [40, 40]

    def test_a_query_counts_once_and_against_the_whole_slo(self) -> None:
        stages = (Stage("a", "quick"), Stage("b", "slow", ("a",)))
        assert self.run(stages, 60, [0, 5, 10, 15]) == [40, -1, 60, -1]

    def test_many_queries_end_once_each(self) -> None:
        app = Application("app", 200 * MS, 50.0, (Stage("a", "small"), Stage("b", "middle", ("a",))))
        loads = stage_loads(app, [GPU], COSTS)
        plan = Elastic(headroom=0.5).plan(loads, [GPU] * 2, COSTS)
        assert isinstance(plan, Plan)
        found = simulate_plan(plan, loads, [GPU] * 2, ALONE, applications=[app], seed=3)
        outcome = found.outcome("app")
        assert outcome.offered == len(found.answers["app"].arrival_ns) > 2000
        assert outcome.violation_share < 0.01
        assert 0 < outcome.p50_ns < outcome.p99_ns <= app.slo_ns


def test_a_change_of_plan_loses_nobody() -> None:
    flat = Flat({"m": 10 * MS})
    loads = [Load("a", "m", 100.0, 50 * MS)]
    small = plan_of(((Slot("a", 1, 100.0),),))
    large = plan_of(((Slot("a", 8, 100.0),), (Slot("a", 8, 100.0),)), ((Slot("a", 8, 50.0),),))
    curve = ((0, 50.0), (4 * NS_PER_S, 700.0))
    arrivals = curve_arrivals({"a": curve}, 8 * NS_PER_S, 1)

    def run(*changes: PlanChange) -> tuple[float, int]:
        found = simulate_plan(small, loads, [ONE] * 2, flat, arrivals=arrivals, changes=changes, is_dropping=False)
        assert found.outcome("a").dropped == 0
        assert sum(use.rows for use in found.partitions) == len(arrivals["a"])
        return found.violation_share, len(found.partitions)

    stayed, parts = run()
    assert (stayed > 0.8, parts) == (True, 1)
    changed, parts = run(PlanChange(4 * NS_PER_S, large))
    assert (changed < 0.02, parts) == (True, 4)
    back, parts = run(PlanChange(4 * NS_PER_S, large), PlanChange(6 * NS_PER_S, small))
    assert changed < back < stayed
    assert parts == 5


def test_the_launch_under_way_ends_before_a_device_changes() -> None:
    loads = [Load("a", "m", 1.0, 1000)]
    first, second = plan_of(((Slot("a", 1, 1.0),),)), plan_of(((Slot("a", 8, 1.0),),))
    arrivals = {"a": np.array([0, 1, 2, 30], np.int64)}
    found = simulate_plan(first, loads, [ONE], Flat({"m": 10}), arrivals=arrivals, changes=[PlanChange(5, second)])
    assert found.answers["a"].latency_ns.tolist() == [10, 19, 18, 10]


def test_chunks_do_not_show() -> None:
    """Arrivals are handed out in pieces; a lone tenant on one device sees nothing of it."""
    loads = [Load("a", "m", 90.0, NS_PER_S)]
    plan = plan_of(((Slot("a", 1, 90.0),),))
    arrivals = poisson_arrivals({"a": 90.0}, 95 * NS_PER_S, 3)
    found = simulate_plan(plan, loads, [ONE], Flat({"m": 10 * MS}), arrivals=arrivals, is_dropping=False)
    free = 0
    expected = []
    for at in arrivals["a"].tolist():
        free = max(free, at) + 10 * MS
        expected.append(free - at)
    assert found.answers["a"].latency_ns.tolist() == expected


def test_arrivals_follow_their_curve() -> None:
    curve = ((0, 100.0), (10 * NS_PER_S, 0.0), (20 * NS_PER_S, 1000.0))
    times = curve_arrivals({"a": curve, "b": ((0, 50.0),)}, 30 * NS_PER_S, 7)
    counts = [int(np.sum((times["a"] >= low) & (times["a"] < low + 10 * NS_PER_S))) for low, _ in curve]
    assert counts[0] == pytest.approx(1000, rel=0.15)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(10_000, rel=0.05)
    assert np.all(np.diff(times["a"]) >= 0)
    assert len(times["b"]) == pytest.approx(1500, rel=0.15)


@pytest.mark.parametrize("mean", [0.3, 4.0, 100.0, 2000.0])
def test_the_padded_rate_is_a_quantile(mean: float) -> None:
    for quantile in (0.5, 0.8, 0.99):
        count = round(poisson_rate(mean / 2, 2.0, quantile) * 2)

        def share_below(most: int) -> float:
            logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(most + 1)]
            return math.fsum(math.exp(each) for each in logs)

        assert share_below(count) >= quantile - 1e-9
        if count > mean + 1:
            assert share_below(count - 1) < quantile


def test_small_rates_and_short_slos_need_more_headroom() -> None:
    factors = [poisson_rate(rate, 0.1, 0.8) / rate for rate in (20.0, 100.0, 500.0, 5000.0)]
    assert all(a > b for a, b in pairwise(factors))
    tight, loose = with_poisson_headroom([load("small", 200, 10, "tight"), load("small", 200, 1000, "loose")])
    assert tight.rate_per_s > loose.rate_per_s > 200


def test_plans_made_with_simulated_headroom_keep_their_slos() -> None:
    loads = [load("small", 300, 10), load("middle", 80, 60), load("deep", 40, 120)]
    planner = Elastic(with_interference=True)
    full = planner.plan(loads, [GPU] * 4, COSTS)
    assert isinstance(full, Plan)
    tried = plan_simulated(planner, loads, [GPU] * 4, COSTS, trial=Trial(duration_s=10))
    assert tried.is_met
    assert isinstance(tried.plan, Plan)
    assert all(more.rate_per_s >= each.rate_per_s for more, each in zip(tried.planned, loads, strict=True))
    for seed in (11, 12):
        shares = [
            simulate_plan(plan, loads, [GPU] * 4, COSTS, seed=seed).violation_share for plan in (full, tried.plan)
        ]
        assert shares[1] < 0.015 < shares[0]
    hopeless = plan_simulated(planner, [load("heavy", 900, 60)], [GPU], COSTS)
    assert isinstance(hopeless.plan, Infeasible)
    assert not hopeless.is_met


def test_what_cannot_be_simulated_is_refused() -> None:
    loads = [Load("a", "m", 1.0, 100)]
    plan, flat = plan_of(((Slot("a", 1, 1.0),),)), Flat({"m": 10})
    with pytest.raises(PlanError, match="'b' of the plan has no load"):
        simulate_plan(plan_of(((Slot("b", 1, 1.0),),)), loads, [ONE], flat)
    with pytest.raises(PlanError, match="'one'"):
        simulate_plan(plan, loads, [GPU], flat)
    with pytest.raises(InvalidValueError, match="noise"):
        simulate_plan(plan, loads, [ONE], flat, noise=-1.0)
    with pytest.raises(PlanError, match=r"app\.s"):
        simulate_plan(plan, loads, [ONE], flat, applications=[Application("app", 5, 1.0, (Stage("s", "m"),))])
    with pytest.raises(InvalidValueError, match="ascend"):
        curve_arrivals({"a": ((5, 1.0),)}, 10, 0)
    with pytest.raises(InvalidValueError, match="target"):
        Trial(target=0.0)


def test_a_tenant_without_a_slot_has_everything_dropped() -> None:
    loads = [Load("a", "m", 100.0, NS_PER_S), Load("b", "m", 100.0, NS_PER_S)]
    found = simulate_plan(plan_of(((Slot("a", 8, 1.0),),)), loads, [ONE], Flat({"m": 10}), duration_ns=NS_PER_S)
    assert found.outcome("a").violation_share == 0
    assert found.outcome("b").dropped == found.outcome("b").offered > 0
    offered, missed = found.answers["b"].by_window(NS_PER_S // 2, NS_PER_S)
    assert offered.tolist() == missed.tolist()
    assert offered.sum() == found.outcome("b").offered
