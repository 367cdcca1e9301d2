"""What tells the pressure on the memory: scales that rise, and a linear model of counters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict.pressure import (
    CacheReading,
    CounterModel,
    SlowdownScale,
    fit_counters,
    fit_slowdowns,
)

share = st.floats(0.0, 1.0)


def test_a_scale_is_read_between_its_points() -> None:
    scale = SlowdownScale(((1.0, 0.0), (1.5, 0.5), (2.5, 1.0)))
    assert [scale.pressure(at) for at in (0.7, 1.0, 1.25, 1.5, 2.0, 9.0)] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("points", [(), ((1.0, 0.5), (1.2, 0.2)), ((1.2, 0.1), (1.1, 0.2)), ((1.0, 0.0), (2.0, 1.1))])
def test_points_that_do_not_rise_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidValueError, match="slowdown scale: points"):
        SlowdownScale(points)


@given(st.lists(st.tuples(share, st.floats(1.0, 3.0)), min_size=1, max_size=8, unique_by=lambda each: each[0]))
def test_a_fitted_scale_rises_and_keeps_the_means(pairs: list[tuple[float, float]]) -> None:
    pressures, slowdowns = zip(*pairs, strict=True)
    found = fit_slowdowns(slowdowns, pressures, least=-1.0)
    assert found is not None
    told = [found.pressure(at) for at in sorted(slowdowns)]
    assert told == sorted(told)
    assert found.points[-1][0] <= max(slowdowns)
    assert found.points[0][0] >= min(slowdowns)
    if list(slowdowns) == sorted(set(slowdowns)) and list(pressures) == sorted(pressures):
        assert found.points == tuple(zip(slowdowns, pressures, strict=True))


def test_slowdowns_that_fall_are_averaged_and_flat_ones_tell_nothing() -> None:
    found = fit_slowdowns([1.0, 1.4, 1.2, 2.0], [0.0, 0.3, 0.5, 1.0])
    assert found is not None
    assert found.points == ((1.0, 0.0), (pytest.approx(1.3), pytest.approx(0.4)), (2.0, 1.0))
    assert fit_slowdowns([1.0, 1.01], [0.0, 0.6]) is None


def test_the_linear_model_is_found_again_and_cut_off() -> None:
    random = np.random.default_rng(1)
    readings = [CacheReading(float(a), float(m)) for a, m in random.uniform((0, 0), (2e9, 1), (30, 2))]
    right = CounterModel(0.05, 2.5e-10, 0.4)
    found = fit_counters(readings, [0.05 + 2.5e-10 * each.accesses_per_s + 0.4 * each.miss_rate for each in readings])
    assert found.constant == pytest.approx(right.constant)
    assert found.per_access_per_s == pytest.approx(right.per_access_per_s)
    assert found.per_miss_rate == pytest.approx(right.per_miss_rate)
    assert found.pressure(CacheReading(1e12, 1.0)) == 1.0
    assert CounterModel(-1.0, 0.0, 0.5).pressure(CacheReading(0.0, 1.0)) == 0.0
    noisy = [right.pressure(each) + float(random.normal(0, 0.01)) for each in readings if right.pressure(each) < 1]
    rough = fit_counters([each for each in readings if right.pressure(each) < 1], noisy)
    assert rough.per_miss_rate == pytest.approx(0.4, abs=0.05)


def test_too_few_readings_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="counter model: readings is 3, expected at least 4"):
        fit_counters([CacheReading(1.0, 0.1)] * 3, [0.1] * 3)
    with pytest.raises(InvalidValueError, match="as many as pressures"):
        fit_counters([CacheReading(1.0, 0.1)] * 5, [0.1] * 4)
