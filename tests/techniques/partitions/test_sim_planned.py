"""A plan run by the core: what `cotenant plan` says of random arrivals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.application import Application, Stage, stage_loads
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.table_costs import TableCosts, WithoutInterference
from cotenant.techniques.partitions.plan.types import CoRunner, DevicePlan, Load, PartitionPlan, Plan
from cotenant.techniques.partitions.world import simulate_plan
from cotenant.work import Slot
from plan_samples import GIB, GPU, MS, costs, load, models_of, table_costs

FLAT = table_costs({"cpu": {"m": {size: {1: 10 * MS, 8: 10 * MS} for size in (1, 2)}}}, {"m": GIB})
"""Ten ms whatever the batch and the size."""


def plan_of(*devices: tuple[tuple[Slot, ...], ...]) -> Plan:
    return Plan(
        tuple(
            DevicePlan("cpu", tuple(PartitionPlan(1, 20 * MS, slots) for slots in partitions)) for partitions in devices
        )
    )


def test_one_row_at_a_time_is_a_queue_with_fixed_service() -> None:
    """M/D/1: nobody waits with probability 1 - rho, so that the median at a third of the load is the service alone."""
    rate = 30.0
    done = simulate_plan(plan_of(((Slot("a", 1, rate),),)), [Load("a", "m", rate, 1000 * MS)], FLAT, duration_s=60)
    (line,) = done.tenants
    assert line.offered == line.answered == pytest.approx(60 * rate, rel=0.1)
    assert line.p50_ns == 10 * MS
    assert 10 * MS < (line.p99_ns or 0) < 50 * MS


def test_what_comes_too_fast_is_dropped() -> None:
    done = simulate_plan(plan_of(((Slot("a", 1, 200.0),),)), [Load("a", "m", 200.0, 25 * MS)], FLAT, duration_s=20)
    (line,) = done.tenants
    assert line.late == 0
    assert line.dropped == pytest.approx(line.offered / 2, rel=0.1)  # it serves 100 a second


def test_queries_are_dealt_to_devices_by_their_planned_rates() -> None:
    """Two devices of three take what one does not; each has a queue of its own."""
    loads = [Load("a", "m", 150.0, 60 * MS)]
    missed = []
    for plan in (plan_of(((Slot("a", 1, 150.0),),)), plan_of(((Slot("a", 1, 75.0),),), ((Slot("a", 1, 75.0),),))):
        line = simulate_plan(plan, loads, FLAT, duration_s=20).total
        missed.append(1 - (line.attainment or 0.0))
    assert missed[0] > 0.3
    assert missed[1] < 0.05


def test_neighbours_slow_a_launch() -> None:
    loads = [load("wide", 20, 100, "a"), load("wide", 20, 100, "b")]
    plan = Plan(
        (
            DevicePlan(
                "gpu",
                tuple(PartitionPlan(50, 50 * MS, (Slot(name, 1, 20.0),)) for name in ("a", "b")),
            ),
        )
    )
    beside, alone = (
        simulate_plan(plan, loads, each, duration_s=30).tenant("a") for each in (costs(), WithoutInterference(costs()))
    )
    assert beside.offered == alone.offered
    assert beside.p50_ns is not None
    assert alone.p50_ns is not None
    assert beside.p50_ns > alone.p50_ns


def test_the_stages_of_an_application_are_served_where_they_are_planned() -> None:
    app = Application("app", 200 * MS, 50.0, (Stage("a", "small"), Stage("b", "middle", ("a",))))
    loads = [*stage_loads(app, [GPU], costs()), load("small", 40, 60, "plain")]
    plan = Elastic(headroom=0.5).plan(loads, [GPU] * 3, costs())
    assert isinstance(plan, Plan)
    done = simulate_plan(plan, loads, WithoutInterference(costs()), duration_s=30, seed=3, applications=[app])
    assert [line.tenant for line in done.tenants] == ["plain", "app"]
    line = done.tenant("app")
    assert line.offered > 1000
    assert line.attainment is not None
    assert line.attainment > 0.99
    assert line.p50_ns is not None
    assert 0 < line.p50_ns <= app.slo_ns


def test_stages_on_two_devices_are_one_query() -> None:
    app = Application("app", 100 * MS, 20.0, (Stage("a", "m"), Stage("b", "m", ("a",))))
    loads = [Load(f"app.{name}", "m", 20.0, 50 * MS) for name in ("a", "b")]
    plan = plan_of(((Slot("app.a", 1, 20.0),),), ((Slot("app.b", 1, 20.0),),))
    line = simulate_plan(plan, loads, FLAT, duration_s=30, applications=[app]).tenant("app")
    assert line.p50_ns == 20 * MS
    assert line.answered > 0.95 * line.offered


def test_the_same_seed_gives_the_same_figures() -> None:
    loads = [load("small", 300, 30), load("middle", 80, 60)]
    plan = Elastic(with_interference=True).plan(loads, [GPU] * 2, costs())
    assert isinstance(plan, Plan)
    first, again, other = (simulate_plan(plan, loads, costs(), duration_s=2, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_slots_and_loads_must_belong_together() -> None:
    one = Load("a", "m", 10.0, 50 * MS)
    plan = plan_of(((Slot("a", 1, 10.0),),))
    with pytest.raises(PlanError, match="tenant 'b' has no slot"):
        simulate_plan(plan, [one, replace(one, tenant="b")], FLAT, duration_s=1)
    more = plan_of(((Slot("a", 1, 10.0), Slot("c", 1, 10.0)),))
    with pytest.raises(PlanError, match="tenant 'c' of the plan has no load"):
        simulate_plan(more, [one], FLAT, duration_s=1)
    app = Application("app", 100 * MS, 20.0, (Stage("a", "m"),))
    with pytest.raises(PlanError, match=r"stage .app\.a. of an application has no load"):
        simulate_plan(plan, [one], FLAT, duration_s=1, applications=[app])


class Crowded(TableCosts):
    """Groups of two take `together_ms`, whatever they are; of others nothing is known."""

    together_ms = 15

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        assert all(batch in self.batches(model) for model, batch, _ in members)
        return self.together_ms * MS if len(members) == 2 else None


@pytest.mark.parametrize("together_ms", [12, 40])
def test_a_group_takes_what_the_costs_say_of_it(together_ms: int) -> None:
    """Two tenants that send at the same times: in turn 20 ms, together 12 or 40, which is in time or is not."""
    crowd = Crowded({"cpu": models_of({"m": {size: {1: 10 * MS, 8: 10 * MS} for size in (1, 2)}})}, {"m": GIB})
    crowd.together_ms = together_ms
    slots = (Slot("a", 1, 40.0, 1, 1), Slot("b", 1, 40.0, 1, 1))
    plan = Plan((DevicePlan("cpu", (PartitionPlan(2, 25 * MS, slots),)),))
    loads = [Load(name, "m", 40.0, 200 * MS) for name in "ab"]
    done = simulate_plan(plan, loads, crowd, duration_s=20)
    times = {line.p99_ns or 0 for line in done.tenants}
    if together_ms == 12:
        assert (done.total.attainment or 0.0) > 0.99
        assert max(times) < 100 * MS
        assert all((line.p50_ns or 0) >= 10 * MS for line in done.tenants)
    else:
        assert max(times) > 100 * MS  # 25 queries of each a second, and 40 come


def test_of_a_group_that_the_costs_do_not_know_the_members_run_as_long_as_in_turn() -> None:
    trio = tuple(Slot(name, 1, 45.0, 1, 1) for name in "abc")
    sizes = {"cpu": models_of({"m": {size: {1: 10 * MS, 8: 10 * MS} for size in (1, 3)}})}
    plan = Plan((DevicePlan("cpu", (PartitionPlan(3, 100 * MS, trio),)),))
    loads = [Load(name, "m", 45.0, 400 * MS) for name in "abc"]
    done = simulate_plan(plan, loads, Crowded(sizes, {"m": GIB}), duration_s=10)
    assert (done.total.attainment or 0.0) < 0.9  # 33 times all three a second in turn; 100 if they did not touch
