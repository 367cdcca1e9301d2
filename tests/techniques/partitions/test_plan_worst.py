"""The worst that neighbours can do: what checker, assessment and planners say is never below any choice of slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.gpulet._linear import LinearConstants, LinearInterference, Utilisation
from cotenant.techniques.partitions.plan.assess import assess
from cotenant.techniques.partitions.plan.check import ROUND, SLO, check_plan, worst_factor
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.table_costs import TableCosts
from cotenant.techniques.partitions.plan.types import CoRunner, DevicePlan, DeviceType, Load, PartitionPlan, Plan, Slot
from cotenant.techniques.partitions.predict.factors import Interference, Margin, PressureInterference, Scores, Surface
from cotenant.work import Work
from plan_samples import GIB, MS, table_costs

NAMES, BATCHES, SIZES = ("a", "b", "c"), (1, 4, 8), (1, 2)
KEYS = [(name, batch, size) for name in NAMES for batch in BATCHES for size in SIZES]
TARGET = "a", 4, 1
TEN = DeviceType("ten", ((20,), (1,) * 20, (2,) * 10), 64 * GIB)
_NONE = Scores(())


def believed(interference: Interference) -> TableCosts:
    points = {size: {batch: (4 + batch) * MS // size for batch in BATCHES} for size in (*SIZES, 20)}
    return table_costs({TEN.name: dict.fromkeys(NAMES, points)}, dict.fromkeys(NAMES, 1), {TEN.name: interference})


def numbers(least: float, most: float) -> st.SearchStrategy[float]:
    return st.integers(round(least * 20), round(most * 20)).map(lambda n: n / 20)


@st.composite
def lines(draw: st.DrawFn) -> LinearInterference:
    """The paper's line; also with constants below 0, as a fit may find."""
    shares = {key: (draw(numbers(0, 1)), draw(numbers(0, 1))) for key in KEYS}
    constants = LinearConstants(*(draw(numbers(-0.6, 1)) for _ in range(4)), draw(numbers(-1, 1.2)))
    return LinearInterference(constants, Utilisation.of(shares))


@st.composite
def pressures(draw: st.DrawFn) -> PressureInterference:
    targets = {key: (draw(numbers(0, 1.2)), draw(numbers(0, 2))) for key in KEYS}
    return PressureInterference(
        Surface(targets),
        Surface({key: (draw(numbers(0, 0.5)),) for key in KEYS}),
        Margin({}, _NONE, _NONE, _NONE, _NONE),
    )


@st.composite
def neighbours(draw: st.DrawFn, most: int = 10, most_choices: int = 20_000) -> list[list[CoRunner]]:
    """Slots of up to ten other partitions, as many of each as can still be tried one by one."""
    found: list[list[CoRunner]] = []
    for _ in range(draw(st.integers(1, most))):
        size = draw(st.sampled_from(SIZES))
        room = most_choices // math.prod(len(slots) + 1 for slots in found) - 1
        if room < 1:
            break
        slots = st.tuples(st.sampled_from(NAMES), st.sampled_from(BATCHES), st.just(size))
        found.append(draw(st.lists(slots, min_size=1, max_size=min(3, room))))
    return found


def brute_force(costs: TableCosts, target: CoRunner, beside: Sequence[Sequence[CoRunner]]) -> float:
    """Every choice of one slot, or none, of every partition."""
    return max(
        costs.factor(*target, [other for other in others if other is not None], TEN.name)
        for others in product(*([None, *slots] for slots in beside))
    )


@given(lines() | pressures(), neighbours(), st.sampled_from(KEYS))
@settings(max_examples=60, deadline=None)
def test_the_worst_factor_is_that_of_brute_force(
    interference: Interference, beside: list[list[CoRunner]], target: CoRunner
) -> None:
    costs = believed(interference)
    expected = brute_force(costs, target, beside)
    assert worst_factor(*target, beside, TEN.name, costs) == expected
    assert RoundCache(costs).worst_factor(*target, beside, TEN.name) == expected


@pytest.mark.parametrize("count", [7, 8, 9, 10])
def test_many_partitions_that_are_harmless_alone_are_seen_together(count: int) -> None:
    """Each neighbour alone leaves the factor at 1, whichever slot it runs: only together do their worst ones slow."""
    shares = {key: ({"a": 0.0, "b": 0.05, "c": 0.3}[key[0]], 0.0) for key in KEYS}
    costs = believed(LinearInterference(LinearConstants(0.0, 1.0, 0.0, 0.0, 0.5), Utilisation.of(shares)))
    beside = [[("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]] * count
    assert worst_factor(*TARGET, beside, TEN.name, costs) == pytest.approx(0.5 + 0.3 * count)
    assert RoundCache(costs).worst_factor(*TARGET, beside, TEN.name) == pytest.approx(0.5 + 0.3 * count)

    loads = [Load(name, name, 1.0, 60 * MS) for name in NAMES]
    alone = costs.latency_ns(Work("a", 0, 4), 1, TEN.name)
    first = PartitionPlan(1, 60 * MS - 2 * alone, (Slot("a", 4, 1.0),))
    rest = PartitionPlan(1, 50 * MS, tuple(Slot(name, 1, 1.0 / count) for name in NAMES))
    plan = Plan((DevicePlan(TEN.name, (first, *[rest] * count)),))
    found = check_plan(plan, loads, [TEN], costs)
    assert {each.kind for each in found if each.partition == 0} <= {SLO, ROUND}
    assert any(each.partition == 0 for each in found)
    assert RoundCache(costs).interferes(NAMES, [TEN])
    assert not RoundCache(costs).interferes(["a"], [TEN])
    view = assess(plan, loads, [TEN], costs).devices[0].partitions[0].slots[0]
    assert view.factor == pytest.approx(0.5 + 0.3 * count)


def test_a_neighbour_that_helps_may_be_idle() -> None:
    """A co-runner with a negative constant: a plan has to hold while it runs nothing."""
    shares = {key: ({"a": 0.2, "b": 0.5, "c": 0.0}[key[0]], 0.2) for key in KEYS}
    costs = believed(LinearInterference(LinearConstants(0.0, -1.0, 0.0, 1.0, 1.5), Utilisation.of(shares)))
    helping, neutral = ("b", 1, 1), ("a", 1, 1)
    assert costs.factor(*TARGET, [helping, neutral], TEN.name) == pytest.approx(1.2)
    for beside, expected in (
        ([[helping], [neutral]], 1.5),
        ([[helping]] * 2, 1.2),
        ([[helping]] * 12, 1.2),
        ([[helping]] * 12 + [[neutral]], 1.5),
    ):
        assert worst_factor(*TARGET, beside, TEN.name, costs) == pytest.approx(expected)
        assert RoundCache(costs).worst_factor(*TARGET, beside, TEN.name) == pytest.approx(expected)


def test_curves_beside_many_neighbours_are_worked_out_at_once() -> None:
    """Sixty neighbours of three slots each: more choices than could ever be tried."""
    shares = {key: (0.1 * BATCHES.index(key[1]), 0.0) for key in KEYS}
    costs = believed(LinearInterference(LinearConstants(0.0, 0.1, 0.0, 0.0, 1.0), Utilisation.of(shares)))
    around = tuple((1, tuple((name, 8) for name in NAMES)) for _ in range(60))
    curve = RoundCache(costs).curve("a", 1, TEN.name, around)
    alone = RoundCache(costs).curve("a", 1, TEN.name)
    assert curve.latency_ns == pytest.approx([ns * 2.2 for ns in alone.latency_ns], abs=1)
