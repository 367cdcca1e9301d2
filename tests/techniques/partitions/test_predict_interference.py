"""Interference: sensitivity times pressure; quantiles that hold, and co-runs that are refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun_world import (
    BATCHES,
    MODELS,
    SIZES,
    STREAM,
    fitted,
    measure,
    median_error,
    pairs,
    true_pressure,
    world,
)
from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.coruns import CoRun, CoRunner
from cotenant.techniques.partitions.predict.factors import Known, Scores, Surface
from cotenant.techniques.partitions.predict.interference_fit import errors, fit_pressure

# --- ours: expectation -----------------------------------------------------------------------------------------------


def test_it_predicts_pairs_that_it_has_not_seen() -> None:
    seen = {(c.target, c.others) for c in measure(1, share=0.6)}
    fresh = [CoRun(t, (o,), world(t, [o])) for t, o in pairs() if (t, (o,)) not in seen]
    assert len(fresh) > 100
    assert median_error(fitted(), fresh) < 0.006
    assert np.quantile(np.abs(errors(fitted(), fresh)), 0.9) < 0.025


def test_the_parts_mean_what_they_say() -> None:
    model = fitted()
    for size in SIZES:
        mine = [model.sensitivity(name, batch, size) for name in MODELS for batch in BATCHES]
        assert np.mean(mine) == pytest.approx(1.0)
        pressures = [model.pressure(name, batch, 100 - size) for name in MODELS for batch in BATCHES]
        assert min(pressures) == 0.0
        assert np.corrcoef(pressures, [true_pressure((n, b, 100 - size)) for n in MODELS for b in BATCHES])[0, 1] > 0.97
        assert model.pressure("d", 16, size) > model.pressure("b", 1, size)
        assert model.sensitivity("d", 4, size) > model.sensitivity("a", 4, size)
    assert model.base("a", 1, 50) == pytest.approx(1.12, abs=0.02)


def test_alone_there_is_no_slowdown_and_beside_others_never_a_gain() -> None:
    assert fitted().factor("a", 1, 50, ()) == 1.0
    assert fitted().factor_at(0.99, "a", 1, 50, ()) == 1.0
    quick = [CoRun(("a", 1, 50), (("b", batch, 50),), 0.9) for batch in (1, 2, 4)]
    assert fit_pressure(quick).factor("a", 1, 50, [("b", 2, 50)]) == 1.0


def test_the_device_makes_no_difference() -> None:
    assert fitted().factor("b", 4, 20, [("d", 4, 80)], "gpu") == fitted().factor("b", 4, 20, [("d", 4, 80)])


def test_a_target_that_is_sometimes_slow_keeps_its_usual_factor() -> None:
    model = fit_pressure(measure(3, slow="b"))
    usual = [CoRun(t, (o,), world(t, [o])) for t, o in pairs() if t[0] == "b"]
    assert median_error(model, usual) < 0.03
    others = [CoRun(t, (o,), world(t, [o])) for t, o in pairs() if t[0] != "b"]
    assert median_error(model, others) < 0.01


@pytest.mark.parametrize("seed", [0, 5])
def test_equal_measurements_and_seeds_give_equal_models(seed: int) -> None:
    coruns = measure(2, share=0.3)
    assert fit_pressure(coruns, seed=seed) == fit_pressure(list(coruns), seed=seed)


# --- ours: several co-runners, antagonists ---------------------------------------------------------------------------


def test_pressures_of_several_co_runners_add_up() -> None:
    model = fit_pressure(measure(4, noise=0.002))
    one, two = ("b", 4, 50), ("d", 16, 50)
    alone = [model.factor("c", 4, 50, [each]) for each in (one, two)]
    base = model.base("c", 4, 50)
    assert model.factor("c", 4, 50, [one, two]) == pytest.approx(sum(alone) - base)
    assert model.factor("c", 4, 50, [one, two]) == model.factor("c", 4, 50, [two, one])


def test_it_learns_from_co_runs_of_three() -> None:
    chance = np.random.default_rng(7)
    keys = [(model, batch, 25) for model in MODELS for batch in BATCHES]
    coruns = []
    for _ in range(900):
        target, *others = (keys[at] for at in chance.integers(len(keys), size=int(chance.integers(2, 5))))
        factor = world(target, others) * float(np.exp(chance.normal(0.0, 0.005)))
        coruns.append(CoRun(target, tuple(others), factor))
    model = fit_pressure(coruns[:600])
    assert (model.fewest_others, model.most_others) == (1, 3)
    assert median_error(model, coruns[600:]) < 0.01


def test_a_model_that_only_met_the_antagonist_is_known_to_all() -> None:
    """It was measured beside two levels of it, and it beside the model: no counter, no pair."""
    coruns = measure(8, models=("a", "b", "c"), noise=0.002)
    known = ("a", "b", "c", "d")
    for size in SIZES:
        for model in known:
            for batch in BATCHES:
                key = (model, batch, size)
                levels = [(STREAM, level, 100 - size) for level in (1, 4)]
                coruns += [CoRun(key, (level,), world(key, [level])) for level in levels]
                target = (STREAM, 4, 100 - size)
                coruns.append(CoRun(target, (key,), world(target, [key])))
    model = fit_pressure(coruns)
    fresh = [CoRun(t, (o,), world(t, [o])) for t, o in pairs() if "d" in (t[0], o[0])]
    assert median_error(model, fresh) < 0.01
    assert model.known("d", 4, 50) is Known.MEASURED


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([o for _, o in pairs()]), min_size=1, max_size=4), st.sampled_from([t for t, _ in pairs()])
)
def test_one_more_co_runner_never_lowers_factor_or_quantile(others: list[CoRunner], target: CoRunner) -> None:
    fewer, more = others[:-1], others
    assert fitted().factor(*target, more) >= fitted().factor(*target, fewer)
    assert fitted().factor_at(0.95, *target, more) >= fitted().factor_at(0.95, *target, fewer)


# --- ours: quantiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_quantiles_cover_fresh_runs_and_stay_near_steady_targets(level: float) -> None:
    model = fit_pressure(measure(10, slow="b", share=0.7))
    fresh = measure(11, slow="b")
    uppers = [model.factor_at(level, *c.target, c.others) for c in fresh]
    covered = np.mean([c.factor <= upper for c, upper in zip(fresh, uppers, strict=True)])
    assert level - 0.02 <= covered < 1.0
    steady = [u / model.factor(*c.target, c.others) for c, u in zip(fresh, uppers, strict=True) if c.target[0] != "b"]
    moody = [u / model.factor(*c.target, c.others) for c, u in zip(fresh, uppers, strict=True) if c.target[0] == "b"]
    assert np.median(steady) < 1.06
    assert np.median(moody) - 1 > 4 * (np.median(steady) - 1)


def test_a_higher_quantile_is_never_lower_and_the_median_is_the_factor() -> None:
    model, others = fitted(), [("d", 16, 50)]
    bounds = [model.factor_at(level, "c", 4, 50, others) for level in (0.3, 0.5, 0.9, 0.99, 0.999)]
    assert bounds == sorted(bounds)
    assert bounds[0] == bounds[1] == model.factor("c", 4, 50, others)
    assert bounds[3] > bounds[1]


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("others", [(), (("b", 1, 50),)])
def test_a_quantile_that_is_none_is_refused(level: float, others: tuple[CoRunner, ...]) -> None:
    with pytest.raises(InvalidValueError, match="quantile"):
        fitted().factor_at(level, "a", 1, 50, others)


def test_what_is_less_known_has_a_wider_margin() -> None:
    model, others = fitted(), [("c", 4, 50)]

    def margin(name: str, batch: int, beside: Sequence[CoRunner]) -> float:
        return model.factor_at(0.95, name, batch, 50, beside) / model.factor(name, batch, 50, beside)

    assert [model.known(*key) for key in (("b", 4, 50), ("b", 8, 50), ("new", 4, 50))] == list(Known)
    assert margin("b", 4, others) < margin("b", 8, others)
    assert margin("b", 4, others) < margin("new", 4, others)
    assert margin("b", 4, others) < margin("b", 4, [("new", 4, 50)])
    assert margin("b", 8, [("new", 4, 50)]) == margin("new", 4, others)


def test_a_batch_between_measured_ones_lies_between_them() -> None:
    model, others = fitted(), [("c", 4, 50)]
    low, middle, high = (model.factor("b", batch, 50, others) for batch in (1, 2, 4))
    assert min(low, high) <= middle <= max(low, high)


# --- surfaces --------------------------------------------------------------------------------------------------------

GRID = Surface(
    {("m", 1, 20): (1.0,), ("m", 4, 20): (3.0,), ("m", 1, 60): (5.0,), ("m", 4, 60): (7.0,), ("n", 2, 20): (8.0,)}
)


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        (("m", 4, 20), 3.0, Known.MEASURED),
        (("m", 2, 20), 2.0, Known.BETWEEN),
        (("m", 1, 40), 3.0, Known.BETWEEN),
        (("m", 2, 40), 4.0, Known.BETWEEN),
        (("m", 64, 100), 7.0, Known.BETWEEN),
        (("m", 1, 5), 1.0, Known.BETWEEN),
        (("x", 2, 20), 5.0, Known.FOREIGN),
    ],
)
def test_a_surface_interpolates(key: CoRunner, value: float, known: Known) -> None:
    assert GRID.at(key) == ((pytest.approx(value),), known)
    assert GRID.at(key) == GRID.at(key)


def test_a_surface_needs_values() -> None:
    assert GRID.without([("n", 2, 20)]).models == ("m",)
    with pytest.raises(InvalidValueError, match="at least one"):
        GRID.without(GRID.values)


def test_margins_leave_room_for_the_chance_in_the_scores() -> None:
    values = tuple(float(each) for each in range(1, 101))
    assert Scores(values).margin(0.8) == 88.0  # 80 and 1.645 standard errors of 4, of 101
    assert Scores(values).margin(0.99) == 100.0
    assert Scores((-3.0, -2.0)).margin(0.9) == 0.0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "factor", "names"),
    [
        ((), 1.2, "others"),
        ((("b", 1, 50),), 0.0, "factor"),
        ((("b", 1, 50),), float("nan"), "factor"),
        ((("b", 0, 50),), 1.1, "'b'"),
    ],
)
def test_impossible_co_runs_are_refused(others: tuple[CoRunner, ...], factor: float, names: str) -> None:
    with pytest.raises(InvalidValueError, match=names):
        CoRun(("a", 1, 50), others, factor)


def test_too_few_co_runs_are_refused() -> None:
    one = CoRun(("a", 1, 50), (("b", 1, 50),), 1.2)
    with pytest.raises(InvalidValueError, match="at least two"):
        fit_pressure([one])


def test_two_co_runs_are_enough_for_an_answer() -> None:
    model = fit_pressure([CoRun(("a", 1, 50), (("b", 1, 50),), 1.2), CoRun(("a", 1, 50), (("b", 1, 50),), 1.3)])
    assert 1.2 <= model.factor("a", 1, 50, [("b", 1, 50)]) <= 1.3
    assert model.factor_at(0.95, "a", 1, 50, [("b", 1, 50)]) >= 1.25
