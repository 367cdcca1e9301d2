"""Rules of blocks against what trying everything says."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_models import random_spans, spans_of, unit_ns
from block_sides import Side, model_of
from cotenant.core.predictor import Spans
from cotenant.techniques.layer_blocks.policy.block_jobs import BlockSnapshot
from cotenant.techniques.layer_blocks.policy.block_model import BlockModel
from cotenant.techniques.layer_blocks.policy.price_plans import PRICES, choices_of
from cotenant.techniques.layer_blocks.policy.published import BlockRules, first_pivot, threshold_of

SOME = settings(max_examples=60, deadline=None, database=None)
SEEDS = st.integers(0, 10_000)


def core_of(spans: Spans, level: int, start: int, end: int, budget: float, version: int = 0) -> int:
    """Core(l) by trying all: the first number that meets the budget, else the first of the least time."""
    takes = [spans.block_ns(start, end, version, level, count) for count in range(1, spans.cores + 1)]
    return next((at for at, each in enumerate(takes, 1) if each <= budget), takes.index(min(takes)) + 1)


def blocks_of(model: BlockModel, level: int, bound: int, rate: float) -> list[tuple[int, int]]:
    start, made = 0, []
    while start < model.units:
        end = first_pivot(model.tight[level][bound - 1], start, rate)
        made.append((start, end))
        start = end
    return made


@SOME
@given(SEEDS, st.floats(0, 3))
def test_the_fewest_cores_are_those_of_trying_all(seed: int, share: float) -> None:
    rng = Random(seed)
    spans = random_spans(rng, rng.randint(1, 6), rng.randint(1, 9), 2)
    start = rng.randrange(spans.units)
    end = rng.randint(start + 1, spans.units)
    budget = share * spans.block_ns(start, end, 1, 1, max(1, spans.cores // 2))
    model = model_of(spans)
    assert model.least_cores(1, 1, start, end, budget, 64) == core_of(spans, 1, start, end, budget, 1)
    model.add_pivots(True, budget)
    assert model.averages == [core_of(spans, at, 0, spans.units, budget, at) for at in (0, 1)]


@SOME
@given(SEEDS, st.floats(0.5, 6), st.integers(1, 8))
def test_pivots_are_the_units_that_ask_for_more(seed: int, rate: float, bound: int) -> None:
    rng = Random(seed)
    spans = random_spans(rng, rng.randint(1, 9), 8, 2)
    model = model_of(spans)
    model.add_pivots(True, 0.0)
    level = rng.randrange(2)
    blocks = blocks_of(model, level, bound, rate)
    assert [unit for block in blocks for unit in range(*block)] == list(range(spans.units)), "each unit once"
    for unit in range(spans.units):
        budget = rate * unit_ns(spans, 0, 0, 8, unit)
        asks = core_of(spans, level, unit, unit + 1, budget, level)
        is_pivot = unit in [start for start, _ in blocks[1:]]
        assert is_pivot == (unit > 0 and asks > bound), "strictly more than the bound"


def test_at_a_bound_of_all_cores_or_with_equal_units_nothing_is_cut() -> None:
    model = model_of(spans_of([[[[100] * 5, [50] * 5, [34] * 5]]], [[[0] * 5] * 3]))
    model.add_pivots(False, 0.0)
    assert blocks_of(model, 0, 2, 50 / 34) == [(0, 5)]  # each asks for two, which is no more than two
    assert blocks_of(model, 0, 1, 50 / 34) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert blocks_of(model, 0, 3, 0.0) == [(0, 5)]


def test_the_threshold_shares_out_what_is_idle() -> None:
    assert [threshold_of(each, 48, 64) for each in (12, 12, 24)] == [4, 4, 8]  # the example of section 4.3
    assert threshold_of(20, 70, 64) == threshold_of(20, 64, 64) == 0
    assert threshold_of(13, 13, 64) == 51


@SOME
@given(st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_thresholds_never_give_out_more_than_is_idle(averages: list[int]) -> None:
    given_out = sum(threshold_of(each, sum(averages), 64) for each in averages)
    assert 0 <= given_out <= max(0, 64 - sum(averages))


def test_budgets_are_static_or_of_what_is_left() -> None:
    side = Side([spans_of([[[[10, 20, 30]]]], [[[0, 0, 0]]])], 1)
    job, static, planned = side.paused(0, 0, 1000, 1300, 1), BlockRules(0.5, False, True), BlockRules(0.5, True, True)
    assert static.rate_of(job, 1100) == 0.5 * 300 / 60
    assert planned.rate_of(job, 1100) == 0.5 * 200 / 50
    assert planned.rate_of(job, 1300) == 0.5 * 300 / 60, "its deadline has passed"


def test_the_pressure_leaves_out_what_is_soon_over() -> None:
    side = Side([spans_of([[[[50, 50]]]], [[[400, 600]]])], 1)
    runs = side.runs(0, 0, 0, 0, 2, 1, since=100, due=200)
    first = side.runs(1, 0, 0, 0, 1, 1, since=100, due=150)
    assert side.sees([runs, first, side.waits(2, 0, 0, 0)], 120, 0).drawn() == 1000 / 100 + 400 / 50
    assert side.sees([runs, first], 145, 0).drawn() == 1000 / 100, "5 of 50 ns are left of the other"

    def pressure(drawn: float, bandwidth: float) -> float:
        return BlockSnapshot(0, 0, 1, bandwidth, 0.5, False, [], []).pressure(drawn)

    assert [pressure(6.0, 24.0), pressure(18.0, 12.0), pressure(18.0, 0.0)] == [0.75, 1.0, 0.5]
    five, one = (model_of(random_spans(Random(1), 1, 1, levels)) for levels in (5, 1))
    assert [five.level_of(at) for at in (0.0, 0.12, 0.13, 0.5, 1.0)] == [0, 0, 1, 2, 4]
    assert [one.level_of(at) for at in (0.0, 1.0)] == [0, 0]
    three = model_of(Spans(1, 3, 5, 1, [0, 1] * 15, [0, 1] * 3))
    assert [three.version_at(at) for at in range(5)] == [0, 1, 2, 2, 2]


def test_a_block_that_grows_ends_as_its_units_do() -> None:
    times = [[[[100, 100, 100], [50, 50, 50], [50, 50, 50], [25, 25, 25]]]]
    side = Side([spans_of(times, [[[0] * 3] * 4])], 4)
    block = side.runs(0, 0, 0, 0, 3, 1, since=1000, due=1300, wanted=4)
    assert [block.expanded_due_ns(4, now) for now in (1000, 1100, 1101, 1201)] == [1150, 1150, 1225, 1300]


# --- plans ------------------------------------------------------------------------------------------------------------


def cost_of(spans: Spans, price: float, switch: float, byte: float, cores: tuple[int, ...], start: int) -> float:
    total = 0.0
    for at in range(len(cores) - 1, -1, -1):
        unit = start + at
        total += (cores[at] + price) * unit_ns(spans, 0, 0, cores[at], unit)
        total += byte * spans.block_bytes(unit, unit + 1, 0, cores[at])
        if at + 1 < len(cores) and cores[at] != cores[at + 1]:
            total += switch * (cores[at] + price)
    return total


@SOME
@given(SEEDS, st.sampled_from([0, 1, 4, 6]), st.sampled_from([0.0, 20.0, 500.0]), st.sampled_from([0.0, 0.7]))
def test_a_plan_is_the_best_of_all(seed: int, price: int, switch: float, byte: float) -> None:
    spans = random_spans(Random(seed), 5, 4)
    model, choices = model_of(spans), (1, 2, 4)
    model.add_plans(choices, byte, 0.0, switch)
    (plans,) = model.plans
    for start in range(5):
        made: list[int] = []
        while start + len(made) < 5:  # a plan is looked up anew at each end, which changes nothing
            at = start + len(made)
            made += [plans[at].cores[price]] * (plans[at].ends[price] - at)
        ways = product(choices, repeat=5 - start)
        best = min(cost_of(spans, PRICES[price], switch, byte, each, start) for each in ways)
        planned = cost_of(spans, PRICES[price], switch, byte, tuple(made), start)
        assert planned <= best * (1 + 1e-9) + 1e-6
        takes = [unit_ns(spans, 0, 0, cores, start + at) for at, cores in enumerate(made)]
        assert plans[start].left_ns[price] == -plans[start].saved_ns[price] == sum(takes)
        assert plans[start].work_ns[price] == sum(cores * each for cores, each in zip(made, takes, strict=True))


@SOME
@given(SEEDS)
def test_dearer_time_is_shorter_and_costs_more_cores(seed: int) -> None:
    rng = Random(seed)
    spans = random_spans(rng, rng.randint(1, 8), 8, 2)
    model, count, units = model_of(spans), len(PRICES), spans.units
    target = rng.uniform(0.5, 4) * spans.block_ns(0, units, 0, 0, 8)
    model.add_plans(choices_of(8), 0.0, target, 0.0)
    for plans, preferred in zip(model.plans, model.preferred, strict=True):
        times = plans[0].left_ns
        assert list(times) == sorted(times, reverse=True)
        assert list(plans[0].work_ns) == sorted(plans[0].work_ns)
        chosen = plans[0].cheapest_within(target)
        assert chosen == preferred == next((p for p in range(count) if times[p] <= target), count - 1)
        here = plans[rng.randrange(units)]
        assert list(here.cores) == sorted(here.cores), "without a price of switching each unit is by itself"
        for most in range(1, 9):
            found = here.dearest_within(most)
            assert found == max([price for price in range(count) if here.cores[price] <= most], default=0)


def test_a_block_ends_within_its_quantum_and_runs_a_unit() -> None:
    model = model_of(spans_of([[[[100, 50, 50, 200]]]], [[[0] * 4]]))
    ends = {quantum: model.end_within(0, 0, 1, 0, 4, quantum) for quantum in (1, 100, 150, 199.9, 200, 400)}
    assert ends == {1: (1, 100), 100: (1, 100), 150: (2, 150), 199.9: (2, 150), 200: (3, 200), 400: (4, 400)}
    assert model.end_within(0, 0, 1, 1, 2, 1000) == (2, 50)


@pytest.mark.parametrize(("byte", "version"), [(0.0, 0), (0.01, 0), (0.02, 1)])
def test_traffic_has_its_price_among_versions(byte: float, version: int) -> None:
    model = model_of(spans_of([[[[100]]], [[[110]]]], [[[1000]], [[100]]]))
    assert model.cheapest_version(0, byte, 0, 1, 1) == version
    two = model_of(spans_of([[[[100]], [[100]]], [[[110]], [[110]]]], [[[1000]], [[100]]]))
    assert two.cheapest_version(1, 0.0, 0, 1, 1) == 1, "none that is made for less pressure"


@SOME
@given(SEEDS)
def test_dearer_traffic_is_less(seed: int) -> None:
    spans = random_spans(Random(seed), 4, 4, 3)
    versions = [model_of(spans).cheapest_version(0, byte, 0, 4, 2) for byte in (0.0, 0.2, 1.0, 50.0)]
    moves = [spans.block_bytes(0, 4, version, 2) for version in versions]
    assert moves == sorted(moves, reverse=True)


def test_choices_are_all_of_few_and_some_of_many() -> None:
    assert choices_of(1) == (1,)
    assert choices_of(8) == tuple(range(1, 9))
    assert choices_of(64)[:9] == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert choices_of(64)[-1] == 64
    assert all(b <= a + max(1, a // 4) for a, b in zip(choices_of(64), choices_of(64)[1:], strict=False))
