"""Choosing what to measure: it covers, it saves, it is the same for the same seed; and the curves that show it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict.interference import CoRun, CoRunner
from cotenant.profile.corun_curve import (
    ACTIVE,
    RANDOM,
    CurvePoint,
    active_order,
    learning_curve,
    needed,
    random_order,
    spread_counts,
)
from cotenant.profile.corun_sampler import CoRunSampler, Side, order_by_gain, sides

MODELS = ("a", "b", "c")
BATCHES = (1, 2, 4, 8, 16, 32)
SIZES = (30, 70)
NOISE = 0.01


def true_factor(target: CoRunner, others: Sequence[CoRunner]) -> float:
    """A known interference function: base and sensitivity by model, batch and size, times the sum of pressures."""
    model, batch, size = target
    number = MODELS.index(model)
    base = 1.02 + 0.25 * (number + 1) / batch**0.5
    sensitivity = (0.6 + 0.3 * number) * (1.3 - size / 150)
    pressure = sum((0.03 + 0.05 * MODELS.index(name)) * rows**0.3 * (part / 50) ** 0.3 for name, rows, part in others)
    return base + sensitivity * pressure


def world() -> list[list[CoRun]]:
    rng = np.random.default_rng(7)
    keys = [
        ((a, i, size), (b, j, 100 - size))
        for size in SIZES
        for a in MODELS
        for i in BATCHES
        for b in MODELS
        for j in BATCHES
    ]
    noise = np.exp(NOISE * rng.standard_normal(len(keys))).tolist()
    return [
        [CoRun(target, (other,), true_factor(target, [other]) * each)]
        for (target, other), each in zip(keys, noise, strict=True)
    ]


def questions(runs: Sequence[Sequence[CoRun]]) -> list[list[Side]]:
    return [[(each.target, each.others) for each in run] for run in runs]


def test_every_launch_is_a_target_beside_the_others() -> None:
    a, b, c = ("a", 1, 1), ("b", 2, 1), ("c", 4, 2)
    assert sides((a, b)) == ((a, (b,)), (b, (a,)))
    assert sides((c, b, a)) == ((c, (a, b)), (b, (a, c)), (a, (b, c)))
    assert sides((a, a)) == ((a, (a,)), (a, (a,)))


def test_active_needs_fewer_measurements_than_random_for_the_same_error() -> None:
    counts = list(range(30, 91, 5))
    curve = learning_curve(world(), counts, (0, 1, 2, 3))
    assert {(point.order, point.count) for point in curve} == {(o, n) for o in (ACTIVE, RANDOM) for n in counts}
    at = {(point.order, point.count): point.p90_error_pct for point in curve}
    for count in (60, 75):
        level = at[RANDOM, count]
        active, chance = (needed(curve, order, "p90_error_pct", level) for order in (ACTIVE, RANDOM))
        assert active is not None
        assert chance is not None
        assert active <= 0.75 * chance, (level, active, chance)


def test_every_target_is_met_before_any_is_met_often() -> None:
    runs = world()
    targets = {each.target for run in runs for each in run}
    chosen = order_by_gain(questions(runs), 2 * len(targets), np.random.default_rng(0))
    met = [runs[number][0].target for number in chosen]
    assert set(met) == targets
    assert max(met.count(target) for target in targets) <= 4
    assert len(set(chosen)) == len(chosen)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 30))
def test_the_same_seed_chooses_the_same_and_each_choice_tells_as_much_as_was_promised(seed: int, count: int) -> None:
    asked = questions(world()[::11])
    sampler = CoRunSampler(asked, np.random.default_rng(seed))
    for number in order_by_gain(asked, count, np.random.default_rng(seed)):
        before, gains = sampler.variance(), sampler.gains()
        assert np.all(gains > 0)
        assert sampler.next() == number
        sampler.take(number)
        assert before - sampler.variance() == pytest.approx(gains[number])
    assert sampler.left == len(asked) - count


def test_few_co_runners_are_met_until_what_is_known_hangs_together() -> None:
    asked = [group for group in questions(world()) if group[0][0][2] == 30]
    targets, others = Counter[CoRunner](), Counter[CoRunner]()
    for number in order_by_gain(asked, 120, np.random.default_rng(0)):
        [(target, (other,))] = asked[number]
        if other not in others and len(others) >= 4 and other[0] in {name for name, _, _ in others}:
            assert min(targets[group[0][0]] for group in asked) >= 2
            assert min(others.values()) >= 3
        targets[target] += 1
        others[other] += 1
    assert {name for name, _, _ in others} == set(MODELS)
    assert 4 < len(others) <= len(MODELS) * len(BATCHES)


def test_what_is_known_is_not_asked_again_and_what_is_not_used_is_asked_last() -> None:
    asked = questions(world()[:40])
    plain = CoRunSampler(asked, np.random.default_rng(0))
    first = plain.next()
    assert first is not None
    informed = CoRunSampler(asked, np.random.default_rng(0), known=asked[first])
    assert informed.gains()[first] < 0.5 * plain.gains()[first]
    rare = asked[first][0][0]
    used = CoRunSampler(asked, np.random.default_rng(0), use=lambda side: 0.0 if side[0] == rare else 1.0)
    assert used.gains()[first] < plain.gains()[first]


def test_a_candidate_that_takes_long_has_to_tell_more() -> None:
    asked = questions(world()[:40])
    first = CoRunSampler(asked, np.random.default_rng(0)).next()
    assert first is not None
    cost = [100.0 if number == first else 1.0 for number in range(len(asked))]
    assert CoRunSampler(asked, np.random.default_rng(0), cost=cost).next() != first


def test_candidates_run_out() -> None:
    asked = questions(world()[:3])
    rng = np.random.default_rng(0)
    sampler = CoRunSampler(asked, rng)
    sampler.skip(0)
    drawn = sampler.random(rng)
    assert drawn in (1, 2)
    sampler.take(drawn)
    last = sampler.next()
    assert last == 3 - drawn
    sampler.take(last)
    assert (sampler.next(), sampler.random(rng), sampler.left) == (None, None, 0)
    assert len(order_by_gain(asked, 10, rng)) == 3


def test_nonsense_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InvalidValueError, match="candidates"):
        CoRunSampler([], rng)
    with pytest.raises(InvalidValueError, match="candidates"):
        CoRunSampler([[]], rng)
    for cost in ([1.0], [1.0, 0.0], [1.0, -1.0]):
        with pytest.raises(InvalidValueError, match="cost"):
            CoRunSampler(questions(world()[:2]), rng, cost=cost)
    with pytest.raises(InvalidValueError, match="at least ten"):
        learning_curve(world()[:9], [2], [0])


def test_the_count_that_is_needed_is_the_one_from_which_the_error_stays() -> None:
    errors = {10: 9.0, 20: 4.0, 30: 6.0, 40: 4.0, 50: 5.0}
    curve = [CurvePoint(ACTIVE, count, error, 2 * error) for count, error in errors.items()]
    assert needed(curve, ACTIVE, "median_error_pct", 5.0) == 40
    assert needed(curve, ACTIVE, "p90_error_pct", 12.0) == 20
    assert needed(curve, ACTIVE, "median_error_pct", 9.0) == 10
    assert needed(curve, ACTIVE, "median_error_pct", 4.5) is None
    assert needed(curve, RANDOM, "median_error_pct", 9.0) is None
    assert needed([*curve, CurvePoint(RANDOM, 10, 1.0, 1.0)], RANDOM, "median_error_pct", 1.0) == 10


def test_orders_take_each_once() -> None:
    runs = world()[:30]
    for order in (active_order, random_order):
        found = order(runs, 30, np.random.default_rng(3))
        assert sorted(found) == list(range(30))
        assert order(runs, 5, np.random.default_rng(3)) == found[:5]


@pytest.mark.parametrize("most", [4, 10, 50, 1800])
def test_counts_spread_up_to_the_most(most: int) -> None:
    counts = spread_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    assert counts[0] >= 1


def test_the_published_pairs_need_fewer_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(os.environ.get("COTENANT_DATA", ""))
    if not (data / "mps_measured" / "solo_latency.csv").exists():
        pytest.skip("needs the papers' data: set COTENANT_DATA to its folder")
    from cotenant.predict.interference_file import read_coruns, read_solo

    folder = data / "mps_measured"
    coruns = read_coruns(folder / "corun_latency_train.csv", read_solo(folder / "solo_latency.csv"))
    curve = learning_curve([[each] for each in coruns], [105, 300], [1])
    at = {(point.order, point.count): point.p90_error_pct for point in curve}
    assert at[ACTIVE, 105] < at[RANDOM, 105]
