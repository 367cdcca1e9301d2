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

from cotenant.plan.check import check_plan
from cotenant.plan.elastic import Elastic
from cotenant.plan.rounds import RoundCache
from cotenant.plan.search.columns import ColumnGenerator, Floats
from cotenant.plan.search.opt_bound import Bound
from cotenant.plan.search.opt_pool import Pool
from cotenant.plan.search.opt_pricing import proven
from cotenant.plan.search.optimal import Optimal
from cotenant.plan.search.pricing_bound import pricing_bound
from cotenant.plan.table_costs import WithoutInterference
from cotenant.plan.types import NS_PER_S, DeviceType, Load, Plan
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
