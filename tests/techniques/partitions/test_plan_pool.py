"""Columns at hand, their best batches, and the prices that the linear program gives them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator
from cotenant.techniques.partitions.plan.search.local_search import Search, SearchBudget
from cotenant.techniques.partitions.plan.search.opt_master import dual_prices
from cotenant.techniques.partitions.plan.search.opt_pool import Pool, rebatched
from cotenant.techniques.partitions.plan.search.opt_pricing import priced_columns
from cotenant.techniques.partitions.plan.types import Load
from plan_samples import CPU, FINE, GIB, costs, load, some_loads

COSTS = costs()
LOADS = [load("small", 200, 40), load("middle", 80, 120), load("deep", 100, 250), load("heavy", 30, 250)]


def generator_of(loads: list[Load]) -> tuple[ColumnGenerator, np.ndarray]:
    return ColumnGenerator(RoundCache(COSTS), loads, FINE), np.array([its.rate_per_s for its in loads])


@given(loads=some_loads(4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_pool_has_a_column_as_good_as_any_of_two_loads(loads: list[Load], data: st.DataObject) -> None:
    generator, rates = generator_of(loads)
    pool = Pool(generator, rates, alone=True)
    size = data.draw(st.sampled_from(FINE.sizes))
    numbers = data.draw(st.lists(st.integers(0, len(loads) - 1), min_size=1, max_size=2, unique=True))
    column = Column(size, tuple((n, data.draw(st.integers(1, 16))) for n in numbers))
    made = generator.config((column,))
    for line in range(len(pool.lines[size].memory)):
        assert generator.config((pool.column(size, line),)) is not None
    if made is None:
        return
    prices = np.array([data.draw(st.floats(0.0, 1.0)) for _ in loads]) / rates
    served = float(np.minimum(made.served, rates) @ prices)
    assert pool.values(size, rates, prices).max() >= served * (1 - 1e-6) - 1e-12


@pytest.mark.parametrize("numbers", [(1,), (0, 1), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("factor", [1.0, 1.08])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_batches_are_the_best_there_are(numbers: tuple[int, ...], factor: float, share: float) -> None:
    """Where the last row of a load may be worth a share of all its rows."""
    generator, rates = generator_of(LOADS)
    last = np.full(len(LOADS), share)
    prices, factors = 1 / rates, [factor] * len(numbers)
    best = -1.0
    for batches in product(range(1, 17), repeat=len(numbers)):
        took = [
            generator.alone[60][n, generator.position(n, b)] * factor for n, b in zip(numbers, batches, strict=True)
        ]
        if all(sum(took) + ns <= LOADS[n].slo_ns for n, ns in zip(numbers, took, strict=True)):
            served = [min(rates[n], b * 1e9 / sum(took)) for n, b in zip(numbers, batches, strict=True)]
            worth = sum(prices[n] * rate for n, rate in zip(numbers, served, strict=True))
            best = max(best, worth + sum(share for n, rate in zip(numbers, served, strict=True) if rate >= rates[n]))
    found = rebatched(generator, Column(60, tuple((n, 1) for n in numbers)), factors, rates, prices, last)
    if best < 0:
        assert found is None
    else:
        assert found is not None
        assert found[0] == pytest.approx(best)
        assert [n for n, _ in found[1].slots] == list(numbers)


def test_a_third_load_is_added_where_there_is_time_left() -> None:
    generator, rates = generator_of(LOADS)
    pool = Pool(generator, rates)
    wanted = np.array([5.0, 4.0, 3.0, 0.0])
    column = Column(100, ((0, 1), (1, 2)))
    grown = pool.extended(column, wanted, 1 / rates, 8.0 * GIB, 0.0)
    assert [number for number, _ in grown.slots] == [0, 1, 2]
    assert generator.config((grown,)) is not None
    assert pool.extended(column, wanted, 1 / rates, 0.5 * GIB, 0.0) == column
    assert pool.extended(column, wanted, 1 / rates, 8.0 * GIB, 1.0) == column


def test_the_last_row_of_a_load_is_worth_more_than_others() -> None:
    generator, rates = generator_of(LOADS)
    pool = Pool(generator, rates)
    wanted, prices = rates * 0.5, 1 / rates
    last = np.array([0.1, 0.2, 0.3, 0.4])
    for size, lines in pool.lines.items():
        more = pool.values(size, wanted, prices, last) - pool.values(size, wanted, prices)
        for line in range(len(lines.memory)):
            served = pool.served(pool.column(size, line))
            assert more[line] == pytest.approx(sum(last[n] for n, rate in served.items() if rate >= wanted[n]))
    column, wanted = Column(100, ((1, 8),)), np.array([150.0, 0.0, 20.0, 0.0])
    either = [pool.extended(column, wanted, 1 / rates, 8.0 * GIB, 0.0, each) for each in (None, np.eye(4)[2])]
    assert [made.slots[1][0] for made in either] == [0, 2]  # much of one load, or all of another


def test_another_seed_starts_elsewhere() -> None:
    loads = [load("deep", 90 + n, 250, f"t{n}") for n in range(8)]
    generator, rates = generator_of(loads)
    priced = priced_columns({"gpu": generator}, rates, 1 / rates, solver=False)
    starts = []
    for seed in (0, 0, 1, 2, 3):
        search = Search(
            {"gpu": generator}, ["gpu"], rates, 1 / rates, SearchBudget(1), most_slots=3, seed=seed, priced=priced
        )
        assert not search.run([None])
        starts.append(search.configs[0])
    assert starts[0] == starts[1]
    assert len(set(starts)) > 1


@given(loads=some_loads(5))
@settings(max_examples=20, deadline=None)
def test_no_column_is_worth_more_than_it_takes(loads: list[Load]) -> None:
    """Weak duality from both sides: the prices of rows add up to the least price, and no device is worth more."""
    pytest.importorskip("ortools")
    generator, rates = generator_of(loads)
    pool = Pool(generator, rates)
    prices = dual_prices({"gpu": pool}, {"gpu": 1.0}, rates)
    able = [any(generator.best[size][n] > 0 for size in FINE.sizes) for n in range(len(loads))]
    if prices is None:
        return
    assert all(able)
    assert prices.rows @ rates == pytest.approx(prices.least, rel=1e-6)
    most = {
        size: max(
            0.0,
            float((pool.values(size, rates, prices.rows) - prices.memory["gpu"] * lines.memory).max(initial=0.0)),
        )
        for size, lines in pool.lines.items()
    }
    device = max(sum(most[size] for size in split) for split in FINE.splits) + prices.memory["gpu"] * FINE.memory_bytes
    assert device <= 1 + 1e-5


@given(loads=some_loads(6, 150.0), seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_what_a_search_says_is_served_is_served(loads: list[Load], seed: int) -> None:
    generator, rates = generator_of(loads)
    worth = np.array([1 / max(max(generator.best[size][n] for size in FINE.sizes), 1e-9) for n in range(len(loads))])
    priced = priced_columns({"gpu": generator}, rates, worth, solver=False)
    search = Search(
        {"gpu": generator}, ["gpu"] * 3, rates, worth, SearchBudget(60), most_slots=3, seed=seed, priced=priced
    )
    is_served = search.run([None] * 3)
    total = sum((np.array(f.served) for f in search.configs if f is not None), np.zeros(len(rates)))
    assert is_served == bool((total >= rates * (1 - 1e-9)).all())
    for config in search.configs:
        if config is not None:
            assert generator.config(config.columns) == config
            memory = sum(COSTS.memory_bytes(loads[n].model) for c in config.columns for n, _ in c.slots)
            assert memory <= FINE.memory_bytes or math.isinf(memory)


@given(loads=some_loads(4), memory=st.integers(1, 6), price=st.sampled_from((0.2, 1.0)), data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_least_price_is_that_of_all_columns_in_one_program(
    loads: list[Load], memory: int, price: float, data: st.DataObject
) -> None:
    """Of two types of device, and with a column of three loads beside those of the pools where there are so many."""
    pytest.importorskip("ortools")
    rates = np.array([its.rate_per_s for its in loads])
    kinds = [replace(each, memory_bytes=memory * GIB, partition_bytes=GIB // 8) for each in (FINE, CPU)]
    pools = {kind.name: Pool(ColumnGenerator(RoundCache(COSTS), loads, kind), rates) for kind in kinds}
    costs_of = {"gpu": 1.0, "cpu": price}
    more = [("gpu", Column(100, tuple((n, data.draw(st.integers(1, 16))) for n in range(3))))] if len(loads) > 2 else []
    columns = [
        (name, pool.column(z, at))
        for name, pool in pools.items()
        for z in pool.lines
        for at in range(len(pool.lines[z].memory))
    ]
    columns += more
    goal = [costs_of[kind.name] for kind in kinds for _ in kind.splits] + [0.0] * len(columns)
    lines = []
    for kind in kinds:
        for size in kind.sizes:
            has = [-float(split.count(size)) * (kind is own) for own in kinds for split in own.splits]
            lines.append(has + [float((name, column.size) == (kind.name, size)) for name, column in columns])
        holds = [-float(kind.memory_bytes) * (kind is own) for own in kinds for _ in own.splits]
        taken = [pools[name].memory_bytes(column) * (name == kind.name) for name, column in columns]
        lines.append([each / GIB for each in holds + taken])
    served = [pools[name].served(column) for name, column in columns]
    for number, rate in enumerate(rates):
        own = [-min(1.0, each.get(number, 0.0) / rate) for each in served]
        lines.append([0.0] * (len(goal) - len(columns)) + own)
    found = linprog(goal, np.array(lines), [0.0] * (len(lines) - len(loads)) + [-1.0] * len(loads))
    prices = dual_prices(pools, costs_of, rates, more)
    assert (prices is None) == (found.status == 2)
    if prices is not None:
        assert prices.least == pytest.approx(found.fun, rel=1e-5)
        assert prices.rows @ rates == pytest.approx(found.fun, rel=1e-5)
