"""Rules of blocks against what trying everything says."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_models import random_spans, spans_of, unit_ns
from cotenant.core.predictor import Spans
from cotenant.techniques.layer_blocks.policy.rules import (
    FIELDS,
    FIXED,
    PAUSED,
    RUNS,
    WAITS,
    drawn_now,
    fill_averages,
    fill_tight,
    first_pivot,
    grown_due,
    least_cores,
    level_of,
    pressure_of,
    rate_of,
    threshold_of,
    version_at,
)
from cotenant.techniques.layer_blocks.policy.rules_slack import (
    cheapest_in_time,
    dearest_within,
    end_within,
    fill_plan,
    fill_plans,
    version_for,
)
from cotenant.techniques.layer_blocks.policy.tables import PRICES, choices_of

SOME = settings(max_examples=60, deadline=None, database=None)
SEEDS = st.integers(0, 10_000)


def core_of(spans: Spans, level: int, start: int, end: int, budget: float, version: int = 0) -> int:
    """Core(l) by trying all: the first number that meets the budget, else the first of the least time."""
    takes = [spans.block_ns(start, end, version, level, count) for count in range(1, spans.cores + 1)]
    return next((at for at, each in enumerate(takes, 1) if each <= budget), takes.index(min(takes)) + 1)


def blocks_of(spans: Spans, tight: list[float], level: int, bound: int, rate: float) -> list[tuple[int, int]]:
    base, start, made = (level * spans.cores + bound - 1) * spans.units, 0, []
    while start < spans.units:
        end = first_pivot(tight, base, spans.units, start, rate)
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
    found = least_cores(spans[:4], spans.ns, 0, 1, 1, start, end, budget, 64)
    assert found == core_of(spans, 1, start, end, budget, 1)
    averages = [0, 0]
    fill_averages(spans[:4], spans.ns, 0, True, spans.cores, budget, averages)
    assert averages == [core_of(spans, at, 0, spans.units, budget, at) for at in (0, 1)]


@SOME
@given(SEEDS, st.floats(0.5, 6), st.integers(1, 8))
def test_pivots_are_the_units_that_ask_for_more(seed: int, rate: float, bound: int) -> None:
    rng = Random(seed)
    spans = random_spans(rng, rng.randint(1, 9), 8, 2)
    tight = [0.0] * (2 * 8 * spans.units)
    fill_tight(spans[:4], spans.ns, 0, True, 8, tight)
    level = rng.randrange(2)
    blocks = blocks_of(spans, tight, level, bound, rate)
    assert [unit for block in blocks for unit in range(*block)] == list(range(spans.units)), "each unit once"
    for unit in range(spans.units):
        budget = rate * unit_ns(spans, 0, 0, 8, unit)
        asks = core_of(spans, level, unit, unit + 1, budget, level)
        is_pivot = unit in [start for start, _ in blocks[1:]]
        assert is_pivot == (unit > 0 and asks > bound), "strictly more than the bound"


def test_at_a_bound_of_all_cores_or_with_equal_units_nothing_is_cut() -> None:
    even = spans_of([[[[100] * 5, [50] * 5, [34] * 5]]], [[[0] * 5] * 3])
    tight = [0.0] * 15
    fill_tight(even[:4], even.ns, 0, False, 3, tight)
    assert blocks_of(even, tight, 0, 2, 50 / 34) == [(0, 5)]  # each asks for two, which is no more than two
    assert blocks_of(even, tight, 0, 1, 50 / 34) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert blocks_of(even, tight, 0, 3, 0.0) == [(0, 5)]


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
    spans = spans_of([[[[10, 20, 30]]]], [[[0, 0, 0]]])
    job = [0, PAUSED, 1000, 1300, 1, 0, 0, 0, 0, 0, 0, 0]
    assert rate_of(spans[:4], spans.ns, job, 0, 1100, 0.5, False, 1) == 0.5 * 300 / 60
    assert rate_of(spans[:4], spans.ns, job, 0, 1100, 0.5, True, 1) == 0.5 * 200 / 50
    assert rate_of(spans[:4], spans.ns, job, 0, 1300, 0.5, True, 1) == 0.5 * 300 / 60, "its deadline has passed"


def test_the_pressure_leaves_out_what_is_soon_over_and_oneself() -> None:
    spans = spans_of([[[[50, 50]]]], [[[400, 600]]])
    dims, moved = spans[:4], [spans.moved]
    runs = [0, FIXED, 0, 0, 0, 2, 1, 0, 0, 100, 200, 0]
    first = [0, RUNS, 0, 0, 0, 1, 1, 0, 0, 100, 150, 0]
    jobs = [*runs, *first, 0, WAITS, *[0] * 10]
    assert drawn_now(dims, moved, jobs, 3, 120, -1) == 1000 / 100 + 400 / 50
    assert drawn_now(dims, moved, jobs, 3, 120, 0) == 400 / 50
    assert drawn_now(dims, moved, jobs, 3, 145, -1) == 1000 / 100, "5 of 50 ns are left of the other"
    assert [pressure_of(6.0, 24.0, 0.5), pressure_of(18.0, 12.0, 0.5), pressure_of(18.0, 0.0, 0.5)] == [0.75, 1.0, 0.5]
    assert [level_of(at, 5) for at in (0.0, 0.12, 0.13, 0.5, 1.0)] == [0, 0, 1, 2, 4]
    assert [level_of(at, 1) for at in (0.0, 1.0)] == [0, 0]
    assert [version_at((1, 3, 5, 1), 0, at) for at in range(5)] == [0, 1, 2, 2, 2]


def test_a_block_that_grows_ends_as_its_units_do() -> None:
    spans = spans_of([[[[100, 100, 100], [50, 50, 50], [50, 50, 50], [25, 25, 25]]]], [[[0] * 3] * 4])
    job = [0, RUNS, 0, 0, 0, 3, 1, 4, 0, 1000, 1300, 0]
    assert len(job) == FIELDS
    assert [grown_due(spans[:4], spans.ns, job, 0, now, 4) for now in (1000, 1100, 1101, 1201)] == [
        1150,
        1150,
        1225,
        1300,
    ]


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
@given(SEEDS, st.sampled_from([0.0, 1.0, 5.0, 40.0]), st.sampled_from([0.0, 20.0, 500.0]), st.sampled_from([0.0, 0.7]))
def test_a_plan_is_the_best_of_all(seed: int, price: float, switch: float, byte: float) -> None:
    spans = random_spans(Random(seed), 5, 4)
    choices = (1, 2, 4)
    ends, widths, lefts, works = [0] * 5, [0] * 5, [0] * 6, [0] * 6
    scratch = [0.0] * 3, [0] * 3, [0] * 3, [0] * 3
    fill_plan(
        *(spans[:4], spans.ns, spans.moved, 0, 0, price, switch, byte, choices),
        *(*scratch, ends, widths, lefts, works, 0),
    )
    for start in range(5):
        made: list[int] = []
        while start + len(made) < 5:  # a plan is looked up anew at each end, which changes nothing
            at = start + len(made)
            made += [widths[at]] * (ends[at] - at)
        best = min(cost_of(spans, price, switch, byte, each, start) for each in product(choices, repeat=5 - start))
        planned = cost_of(spans, price, switch, byte, tuple(made), start)
        assert planned <= best * (1 + 1e-9) + 1e-6
        assert lefts[start] == sum(unit_ns(spans, 0, 0, cores, start + at) for at, cores in enumerate(made))
        assert works[start] == sum(cores * unit_ns(spans, 0, 0, cores, start + at) for at, cores in enumerate(made))


@SOME
@given(SEEDS)
def test_dearer_time_is_shorter_and_costs_more_cores(seed: int) -> None:
    rng = Random(seed)
    spans = random_spans(rng, rng.randint(1, 8), 8, 2)
    count, units, choices = len(PRICES), spans.units, choices_of(8)
    scratch = [0.0] * len(choices), [0] * len(choices), [0] * len(choices), [0] * len(choices)
    ends, widths = [0] * (2 * count * units), [0] * (2 * count * units)
    lefts, works, preferred = [0] * (2 * count * (units + 1)), [0] * (2 * count * (units + 1)), [0, 0]
    target = rng.uniform(0.5, 4) * spans.block_ns(0, units, 0, 0, 8)
    fill_plans(
        *(spans[:4], spans.ns, spans.moved, 0, PRICES, 0.0, 0.0, choices, target),
        *(*scratch, ends, widths, lefts, works, preferred),
    )
    for level in (0, 1):
        at = level * count * (units + 1)
        times = [lefts[at + price * (units + 1)] for price in range(count)]
        cores = [works[at + price * (units + 1)] for price in range(count)]
        assert times == sorted(times, reverse=True)
        assert cores == sorted(cores)
        chosen = cheapest_in_time(lefts, at, units + 1, count, 0, target)
        assert chosen == preferred[level] == next((p for p in range(count) if times[p] <= target), count - 1)
        plan, unit = level * count * units, rng.randrange(units)
        first = [widths[plan + price * units + unit] for price in range(count)]
        assert first == sorted(first), "without a price of switching each unit is by itself"
        for most in range(1, 9):
            found = dearest_within(widths, plan, units, count, unit, most)
            assert found == max([price for price in range(count) if first[price] <= most], default=0)


def test_a_block_ends_within_its_quantum_and_runs_a_unit() -> None:
    spans = spans_of([[[[100, 50, 50, 200]]]], [[[0] * 4]])
    assert [end_within(spans.ns, 0, 0, 4, each) for each in (1, 100, 150, 199, 200, 400)] == [1, 1, 2, 2, 3, 4]
    assert end_within(spans.ns, 0, 1, 2, 1000) == 2


@pytest.mark.parametrize(("byte", "version"), [(0.0, 0), (0.01, 0), (0.02, 1)])
def test_traffic_has_its_price_among_versions(byte: float, version: int) -> None:
    spans = spans_of([[[[100]]], [[[110]]]], [[[1000]], [[100]]])
    assert version_for(spans[:4], spans.ns, spans.moved, 0, 0, byte, 0, 1, 1) == version
    two = spans_of([[[[100]], [[100]]], [[[110]], [[110]]]], [[[1000]], [[100]]])
    assert version_for(two[:4], two.ns, two.moved, 0, 1, 0.0, 0, 1, 1) == 1, "none that is made for less pressure"


@SOME
@given(SEEDS)
def test_dearer_traffic_is_less(seed: int) -> None:
    spans = random_spans(Random(seed), 4, 4, 3)
    moves = []
    for byte in (0.0, 0.2, 1.0, 50.0):
        version = version_for(spans[:4], spans.ns, spans.moved, 0, 0, byte, 0, 4, 2)
        moves.append(spans.block_bytes(0, 4, version, 2))
    assert moves == sorted(moves, reverse=True)


def test_choices_are_all_of_few_and_some_of_many() -> None:
    assert choices_of(1) == (1,)
    assert choices_of(8) == tuple(range(1, 9))
    assert choices_of(64)[:9] == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert choices_of(64)[-1] == 64
    assert all(b <= a + max(1, a // 4) for a, b in zip(choices_of(64), choices_of(64)[1:], strict=False))
