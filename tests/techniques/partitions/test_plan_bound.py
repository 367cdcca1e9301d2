"""The proven bound: nothing that can be made is worth more than its pricing bound, no plan is cheaper than it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.columns import ColumnGenerator, Floats
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_pool import Pool
from cotenant.techniques.partitions.plan.search.opt_pricing import proven
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.search.pricing_bound import pricing_bound
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import NS_PER_S, DeviceType, Load, Plan
from oracles import Few, brute_force
from plan_samples import CPU, FINE, GIB, GPU, THREE_CORES, TWO_WAYS, costs, load, some_devices, some_loads, tiny

COSTS = costs()


def rates_of(loads: Sequence[Load]) -> Floats:
    return np.array([its.rate_per_s for its in loads])


def bound_of(loads: Sequence[Load], devices: Sequence[DeviceType], believed: object, data: st.DataObject) -> Bound:
    """A bound tightened by prices out of the air, which prove something as well."""
    cache = RoundCache(believed)  # type: ignore[arg-type]
    rates = rates_of(loads)
    generators = {kind.name: ColumnGenerator(cache, loads, kind) for kind in devices}
    bound = Bound(generators, rates)
    if any(
        not any(generator.best[s][n] > 0 for generator in generators.values() for s in generator.best)
        for n in range(len(loads))
    ):
        return bound
    pools = {name: Pool(generator, rates, alone=True) for name, generator in generators.items()}
    rows = np.array([data.draw(st.floats(0.0, 1.0)) for _ in loads]) / rates
    memory = {name: data.draw(st.sampled_from((0.0, 0.01, 0.1))) / GIB for name in generators}
    bound.tighten(rows, memory, pools)
    return bound


@given(loads=some_loads(5), data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_column_is_worth_more_than_its_pricing_bound(loads: list[Load], data: st.DataObject) -> None:
    """Columns of any number of slots, of loads that may share models, with pauses in their rounds."""
    generator = ColumnGenerator(RoundCache(COSTS), loads, FINE)
    rates = rates_of(loads) * data.draw(st.floats(0.05, 2.0))
    prices = np.array([data.draw(st.floats(0.0, 1.0)) for _ in loads]) / rates
    memory_price = data.draw(st.sampled_from((0.0, 0.02, 0.2))) / GIB
    size = data.draw(st.sampled_from(FINE.sizes))
    numbers = data.draw(st.lists(st.integers(0, len(loads) - 1), min_size=1, max_size=5, unique=True))
    batches = [data.draw(st.integers(1, 16)) for _ in numbers]
    took = [generator.alone[size][n, generator.position(n, b)] for n, b in zip(numbers, batches, strict=True)]
    duty = sum(took)
    slack = min(loads[n].slo_ns - ns for n, ns in zip(numbers, took, strict=True))
    if slack < duty:
        return
    duty += data.draw(st.floats(0.0, 1.0)) * (slack - duty)
    served = [min(rates[n], b * NS_PER_S / duty) for n, b in zip(numbers, batches, strict=True)]
    memory = sum(COSTS.memory_bytes(model) for model in sorted({loads[n].model for n in numbers}))
    worth = sum(prices[n] * rate for n, rate in zip(numbers, served, strict=True)) - memory_price * memory
    reached = data.draw(st.sampled_from((0.0, worth, 10.0)))
    assert pricing_bound(generator, size, rates, prices, memory_price, max(0.0, reached))[0] >= worth * (1 - 1e-9)


@given(loads=some_loads(3), size=st.sampled_from(FINE.sizes), data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_pricing_bound_is_hardly_above_the_best_column(loads: list[Load], size: int, data: st.DataObject) -> None:
    """Of all columns of up to three loads one by one; what a search in whole cells would allow beyond is shut out."""
    few = (1, 3, 5, 8, 13)
    generator = ColumnGenerator(RoundCache(Few(COSTS, few)), loads, FINE)
    rates = rates_of(loads)
    prices = np.array([data.draw(st.floats(0.1, 1.0)) for _ in loads]) / rates
    best = 0.0
    for batches in product((0, *few), repeat=len(loads)):
        chosen = [(n, batch) for n, batch in enumerate(batches) if batch]
        took = [generator.alone[size][n, generator.position(n, batch)] for n, batch in chosen]
        if all(sum(took) + ns <= loads[n].slo_ns for (n, _), ns in zip(chosen, took, strict=True)):
            served = [min(rates[n], batch * NS_PER_S / sum(took)) for n, batch in chosen]
            best = max(best, sum(prices[n] * rate for (n, _), rate in zip(chosen, served, strict=True)))
    most, slots = pricing_bound(generator, size, rates, prices, 0.0, best)
    assert best * (1 - 1e-9) <= most <= best * 1.003
    assert len({n for n, _ in slots}) == len(slots)


@pytest.mark.parametrize("devices", [[TWO_WAYS] * 2, [TWO_WAYS, THREE_CORES]], ids=["equal", "mixed"])
@given(loads=tiny(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_brute_force_is_never_below_it(devices: list[DeviceType], loads: list[Load], data: st.DataObject) -> None:
    few = Few(COSTS, (2, 8))
    inventory = [kind.name for kind in devices]
    expected = brute_force(loads, devices, few)
    bound = bound_of(loads, devices, few, data)
    assert bound.price() <= expected * (1 + 1e-9)
    assert bound.least(inventory) <= expected * (1 + 1e-9)
    if math.isfinite(expected):
        assert not bound.is_too_little(inventory)


@given(loads=some_loads(), devices=some_devices(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_plan_of_any_planner_is_below_it(loads: list[Load], devices: list[DeviceType], data: st.DataObject) -> None:
    """Without interference, which the bound leaves out, plans come closest to it."""
    believed = WithoutInterference(COSTS)
    bound = bound_of(loads, devices, believed, data)
    price = {kind.name: kind.price for kind in devices}
    for planner in (Elastic(), Optimal(time_limit_s=0.05, saving_s=0.05, solver=False)):
        plan = planner.plan(loads, devices, believed)
        if isinstance(plan, Plan):
            assert check_plan(plan, loads, devices, believed) == ()
            used = [device.device for device in plan.devices]
            assert not bound.is_too_little(used)
            assert bound.devices() <= len(used)
            assert bound.least([kind.name for kind in devices]) <= sum(price[name] for name in used) * (1 + 1e-9)


@pytest.mark.parametrize("price", [1.0, 0.4])
@given(loads=some_loads(8, 600.0))
@settings(max_examples=10, deadline=None)
def test_the_programs_prices_prove_no_more_than_plans_reach(price: float, loads: list[Load]) -> None:
    pytest.importorskip("ortools")
    devices = [FINE] * 6 + [replace(CPU, price=price)] * 4
    believed = WithoutInterference(COSTS)
    found = Optimal(time_limit_s=0.1, saving_s=0.1).solve(loads, devices, believed)
    if not isinstance(found.plan, Plan):
        return
    rates = rates_of(loads)
    cache = RoundCache(believed)
    generators = {kind.name: ColumnGenerator(cache, loads, kind) for kind in devices}
    bound = Bound(generators, rates)
    proven(bound, generators, rates)
    assert check_plan(found.plan, loads, devices, believed) == ()
    assert bound.least([kind.name for kind in devices]) <= found.price * (1 + 1e-9)
    assert not bound.is_too_little([device.device for device in found.plan.devices])


def test_it_is_tighter_than_that_of_single_loads() -> None:
    """Each of these takes a little more than half a device, so that two never share one, but parts of them could."""
    pytest.importorskip("ortools")
    capacity = RoundCache(COSTS).capacity("heavy", 150 * 10**6, 100, "gpu")
    whole = replace(GPU, splits=((100,),), memory_bytes=GIB + GIB // 2)
    loads = [load("heavy", 0.55 * capacity, 150), load("deep", 20, 60), load("small", 20, 10)]
    rates = rates_of(loads)
    generators = {"gpu": ColumnGenerator(RoundCache(COSTS), loads, whole)}
    bound = Bound(generators, rates)
    before = bound.price()
    proven(bound, generators, rates)
    assert bound.price() > before * 1.2
    assert bound.least(["gpu"] * 5) == 3
    assert bound.least(["gpu"] * 2) == math.inf


def test_a_plan_that_could_not_be_cheaper_is_proven_so() -> None:
    """Where there are too many loads to try everything, and fractions of devices would do with half as many."""
    pytest.importorskip("ortools")
    capacity = RoundCache(COSTS).capacity("heavy", 150 * 10**6, 100, "gpu")
    whole = replace(GPU, splits=((100,),), memory_bytes=GIB + GIB // 2)
    loads = [*(load("heavy", 0.55 * capacity, 150, f"t{n}") for n in range(4)), load("small", 20, 10)]
    found = Optimal().solve(loads, [whole] * 6, COSTS)
    assert (found.price, found.bound, found.is_proven, found.gap) == (4.0, 4.0, True, 0.0)


def even_fractions(
    generators: dict[str, ColumnGenerator], rates: Floats, costs: dict[str, float], counts: dict[str, int] | None = None
) -> float:
    """What fractions of partitions could do, each with one load, without memory: the linear program itself.

    The least cost of all rates, or with `counts` the largest share of them that so many devices serve.
    """
    uses = [(name, split) for name, generator in generators.items() for split in generator.kind.splits]
    parts = [
        (name, size, n)
        for name, generator in generators.items()
        for size in generator.kind.sizes
        for n in range(len(rates))
    ]
    share = [] if counts is None else [-1.0]
    lines, most = [], []
    for name, generator in generators.items():
        for size in generator.kind.sizes:
            room = [-float(split.count(size)) if name == own else 0.0 for own, split in uses]
            lines.append([*room, *[float((own, part) == (name, size)) for own, part, _ in parts], *share[1:]])
            most.append(0.0)
        if counts is not None:
            lines.append([*[float(own == name) for own, _ in uses], *[0.0] * len(parts)])
            most.append(counts[name])
    lines = [[*line, *[0.0] * len(share)] for line in lines]
    for number, rate in enumerate(rates):
        served = [-generators[name].best[size][n] / rate * (n == number) for name, size, n in parts]
        lines.append([*[0.0] * len(uses), *served, *[-each for each in share]])
        most.append(-1.0 if counts is None else 0.0)
    goal = [0.0 if share else costs[name] for name, _ in uses]
    found = linprog([*goal, *[0.0] * len(parts), *share], np.array(lines), most)
    assert found.status == 0
    return abs(float(found.fun))


@given(
    loads=some_loads(5).map(lambda each: [load(its.model, its.rate_per_s, 250, its.tenant) for its in each]),
    price=st.sampled_from((None, 0.3, 1.0)),
    counts=st.tuples(st.integers(1, 4), st.integers(0, 4)),
)
@settings(max_examples=25, deadline=None)
def test_where_memory_is_no_bound_it_is_that_of_fractions(
    loads: list[Load], price: float | None, counts: tuple[int, int]
) -> None:
    kinds = [FINE] if price is None else [FINE, replace(CPU, price=price)]
    generators = {
        kind.name: ColumnGenerator(RoundCache(COSTS), loads, replace(kind, memory_bytes=1 << 60)) for kind in kinds
    }
    rates, costs_of = rates_of(loads), {kind.name: kind.price for kind in kinds}
    bound = Bound(generators, rates)
    least = even_fractions(generators, rates, costs_of)
    assert 0.985 * least <= bound.price() <= least
    fewest = even_fractions(generators, rates, dict.fromkeys(generators, 1.0))
    assert math.ceil(0.985 * fewest) <= bound.devices() <= math.ceil(fewest)
    there = dict(zip(generators, counts, strict=False))
    share = even_fractions(generators, rates, costs_of, there)
    is_too_little = bound.is_too_little([name for name, count in there.items() for _ in range(count)])
    assert is_too_little <= (share < 1)
    assert is_too_little >= (share < 0.985)
