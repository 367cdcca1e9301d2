"""The search for configs: its moves keep what they should, and tight questions are answered with little effort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.rounds import RoundCache
from cotenant.techniques.partitions.plan.search.columns import Column, ColumnGenerator, DeviceConfiguration, Floats
from cotenant.techniques.partitions.plan.search.local_search import Search, SearchBudget, kept
from cotenant.techniques.partitions.plan.search.opt_bound import Bound
from cotenant.techniques.partitions.plan.search.opt_exact import all_configurations
from cotenant.techniques.partitions.plan.search.opt_pricing import priced_columns
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.table_costs import WithoutInterference
from cotenant.techniques.partitions.plan.types import Infeasible, Load, Plan
from oracles import Few
from plan_samples import CPU, FINE, GIB, GPU, MODELS, THREE_CORES, TWO_WAYS, costs, latencies, load, table_costs

COSTS = costs()
BOOK = RoundCache(COSTS)


def worth_of(generator: ColumnGenerator) -> Floats:
    """Of a row/s of each load: the share of a device that it takes at least."""
    worth: Floats = 1 / np.max(
        [generator.best[size] * generator.kind.whole / size for size in generator.kind.sizes], axis=0
    )
    return worth


def rated(loads: Sequence[Load], rates: Floats) -> list[Load]:
    return [load(one.model, float(rate), one.slo_ns / 1e6, one.tenant) for one, rate in zip(loads, rates, strict=True)]


def tight(seed: int, share: float, devices: int) -> list[Load]:
    """Loads that fill this share of some devices, if fractions of devices would do and nobody slowed others down."""
    random = Random(seed)
    models = random.choices(sorted(MODELS), k=2 + 2 * devices)
    loads = [load(m, random.uniform(0.2, 1), random.choice((60, 120, 250)), f"t{n}") for n, m in enumerate(models)]
    generator = ColumnGenerator(BOOK, loads, FINE)
    rates = np.array([one.rate_per_s for one in loads]) / worth_of(generator)
    return rated(loads, rates * share * devices / Bound({"gpu": generator}, rates, 20).price())


def search_of(loads: Sequence[Load], devices: int, effort: int, *, is_guided: bool = True, seed: int = 0) -> Search:
    generators, rates = {"gpu": ColumnGenerator(BOOK, loads, FINE)}, np.array([one.rate_per_s for one in loads])
    worth = worth_of(generators["gpu"])
    priced = priced_columns(generators, rates, worth, solver=False) if is_guided else None
    kinds = ["gpu"] * devices
    return Search(generators, kinds, rates, worth, SearchBudget(effort), most_slots=3, seed=seed, priced=priced)


@pytest.mark.parametrize(
    ("is_guided", "share", "devices", "effort", "most"),
    [
        (True, 0.7, 2, 40, 0.026),
        (True, 0.75, 3, 40, 0.012),
        (True, 0.8, 3, 40, 0.034),
        (True, 0.9, 4, 40, 0.06),
        (False, 0.75, 3, 25, 0.018),
    ],
)
def test_little_is_missing_of_what_fills_all_devices(
    is_guided: bool, share: float, devices: int, effort: int, most: float
) -> None:
    """As a share of all devices, in the mean: how good a search is with so much effort."""
    missing = []
    for seed in range(12):
        search = search_of(tight(seed, share, devices), devices, effort, is_guided=is_guided)
        is_served = search.run([None] * devices)
        lost = float(search.missing(search.configs) @ search.row_values)
        assert is_served == (lost == 0)
        assert is_served or search.budget.left <= 0
        missing.append(lost / devices)
    assert sum(missing) / len(missing) <= most


@pytest.mark.parametrize("kind", [TWO_WAYS, THREE_CORES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("is_guided", [True, False], ids=["priced_columns", "alone"])
def test_a_device_is_filled_nearly_as_well_as_can_be(kind: object, is_guided: bool) -> None:
    few = Few(WithoutInterference(COSTS), (2, 5, 8))  # type: ignore[arg-type]
    reached = []
    for seed in range(15):
        random = Random(seed)
        drawn = [load(random.choice(sorted(MODELS)), 1.0, random.choice((80, 160)), f"t{n}") for n in range(3)]
        generator = ColumnGenerator(
            RoundCache(few), drawn, TWO_WAYS if kind is TWO_WAYS else THREE_CORES, interference=False
        )
        rates = np.array([random.uniform(0.2, 1.5) for _ in drawn]) / worth_of(generator)
        name, prices = generator.kind.name, np.array([random.uniform(0.3, 1) for _ in drawn]) / rates
        priced = priced_columns({name: generator}, rates, prices, solver=False) if is_guided else None
        search = Search({name: generator}, [name], rates, prices, SearchBudget(9), most_slots=2, priced=priced)
        search.remainder[:] = 0.0  # rows alone count
        found = search.fill(name, rates, prices)
        possible = all_configurations(generator, rates, 2, 50_000)
        assert found is not None
        assert possible
        best = max(float(np.minimum(rates, config.served) @ prices) for config in possible)
        reached.append(float(np.minimum(rates, found.served) @ prices) / best)
        assert search.budget.left == 8
    assert max(reached) <= 1 + 1e-9
    assert min(reached) >= 0.75
    assert sum(reached) / len(reached) >= 0.95


@given(seed=st.integers(0, 30), chance=st.integers(0, 30))
@settings(max_examples=25)
def test_moves_keep_what_holds(seed: int, chance: int) -> None:
    """Single columns chosen anew leave other devices alone; better batches never serve less."""
    search = search_of(tight(seed, 0.95, 3), 3, 1000, seed=chance)
    generator, weights = search.generators["gpu"], search.row_values
    now: list[DeviceConfiguration | None] = []
    for _ in range(3):
        now.append(search.fill("gpu", search.missing(now), weights))
    then = search._swapped(now, weights)
    assert search.budget.left == 996
    changed = [(old, new) for old, new in zip(now, then, strict=True) if old is not new]
    assert sum(len(set(old.columns) - set(new.columns)) > 0 for old, new in changed if old and new) <= 4
    for new in then:
        assert new is None or generator.config(new.columns) == new
    closed = search._closed(now, weights)
    assert search.missing(closed) @ weights <= search.missing(now) @ weights * (1 + 1e-9)
    for old, new in zip(now, closed, strict=True):
        assert old
        assert new
        assert generator.config(new.columns) == new
        for before, after in zip(old.columns, new.columns, strict=True):
            assert before.size == after.size
            assert {number for number, _ in before.slots} <= {number for number, _ in after.slots}


@given(seed=st.integers(0, 30))
@settings(max_examples=15)
def test_batches_are_bettered_and_loads_added_while_that_helps(seed: int) -> None:
    """From batches of one row: in the end none of all other batches of a column serves more."""
    search = search_of(tight(seed, 0.8, 1), 1, 1000)
    search.remainder[:] = 0.0  # rows alone count
    generator, rates = search.generators["gpu"], search.rates
    start = generator.config((Column(100, ((0, 1),)),))
    assert start
    (end,) = search._closed([start], search.row_values)
    assert end

    def lost(config: DeviceConfiguration) -> float:
        return float(np.maximum(rates - config.served, 0.0) @ search.row_values)

    def lost_by(slots: tuple[tuple[int, int], ...]) -> float:
        """Of a column that is well within its SLOs: the last nanoseconds are left alone."""
        made = generator.config((Column(100, slots),))
        if made is None or any(
            (made.duty_ns[0] + ns) * (1 + 1e-6) > search.generators["gpu"].slo[number]
            for (number, _), ns in zip(slots, made.execution_ns[0], strict=True)
        ):
            return np.inf
        return lost(made)

    (column,) = end.columns
    numbers = [number for number, _ in column.slots]
    assert lost(end) < lost(start)
    for at, number in enumerate(numbers):
        for batch in range(1, 17):
            slots = (*column.slots[:at], (number, batch), *column.slots[at + 1 :])
            assert lost_by(slots) >= lost(end) * (1 - 1e-5)
    for number in set(range(len(rates))) - set(numbers):
        assert len(numbers) == 3 or lost_by((*column.slots, (number, 1))) >= lost(end) * (1 - 1e-5)


@given(seed=st.integers(0, 30), prices=st.lists(st.floats(0.1, 1.0), min_size=8, max_size=8))
@settings(max_examples=25)
def test_executions_are_worked_out_where_they_are_not_known(seed: int, prices: list[float]) -> None:
    search = search_of(tight(seed, 0.9, 3), 3, 10)
    generator, worth = search.generators["gpu"], search.row_values * prices[: len(search.row_values)]
    config = search.fill("gpu", search.rates, worth)
    assert config
    made = search._rebatched(generator, config.columns, search.rates, worth, config.execution_ns)
    assert search._rebatched(generator, config.columns, search.rates, worth) == made
    for only, column in enumerate(config.columns):
        one = search._rebatched(generator, config.columns, search.rates, worth, only=only)
        assert [at for at, each in enumerate(config.columns) if one[at] != each] in ([], [only])
        assert [number for number, _ in one[only].slots] == [number for number, _ in column.slots]


def test_places_of_what_is_lost_or_shared_come_first_every_other_time() -> None:
    loads = [load("small", rate, 250, f"t{n}") for n, rate in enumerate((1.0, 1.0, 1.0, 1e6))]
    search = search_of(loads, 4, 1, is_guided=False)
    fill = search.generators["gpu"].config
    now = [fill((Column(100, tuple((n, 4) for n in own)),)) for own in ((0,), (1,), (0, 2), (3,))]
    places = [(device, 0) for device in range(4)]
    for chance, expected in ((0.4, [0, 1, 2, 3]), (0.6, [0, 2, 3, 1])):
        search.random = cast(np.random.Generator, SimpleNamespace(random=lambda chance=chance: chance))
        assert [device for device, _ in search._related(now, places)] == expected


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60)), min_size=1, max_size=6), st.data())
def test_what_serves_most_is_kept(devices: list[tuple[str, int]], data: st.DataObject) -> None:
    names = [name for name, _ in devices]
    configs = [DeviceConfiguration((), (), (), (float(rate), 1.0), ()) for _, rate in devices]
    kinds = data.draw(st.lists(st.sampled_from("ab"), max_size=6))
    start = kept(kinds, names, configs, np.array([50.0, 1.0]), np.array([0.1, 0.5]))
    assert len(start) == len(kinds)
    for name in "ab":
        own = sorted((min(rate, 50) for each, rate in devices if each == name), reverse=True)
        got = [config.served[0] for kind, config in zip(kinds, start, strict=True) if config and kind == name]
        assert sorted((min(rate, 50) for rate in got), reverse=True) == own[: kinds.count(name)]


@pytest.mark.parametrize("more", [0, 2])
def test_what_fits_on_few_devices_is_planned_on_few(more: int) -> None:
    """With no device more than it takes, where no start serves everything; and with more, of which none is used."""
    planner = Optimal(time_limit_s=0.4, saving_s=0.6, solver=False)
    for share, devices, seed in ((0.7, 2, 3), (0.7, 2, 9), (0.7, 3, 3), (0.8, 3, 1), (0.8, 3, 9)):
        loads = tight(seed, share, devices)
        inventory = [FINE] * (devices + more)
        found = planner.solve(loads, inventory, COSTS)
        assert isinstance(found.plan, Plan), seed
        assert found.price == devices
        assert found.bound <= devices
        assert check_plan(found.plan, loads, inventory, COSTS) == ()


def test_without_any_effort_devices_are_filled_one_after_the_other() -> None:
    """Where two partitions a device are not enough, and no search is made."""
    hasty, paper = Optimal(time_limit_s=0.0, saving_s=0.0, solver=False), Elastic(with_interference=True)
    planned = 0
    for seed in (0, 5, 6, 9, 11):
        loads = tight(seed, 0.7, 2)
        assert isinstance(paper.plan(loads, [FINE] * 2, COSTS), Infeasible)
        plan = hasty.plan(loads, [FINE] * 2, COSTS)
        planned += isinstance(plan, Plan)
        if isinstance(plan, Plan):
            assert check_plan(plan, loads, [FINE] * 2, COSTS) == ()
    assert planned >= 4


def test_of_two_types_the_one_that_serves_more_for_its_price_is_filled() -> None:
    loads = tight(5, 0.6, 2)
    hasty = Optimal(time_limit_s=0.0, saving_s=0.0, solver=False)
    for dear, cheap in (("one", "two"), ("two", "one")):
        kinds = {name: replace(FINE, name=name) for name in ("one", "two")}
        kinds[dear] = replace(kinds[dear], price=3.0)
        believed = table_costs(dict.fromkeys(kinds, latencies(FINE.sizes, 100)), dict.fromkeys(MODELS, GIB))
        plan = hasty.plan(loads, [kinds[name] for name in ("one", "one", "two", "two")], believed)
        assert isinstance(plan, Plan)
        assert {device.device for device in plan.devices} == {cheap}


def test_a_dear_device_gives_way_to_a_cheap_one() -> None:
    loads = [load("small", 40, 120), load("middle", 30, 250), load("deep", 20, 250)]
    found = Optimal(time_limit_s=0.2, saving_s=0.2, solver=False).solve(loads, [GPU, CPU], COSTS)
    assert isinstance(found.plan, Plan)
    assert [device.device for device in found.plan.devices] == ["cpu"]
    assert found.price == CPU.price
