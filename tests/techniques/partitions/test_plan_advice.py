"""Advice and headroom, where the right answer is known: a planner whose limits are given, and SciPy's quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.advice import MOST_GROWTH, Advisor, GrowthLimit, Remedy
from cotenant.techniques.partitions.plan.file import Request
from cotenant.techniques.partitions.plan.poisson_headroom import poisson_rate, with_poisson_headroom
from cotenant.techniques.partitions.plan.types import DEVICES, Costs, DeviceType, Infeasible, Load, Plan
from plan_samples import CPU, GPU, MS, costs, load

Holds = Callable[[Sequence[Load], Sequence[DeviceType]], bool]
HARDLY = 1 + 1 / 128 + 1e-3
"""Seven halvings of an interval, and four digits."""


class Limited:
    """A planner that finds a plan exactly where it is told that there is one, and knows what it was started from."""

    name = "limited"

    def __init__(self, holds: Holds) -> None:
        self._holds = holds

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        if not self._holds(loads, devices):
            return Infeasible(loads[0].tenant, DEVICES, "")
        return running or Plan((), self.name)


def advised(holds: Holds, *loads: Load, devices: Sequence[DeviceType] = (GPU,)) -> list[Remedy]:
    advisor = Advisor(Limited(holds), Request(loads, tuple(devices)), costs())
    broken = advisor.plan()
    assert isinstance(broken, Infeasible)
    return list(advisor.remedies(broken))


@given(least=st.integers(2, 65))
@settings(max_examples=20)
def test_as_many_devices_are_added_as_it_takes(least: int) -> None:
    found = advised(lambda _, there: there.count(CPU) >= least, load("small", 1, 10), devices=[CPU, GPU])
    assert found == [Remedy("devices", "cpu", least - 1, f"{least - 1} more 'cpu', {least} in all")]


def test_more_devices_than_anybody_adds_are_not_advised() -> None:
    assert advised(lambda _, there: len(there) > 65, load("small", 1, 10)) == []


@given(looser=st.floats(1.01, 15.9))
@settings(max_examples=20)
def test_the_least_looser_slos_are_found_to_a_hundredth(looser: float) -> None:
    def holds(loads: Sequence[Load], _: Sequence[DeviceType]) -> bool:
        return loads[0].slo_ns >= looser * 20 * MS

    one, every = advised(holds, load("small", 1, 20), load("deep", 1, 20))
    assert (one.kind, one.name, every.kind, every.name) == ("slo", "small", "slos", "")
    assert looser * 20 * MS <= one.value <= looser * 20 * MS * HARDLY
    assert one.text == f"an SLO of {one.value / MS:.4g} ms for 'small' instead of 20 ms"
    assert looser <= every.value <= looser * HARDLY
    assert every.text == f"all SLOs {every.value:.4g} times as long"


@pytest.mark.parametrize(("looser", "count"), [(15.99, 2), (16.01, 0)])
def test_slos_are_loosened_so_far_and_no_farther(looser: float, count: int) -> None:
    found = advised(lambda loads, _: loads[0].slo_ns >= looser * 20 * MS, load("small", 1, 20))
    assert len(found) == count


@given(most=st.floats(0.11, 99.0))
@settings(max_examples=20)
def test_the_largest_lower_rates_are_found_to_a_hundredth(most: float) -> None:
    def holds(loads: Sequence[Load], _: Sequence[DeviceType]) -> bool:
        return loads[0].rate_per_s <= most

    one, every = advised(holds, load("small", 100, 20), load("deep", 1, 20))
    assert (one.kind, one.name, every.kind, every.name) == ("rate", "small", "rates", "")
    assert most / HARDLY <= one.value <= most
    assert one.text == f"{one.value:.4g} rows/s for 'small' instead of 100"
    assert most / HARDLY <= 100 * every.value <= most
    assert every.text == f"all rates at {100 * every.value:.4g} % of what they are"


def test_of_many_tenants_the_two_that_change_least_are_named() -> None:
    loads = [load("small", 100, 20, name) for name in "abcd"]
    limits = {"a": 30.0, "b": 50.0, "c": 80.0, "d": 10.0}
    found = advised(lambda all_, _: any(each.rate_per_s <= limits[each.tenant] for each in all_), *loads)
    assert [remedy.name for remedy in found] == ["c", "b", ""]


@given(limit=st.floats(1.0, 1000.0))
@settings(max_examples=20)
def test_growth_is_found_to_a_hundredth(limit: float) -> None:
    request = Request((load("small", 10, 20),), (GPU,))
    advisor = Advisor(Limited(lambda loads, _: loads[0].rate_per_s <= 10 * limit), request, costs())
    growth = advisor.growth()
    assert growth.until is not None
    assert growth.factor <= limit * (1 + 1e-9) <= growth.until * (1 + 2e-9)
    assert growth.until <= growth.factor * HARDLY
    assert growth.breaks == Infeasible("small", DEVICES, "")


def test_growth_without_a_limit_ends_somewhere() -> None:
    advisor = Advisor(Limited(lambda *_: True), Request((load("small", 10, 20),), (GPU,)), costs())
    assert advisor.growth() == GrowthLimit(MOST_GROWTH, None, None)
    assert advisor.plan(running := Plan((), "then")) is running


@given(rate=st.floats(0.1, 1e5), window=st.floats(0.001, 2.0), quantile=st.floats(0.01, 0.999))
def test_the_rate_to_plan_for_is_the_quantile_of_scipy(rate: float, window: float, quantile: float) -> None:
    found = poisson_rate(rate, window, quantile)
    counts = [stats.poisson.ppf(near, rate * window) for near in (quantile - 1e-9, quantile + 1e-9)]
    assert found in [pytest.approx(max(rate, count / window)) for count in counts]


def test_headroom_is_that_of_the_slo_of_each_load() -> None:
    made = with_poisson_headroom([load("small", 100, 20), load("deep", 100, 500)], 0.9)
    assert [each.rate_per_s for each in made] == [poisson_rate(100, slo_s, 0.9) for slo_s in (0.02, 0.5)]
    assert made[0].rate_per_s > made[1].rate_per_s > 100


@pytest.mark.parametrize(
    ("rate", "window", "quantile", "named"),
    [
        *((bad, 1.0, 0.5, "rate_per_s") for bad in (0.0, math.inf, math.nan)),
        *((1.0, bad, 0.5, "window_s") for bad in (0.0, math.inf, math.nan)),
        *((1.0, 1.0, bad, "quantile") for bad in (0.0, 1.0, math.nan)),
    ],
)
def test_what_is_no_rate_window_or_quantile_is_named(rate: float, window: float, quantile: float, named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        poisson_rate(rate, window, quantile)
