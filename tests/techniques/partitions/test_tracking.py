"""Rates that are followed, when they ask for another plan, and what is planned when they are too much."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.check import check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.follow import largest_fit
from cotenant.techniques.partitions.plan.tracking import (
    RateVerdict,
    TrackedRate,
    Tracker,
    TrackingSettings,
    compare_rates,
)
from cotenant.techniques.partitions.plan.types import NS_PER_S, Infeasible, Plan
from plan_samples import CPU, costs, load, some_devices, some_loads


def test_the_first_window_is_believed_and_later_ones_move_the_average() -> None:
    tracker = Tracker(TrackingSettings(alpha=0.5, windows=3, quantile=1.0))
    seen = []
    for rows in (10, 20, 0, 0, 0):
        tracker = tracker.after({"a": rows}, NS_PER_S)
        rate = tracker.rates["a"]
        seen.append((rate.ewma, rate.quantile))
    assert seen == [(10, 10), (15, 20), (7.5, 20), (3.75, 20), (1.875, 0)]
    assert tracker.demand() == {"a": 1.875}


def test_windows_of_any_length_give_rates_a_second_and_silence_counts() -> None:
    tracker = Tracker().after({"a": 5}, NS_PER_S // 2).after({"b": 3}, 3 * NS_PER_S)
    assert tracker.rates["a"].recent == (10.0, 0.0)
    assert tracker.rates["b"] == TrackedRate(1.0, 1.0, (1.0,))


def test_the_quantile_is_that_of_the_last_windows() -> None:
    tracker = Tracker(TrackingSettings(quantile=0.9, windows=10))
    for rows in (99, *range(1, 11)):
        tracker = tracker.after({"a": rows}, NS_PER_S)
    assert tracker.rates["a"].quantile == 9  # of 1 to 10: what nine in ten windows did not exceed


@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=40), quantile=st.floats(0, 1), alpha=st.floats(0.01, 1)
)
def test_rates_stay_between_the_least_and_the_most_that_was_seen(
    counts: list[int], quantile: float, alpha: float
) -> None:
    tracker = Tracker(TrackingSettings(alpha=alpha, quantile=quantile))
    for rows in counts:
        tracker = tracker.after({"a": rows}, NS_PER_S)
    rate = tracker.rates["a"]
    assert min(counts) - 1e-6 <= rate.ewma <= max(counts) + 1e-6
    assert rate.quantile in counts[-5:]


SETTINGS = TrackingSettings(headroom=0.1, hysteresis=0.1, patience=2)


def test_a_rise_is_answered_at_once_a_fall_when_it_lasts() -> None:
    served = {"a": 110.0, "b": 55.0}
    assert compare_rates({"a": 100.0, "b": 50.0}, served, SETTINGS) == (RateVerdict.KEEP, 0)
    assert compare_rates({"a": 109.0, "b": 50.0}, served, SETTINGS) == (RateVerdict.KEEP, 0)  # within the hysteresis
    assert compare_rates({"a": 111.0, "b": 50.0}, served, SETTINGS) == (RateVerdict.GROW, 0)
    assert compare_rates({"a": 100.0, "b": 50.0, "new": 0.1}, served, SETTINGS) == (RateVerdict.GROW, 0)
    assert compare_rates({"a": 100.0, "b": 20.0}, served, SETTINGS) == (RateVerdict.KEEP, 1)
    assert compare_rates({"a": 100.0, "b": 20.0}, served, SETTINGS, 1) == (RateVerdict.SHRINK, 0)
    assert compare_rates({"a": 100.0, "b": 50.0}, served, SETTINGS, 1) == (RateVerdict.KEEP, 0)  # it did not last
    assert compare_rates({"a": 111.0, "b": 20.0}, served, SETTINGS, 1) == (RateVerdict.GROW, 0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (partial(TrackingSettings, alpha=0), "alpha"),
        (partial(TrackingSettings, quantile=1.1), "quantile"),
        (partial(TrackingSettings, windows=0), "windows"),
        (partial(TrackingSettings, headroom=-1), "headroom"),
        (partial(TrackingSettings, hysteresis=1), "hysteresis"),
        (partial(TrackingSettings, patience=0), "patience"),
        (partial(Tracker().after, {}, 0), "window_ns"),
    ],
)
def test_values_out_of_range_are_named(make: partial[object], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        make()


def test_where_rates_are_too_much_the_largest_share_that_fits_is_planned() -> None:
    known, planner = costs(), Elastic(with_interference=True, headroom=0.1)
    loads = [load("middle", 300, 60), load("small", 100, 60)]
    assert isinstance(planner.plan(loads, [CPU], known), Plan)
    assert largest_fit(planner, loads, [CPU], known).share == 1.0
    many = [load("middle", 3000, 60), load("small", 1000, 60)]
    fitted = largest_fit(planner, many, [CPU], known)
    assert 0.1 <= fitted.share < 1
    assert fitted.plan is not None
    assert fitted.breaks is not None
    assert fitted.breaks.tenant in ("middle", "small")
    assert check_plan(fitted.plan, many, [CPU], known, fitted.share * 0.999) == ()
    more = [load("middle", 3000 * (fitted.share + 0.02), 60), load("small", 1000 * (fitted.share + 0.02), 60)]
    assert isinstance(planner.plan(more, [CPU], known), Infeasible)


def test_what_fits_at_no_rate_says_why() -> None:
    fitted = largest_fit(Elastic(), [load("heavy", 10, 5)], [CPU], costs())
    assert (fitted.plan, fitted.share) == (None, 0.0)
    assert fitted.breaks is not None
    assert fitted.breaks.constraint == "latency"


@given(loads=some_loads(3, 3000), devices=some_devices(1))
def test_a_plan_for_a_share_passes_the_check_at_that_share(loads: list, devices: list) -> None:  # type: ignore[type-arg]
    known = costs()
    fitted = largest_fit(Elastic(with_interference=True), loads, devices, known)
    if fitted.plan is not None:
        assert check_plan(fitted.plan, loads, devices, known, fitted.share * (1 - 1e-6)) == ()
    assert (fitted.breaks is None) == (fitted.share == 1.0)


def test_more_than_a_plan_serves_is_more_than_chance_makes_of_it() -> None:
    def above(*rates: float, was: bool = False) -> bool:
        return TrackedRate(recent=rates).is_above(10.0, 2.0, was)

    assert not above(14.0)  # 28 rows where 20 are served: 1.8 deviations
    assert above(25.0)
    assert above(14.0, 14.0, 14.0, 14.0, 14.0)
    assert not above(10.9, *[10.9] * 999)  # by less than a tenth, however sure it is
    assert above(10.9, was=True)
    assert not above(10.4, was=True)
    assert not TrackedRate().is_above(10.0, 2.0)
