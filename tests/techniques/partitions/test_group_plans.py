"""Plans whose slots run in groups: what the checker says of them, and that the planner finds the best there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cotenant.techniques.partitions.plan.assess import assess, sequential_slot_notes
from cotenant.techniques.partitions.plan.check import GROUP, ROUND, SLO, check_plan
from cotenant.techniques.partitions.plan.scaling import least_devices
from cotenant.techniques.partitions.plan.search.opt_exact import has_solver
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import TableCosts, WithoutGroups
from cotenant.techniques.partitions.plan.types import (
    NS_PER_S,
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Slot,
)
from cotenant.techniques.partitions.report import plan_picture
from cotenant.work import Work
from group_costs import MS, grouped_costs
from plan_samples import Line

WHOLE = DeviceType("gpu", ((100,),), 1 << 40)
ALONE = {"a": {1: 10.0, 2: 12.0}, "b": {1: 12.0, 2: 16.0}, "c": {1: 5.0, 2: 6.0}}
PAIR = frozenset("ab")
COSTS = grouped_costs("gpu", 100, ALONE, {PAIR: 1.5, frozenset("ac"): None})
TOGETHER = (Slot("a", 2, 50.0, 1, 50), Slot("b", 2, 50.0, 1, 50))
"""18.7 ms instead of 28."""


def one(duty_ms: float, *slots: Slot) -> Plan:
    return Plan((DevicePlan("gpu", (PartitionPlan(100, round(duty_ms * MS), slots),)),))


def loads_of(slo_ms: float, plan: Plan) -> list[Load]:
    return [Load(name, name, rate, round(slo_ms * MS)) for name, rate in plan.rates_per_s.items()]


def found(plan: Plan, slo_ms: float, costs: TableCosts = COSTS) -> list[tuple[str, str]]:
    return [(each.kind, each.tenant) for each in check_plan(plan, loads_of(slo_ms, plan), [WHOLE], costs)]


def test_a_group_takes_its_own_time_once() -> None:
    assert found(one(20, *TOGETHER), 40) == []
    assert found(one(18.6, *TOGETHER), 40) == [(ROUND, "b")]
    assert found(one(20, *TOGETHER), 38.6) == [(SLO, "a"), (SLO, "b")]
    third = Slot("c", 1, 20.0)
    assert found(one(23.7, *TOGETHER, third), 60) == []
    assert found(one(23.6, *TOGETHER, third), 60) == [(ROUND, "c")]
    in_turn = [Slot(slot.tenant, slot.batch, slot.rate_per_s) for slot in TOGETHER]
    assert found(one(20, *in_turn), 40) == [(ROUND, "b")]


@pytest.mark.parametrize("names", ["ac", "bc"])
def test_a_group_of_which_nothing_is_known_is_refused(names: str) -> None:
    slots = [Slot(name, 1, 20.0, 1, 50) for name in names]
    assert found(one(40, *slots), 100) == [(GROUP, names[0])]


def test_members_are_so_many_neighbours_at_once() -> None:
    kind = DeviceType("gpu", ((100,), (60, 40)), 1 << 40)

    class Each(Line):
        def factor(self, model, batch, size, others, device=""):  # type: ignore[no-untyped-def]
            return 1.0 + 0.1 * len(others)

        def adds(self, model, batch, size, other, device=""):  # type: ignore[no-untyped-def]
            return 0.1

    believed = grouped_costs("gpu", 60, ALONE, {PAIR: 1.5}, Each(), {40: 2.0, 100: 0.9})
    groups = PartitionPlan(60, 21 * MS, tuple(replace_size(slot, 30) for slot in TOGETHER))
    alone = PartitionPlan(40, 40 * MS, (Slot("c", 1, 25.0),))
    plan = Plan((DevicePlan("gpu", (groups, alone)),))
    view = assess(plan, loads_of(100, plan), [kind], believed)
    member, neighbour = view.devices[0].partitions[0].slots[0], view.devices[0].partitions[1].slots[0]
    assert member.execution_ns == pytest.approx(28 / 1.5 * 1.1 * MS, abs=2)
    assert member.in_turn_ns == 28 * MS
    assert view.devices[0].partitions[0].load == pytest.approx(28 / 1.5 * 1.1 / 21)
    assert neighbour.execution_ns == pytest.approx(2 * 5 * 1.2 * MS, abs=2), "beside both members at once"
    assert check_plan(plan, loads_of(100, plan), [kind], believed) == ()


def replace_size(slot: Slot, size: int) -> Slot:
    return Slot(slot.tenant, slot.batch, slot.rate_per_s, slot.group, size)


# --- the planner against all rounds that there are -------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn, most: int = 3) -> tuple[TableCosts, list[Load]]:
    """Two or three models with a few batches, gains of pairs and all three, and loads that are near what can be."""
    names = "abc"[: draw(st.integers(2, most))]
    alone = {}
    for name in names:
        first, more = draw(st.integers(2, 20)), draw(st.floats(0.1, 0.9))
        alone[name] = {batch: float(round(first * (1 + more * (batch - 1)), 2)) for batch in (1, 2, 3)}
    gain = st.one_of(st.none(), st.floats(0.7, 2.0))
    sets = [frozenset(each) for count in range(2, len(names) + 1) for each in combinations(names, count)]
    costs = grouped_costs("gpu", 100, alone, {each: draw(gain) for each in sets})
    mean = sum(alone[name][3] for name in names) / len(names)
    loads = [
        Load(
            name,
            name,
            draw(st.floats(0.2, 1.2)) * 3000 / alone[name][3] / len(names),
            int(draw(st.floats(2, 8)) * mean * MS),
        )
        for name in names
    ]
    return costs, loads


def partings(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partings(items[1:]):
        yield [[items[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]


def is_possible(costs: TableCosts, loads: Sequence[Load]) -> bool:
    """Whether any round of one slot each serves the loads in one partition, by trying all of them."""
    sets = [[list(step) for step in each] for each in partings(range(len(loads)))]
    for batches in product((1, 2, 3), repeat=len(loads)):
        for steps in sets:
            slots: list[Slot] = []
            times = []
            for group, step in enumerate(steps, 1):
                members = [(loads[at].model, batches[at], 100 // len(step)) for at in step]
                ns = (
                    costs.group_ns(members, 100, "gpu")
                    if len(step) > 1
                    else costs.latency_ns(work_of(loads[step[0]].model, batches[step[0]]), 100, "gpu")
                )
                times.append(ns)
                for at in step:
                    place = (group, 100 // len(step)) if len(step) > 1 else (0, 0)
                    slots.append(Slot(loads[at].tenant, batches[at], loads[at].rate_per_s, *place))
            if None in times:
                continue
            duty = sum(time for time in times if time is not None)
            plan = Plan((DevicePlan("gpu", (PartitionPlan(100, duty, tuple(slots)),)),))
            if not check_plan(plan, loads, [WHOLE], costs):
                return True
    return False


def work_of(model: str, batch: int) -> Work:
    return Work(model, 0, batch)


@pytest.mark.skipif(not has_solver(), reason="needs the extra solver")
@given(worlds())
@settings(max_examples=12, deadline=None)
def test_a_plan_is_found_where_any_round_serves_the_loads(world: tuple[TableCosts, list[Load]]) -> None:
    costs, loads = world
    made = Optimal(time_limit_s=0.2, saving_s=0.2).solve(loads, [WHOLE], costs)
    if isinstance(made.plan, Infeasible):
        assert not is_possible(costs, loads)
    else:
        assert is_possible(costs, loads)
        assert check_plan(made.plan, loads, [WHOLE], costs) == ()
        assert made.bound <= made.price


@given(worlds(), st.booleans())
@settings(max_examples=8, deadline=None)
def test_what_is_planned_with_groups_holds_beside_neighbours(
    world: tuple[TableCosts, list[Load]], solver: bool
) -> None:
    _, loads = world
    kind = DeviceType("gpu", ((100,), (60, 40)), 1 << 40)

    class Few(Line):
        def factor(self, model, batch, size, others, device=""):  # type: ignore[no-untyped-def]
            return 1.0 + 0.05 * sum(rows for _, rows, _ in others)

        def adds(self, model, batch, size, other, device=""):  # type: ignore[no-untyped-def]
            return 0.05 * other[1]

    alone = {load.model: {b: 3.0 + 2 * b for b in (1, 2)} for load in loads}
    gains = {frozenset(each): 1.6 for each in combinations(sorted(alone), 2)}
    for size in (60, 100):
        costs = grouped_costs("gpu", size, alone, gains, Few(), {60: 1.3, 40: 1.5, 100: 1.0} | {size: 1.0})
        plan = Optimal(time_limit_s=0.1, saving_s=0.1, solver=solver).plan(loads, [kind] * 2, costs)
        if isinstance(plan, Plan):
            assert check_plan(plan, loads, [kind] * 2, costs) == ()


def test_groups_save_a_device() -> None:
    loads = [Load("a", "a", 100.0, 60 * MS), Load("b", "b", 100.0, 60 * MS)]
    alone = Optimal().plan(loads, [WHOLE] * 3, WithoutGroups(COSTS))
    plan = Optimal().plan(loads, [WHOLE] * 3, COSTS)
    assert isinstance(alone, Plan)
    assert isinstance(plan, Plan)
    assert (len(alone.devices), len(plan.devices)) == (2, 1)
    (step,) = plan.devices[0].partitions[0].round.steps
    assert {(slot.tenant, slot.batch, slot.size) for slot in step} == {("a", 2, 50), ("b", 2, 50)}
    assert all(not slot.group for device in alone.devices for part in device.partitions for slot in part.slots)
    assert least_devices(Optimal(), loads, [WHOLE] * 3, COSTS).devices == 1


def test_slots_run_in_turn_where_a_group_gains_nothing() -> None:
    worse = grouped_costs("gpu", 100, ALONE, {PAIR: 0.9})
    loads = [Load("a", "a", 50.0, 100 * MS), Load("b", "b", 50.0, 100 * MS)]
    plan = Optimal().plan(loads, [WHOLE], worse)
    assert isinstance(plan, Plan)
    assert [slot.group for slot in plan.devices[0].partitions[0].slots] == [0, 0]
    assert plan.devices[0].partitions[0].duty_ns * 50 <= 2 * NS_PER_S


def test_a_group_is_drawn_with_its_letters_in_turn() -> None:
    plan = one(28, Slot("c", 1, 30.0), *TOGETHER)
    view = assess(plan, loads_of(100, plan), [WHOLE], COSTS)
    console = Console(width=80, record=True, file=StringIO())
    console.print(plan_picture(view))
    text = console.export_text()
    (bar,) = [line for line in text.splitlines() if line.startswith("│")]
    assert re.fullmatch(r"│a+(bc)+b?·+│", bar), "tenants have letters in the order of the loads: c, a, b"
    assert bar.count("a") == pytest.approx(78 * 5 / 28, abs=1)
    assert "runs 18.7 ms with c (28 in turn)" in text
    assert "runs 18.7 ms with b (28 in turn)" in text
    assert "runs 5 ms  " in text


def test_it_is_told_why_slots_run_in_turn() -> None:
    """Of a and b a group was measured, of c none."""
    three = one(60, *(Slot(name, 2, 20.0) for name in "abc"))
    place = "groups: device 0 partition 0 has"
    (note,) = sequential_slot_notes(three, loads_of(100, three), COSTS)
    assert note == f"{place} 3 slots in turn: the best pair of them, 'a' with 'b' takes 18.7 ms, in turn 28 ms"
    far = one(60, Slot("a", 2, 20.0), Slot("c", 2, 20.0))
    (note,) = sequential_slot_notes(far, loads_of(100, far), COSTS)
    assert note == f"{place} 2 slots in turn: no measured group is near any two of them"
    assert sequential_slot_notes(three, loads_of(100, three), WithoutGroups(COSTS)) == ()
    both = one(60, *TOGETHER, Slot("c", 2, 20.0))
    assert sequential_slot_notes(both, loads_of(100, both), COSTS) == ()
