"""What a latency model says of what was not measured: between points, beyond them, and on other numbers of cores."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.latency_table import LatencyRow, LatencyTable

MS = 1_000_000
points = st.dictionaries(st.integers(1, 64), st.integers(1_000, 100 * MS), min_size=1, max_size=6)
sizes = st.dictionaries(st.integers(1, 16), points, min_size=1, max_size=4)
_ROUNDED = 1
"""Answers are whole ns, so that neighbours may be off by so much."""


def at(measured: dict[int, dict[int, int]], rows: int, cores: int = 1) -> int:
    return LatencyModel.of_points(measured).latency_ns(0, rows, cores)


@given(points)
def test_a_measured_batch_is_answered_as_measured_and_others_lie_between(measured: dict[int, int]) -> None:
    for rows, ns in measured.items():
        assert at({1: measured}, rows) == ns
    for rows in range(min(measured), max(measured)):
        low = max(size for size in measured if size <= rows)
        high = min(size for size in measured if size >= rows)
        assert min(measured[low], measured[high]) <= at({1: measured}, rows) <= max(measured[low], measured[high])


@given(points)
def test_below_the_smallest_batch_latency_is_that_of_the_smallest(measured: dict[int, int]) -> None:
    least = min(measured)
    assert {at({1: measured}, rows) for rows in range(1, least + 1)} == {measured[least]}


@given(points)
def test_above_the_largest_batch_every_row_costs_something(measured: dict[int, int]) -> None:
    """Also where the last points are level or fall, as measured quantiles do."""
    largest = max(measured)
    told = [at({1: measured}, rows) for rows in range(largest, largest + 20)]
    steps = [b - a for a, b in pairwise(told)]
    assert min(steps) >= 0
    assert told[-1] > told[0]  # by less than a nanosecond a row, where measured times are as close
    assert max(steps) - min(steps) <= 2 * _ROUNDED
    if len(measured) > 1:
        below = sorted(measured)[-2]
        assert steps[0] >= (measured[largest] - measured[below]) / (largest - below) - _ROUNDED


@given(points, st.integers(1, 20))
def test_latency_rises_with_rows_where_the_measured_ones_do(measured: dict[int, int], cores: int) -> None:
    rising = dict(zip(sorted(measured), sorted(measured.values()), strict=True))
    told = [at({1: rising, 8: rising}, rows, cores) for rows in range(1, 80)]
    assert told == sorted(told)


def test_rows_by_hand() -> None:
    rising = {4: 8 * MS, 8: 12 * MS}
    assert at({1: rising}, 2) == 8 * MS
    assert at({1: rising}, 6) == 10 * MS
    assert at({1: rising}, 1024) == 12 * MS + 1016 * MS
    level = {1: 9 * MS, 4: 12 * MS, 8: 12 * MS}
    assert at({1: level}, 16) == pytest.approx(12 * MS + 8 * 3 * MS / 7, abs=1)
    falling = {4: 12 * MS, 8: 8 * MS}
    assert at({1: falling}, 1024) == 1024 * MS
    assert at({1: {4: 8 * MS}}, 6) == 12 * MS


@given(sizes, st.integers(1, 80))
def test_between_core_counts_latency_is_no_less_than_on_the_next_larger(
    measured: dict[int, dict[int, int]], rows: int
) -> None:
    for cores in range(min(measured), max(measured) + 1):
        fewer = max(known for known in measured if known <= cores)
        more = min(known for known in measured if known >= cores)
        told = at(measured, rows, cores)
        assert at(measured, rows, more) <= told <= max(at(measured, rows, fewer), at(measured, rows, more))


@given(sizes, st.integers(1, 80))
def test_outside_the_measured_core_counts_no_latency_is_below_the_nearest(
    measured: dict[int, dict[int, int]], rows: int
) -> None:
    least, most = min(measured), max(measured)
    for cores in range(1, least):
        assert at(measured, rows, cores) == pytest.approx(at(measured, rows, least) * least / cores, abs=1 + least)
    for cores in range(most, most + 5):
        assert at(measured, rows, cores) == at(measured, rows, most)


@given(st.integers(1, 100), st.integers(0, 100), st.lists(st.integers(1, 32), min_size=1, max_size=4))
def test_of_a_model_that_follows_amdahl_no_latency_is_told_too_low(
    parallel: int, serial: int, cores: list[int]
) -> None:
    def truth(count: int) -> float:
        return (serial + parallel / count) * 1e6

    measured = {count: {1: round(truth(count))} for count in cores}
    for count in range(1, max(cores) + 1):
        assert at(measured, 1, count) >= truth(count) - _ROUNDED - 32


def test_cores_by_hand() -> None:
    measured = {1: {1: 80 * MS}, 8: {1: 10 * MS}}
    assert at(measured, 1, 5) == 16 * MS  # speeds of 1/80 and 8/80 a ms: that of five cores is 5/80
    assert [at(measured, 1, cores) for cores in (1, 8, 9)] == [80 * MS, 10 * MS, 10 * MS]
    assert at({4: {1: 10 * MS}}, 1, 1) == 40 * MS
    slower = {1: {1: 10 * MS}, 3: {1: 12 * MS}}
    assert [at(slower, 1, cores) for cores in (1, 2, 3)] == [10 * MS, 12 * MS, 12 * MS]


def test_an_unmeasured_shape_is_answered_by_the_nearest_number() -> None:
    model = LatencyModel(LatencyTable((LatencyRow(0, 1, 1, 10), LatencyRow(4, 1, 1, 40), LatencyRow(4, 8, 2, 60))))
    assert [model.latency_ns(shape, 1, 1) for shape in (0, 1, 2, 3, 4, 9)] == [10, 10, 10, 40, 40, 40]
    assert model.slowest_ns(1, 1) == 40
    assert model.slowest_ns(8, 2) == 80, "at shape 0, which was measured on one core alone"
    assert model.sizes == (1, 2)
    assert (model.most_rows(1), model.most_rows(2)) == (1, 1)


def test_latencies_are_rounded_up_and_tables_have_points() -> None:
    assert LatencyModel.of_points({1: {1: 10, 3: 11}}).latency_ns(0, 2, 1) == 11  # of 10.5
    with pytest.raises(InvalidValueError, match="at least one measured point"):
        LatencyModel.of_points({1: {}})
