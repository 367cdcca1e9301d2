"""Choosing what to measure: it covers, it saves, it is the same for the same seed; and the curves that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._judge_coruns import ACTIVE, RANDOM, learning_curve, needed
from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun, CoRunner
from cotenant.techniques.partitions.measure.corun_sampler import CoRunSampler, Side, order_by_gain, sides
from noisy_coruns import BATCHES, MODELS, world


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
