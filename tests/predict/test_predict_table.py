"""What a table says of what was not measured: between points, beyond them, and on other numbers of cores."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict import table as table_module
from cotenant.predict.table import TablePredictor, interpolate
from cotenant.profile.latency_table import LatencyRow, LatencyTable
from cotenant.profile.version_table import Implementation, UnitVersions, VersionTable
from cotenant.work import Work

MS = 1_000_000
points = st.dictionaries(st.integers(1, 64), st.integers(1_000, 100 * MS), min_size=1, max_size=6)


def rows_of(measured: dict[int, dict[int, int]]) -> tuple[LatencyRow, ...]:
    """Rows from latencies by cores and batch."""
    return tuple(LatencyRow(0, items, cores, ns) for cores, of in measured.items() for items, ns in of.items())


def at(measured: dict[int, dict[int, int]], items: int, cores: int = 1) -> float:
    return interpolate(rows_of(measured), 0, items, cores)


@given(points)
def test_what_was_measured_is_answered_as_it_is_and_the_rest_between(measured: dict[int, int]) -> None:
    for items, ns in measured.items():
        assert at({1: measured}, items) == ns
    for items in range(min(measured), max(measured)):
        low = max(size for size in measured if size <= items)
        high = min(size for size in measured if size >= items)
        assert min(measured[low], measured[high]) <= at({1: measured}, items) + 1e-6
        assert at({1: measured}, items) <= max(measured[low], measured[high]) + 1e-6


@given(points)
def test_below_the_smallest_batch_no_row_is_cheaper_than_in_it(measured: dict[int, int]) -> None:
    least = min(measured)
    before = 0.0
    for items in range(1, least + 1):
        ns = at({1: measured}, items)
        assert measured[least] * items / least <= ns * (1 + 1e-9)
        assert before <= ns <= measured[least]
        before = ns


@given(points)
def test_beyond_the_largest_batch_every_row_costs_something(measured: dict[int, int]) -> None:
    """Also where the last points are level or fall, as measured medians do."""
    largest = max(measured)
    told = [at({1: measured}, items) for items in range(largest, largest + 20)]
    steps = [b - a for a, b in pairwise(told)]
    assert min(steps) > 0
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)
    if len(measured) > 1:
        below = sorted(measured)[-2]
        assert steps[0] >= (measured[largest] - measured[below]) / (largest - below) * (1 - 1e-6)


def test_by_hand() -> None:
    rising = {4: 8 * MS, 8: 12 * MS}
    assert at({1: rising}, 2) == 6 * MS  # a fixed part, and the same for each row
    assert at({1: rising}, 1024) == 12 * MS + 1016 * MS
    steep = {4: 10 * MS, 8: 30 * MS}
    assert at({1: steep}, 1) == 2.5 * MS  # the line would be below nothing
    level = {1: 9 * MS, 4: 12 * MS, 8: 12 * MS}
    assert at({1: level}, 16) == pytest.approx(12 * MS + 8 * 3 * MS / 7)
    falling = {4: 12 * MS, 8: 8 * MS}
    assert at({1: falling}, 1024) == 1024 * MS
    assert at({1: falling}, 1) == 12 * MS
    assert at({1: {4: 8 * MS}}, 2) == 4 * MS


@given(st.dictionaries(st.integers(1, 16), points, min_size=1, max_size=4), st.integers(1, 80))
def test_other_core_counts_lie_between_those_that_were_measured(measured: dict[int, dict[int, int]], rows: int) -> None:
    for cores in range(1, 20):
        fewer = max((known for known in measured if known <= cores), default=min(measured))
        more = min((known for known in measured if known >= cores), default=max(measured))
        ends = sorted((at(measured, rows, fewer), at(measured, rows, more)))
        assert ends[0] * (1 - 1e-9) <= at(measured, rows, cores) <= ends[1] * (1 + 1e-9)


def test_five_cores_of_eight_are_not_believed_to_be_eight() -> None:
    measured = {1: {1: 80 * MS}, 8: {1: 10 * MS}}
    assert at(measured, 1, 5) == 40 * MS
    assert [at(measured, 1, cores) for cores in (1, 8, 9)] == [80 * MS, 10 * MS, 10 * MS]


def test_an_answer_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(rows: tuple[LatencyRow, ...], *point: int) -> float:
        asked.append(point)
        return interpolate(rows, *point)

    monkeypatch.setattr(table_module, "interpolate", counted)
    predictor = TablePredictor({"a": LatencyTable(rows_of({1: {1: MS}, 4: {1: MS}}), (1.0, 1.0))})
    assert len({predictor.latency_ns(Work("a", 0, 3, 0, 2), 3) for _ in range(5)}) == 1
    assert predictor.latency_ns(Work("a", 0, 3, 0, 1), 3) < predictor.latency_ns(Work("a", 0, 3, 0, 2), 3)
    assert asked == [(0, 3, 3)]


def versions(*units: tuple[Implementation, ...]) -> VersionTable:
    made = tuple(UnitVersions(each, tuple(min(level, len(each) - 1) for level in range(2))) for each in units)
    return VersionTable(2, 2, 20 * 10**9, made)


def test_spans_of_versions_scale_with_rows_and_with_what_was_observed() -> None:
    fast = Implementation((1, 2), (4 * MS, 2 * MS), (20 * 10**6, 20 * 10**6))
    robust = Implementation((1, 2), (5 * MS, 3 * MS), (0, 0))
    other = Implementation((1, 2), (4 * MS, 2 * MS), (0, 0))
    table = LatencyTable(
        rows_of({1: {1: 8 * MS, 2: 12 * MS}, 2: {1: 4 * MS, 2: 6 * MS}}),
        (1.0, 1.0),
        1.0,
        versions((fast, robust), (other,)),
    )
    predictor = TablePredictor({"a": table})
    assert predictor.bandwidth_bytes_per_s == 20 * 10**9
    one = predictor.spans("a", 0, 1)
    assert (one.units, one.versions, one.levels, one.cores) == (2, 2, 2, 2)
    assert one.block_ns(0, 2, 0, 0, 1) == 8 * MS
    assert one.block_ns(0, 2, 0, 0, 2) == 4 * MS
    # Under pressure one core has half of 20 bytes a ns: 20 MB take 2 ms there, and nothing is slowed down.
    assert one.block_ns(0, 1, 0, 1, 1) == 4 * MS
    assert one.block_ns(0, 1, 1, 1, 1) == 5 * MS
    two = predictor.spans("a", 0, 2)
    assert two.block_ns(0, 2, 0, 0, 1) == 12 * MS
    assert two.block_ns(0, 2, 0, 0, 2) == 6 * MS
    assert two.block_bytes(0, 1, 0, 1) == 1.5 * one.block_bytes(0, 1, 0, 1) == 30 * 10**6, "as much in a second"
    slower = predictor.scaled({"a": 1.5})
    assert slower.spans("a", 0, 1).block_ns(0, 2, 0, 0, 1) == 12 * MS
    assert predictor.spans("a", 0, 1) is one


@given(st.lists(st.integers(1, 40), min_size=2, max_size=2), st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_more_cores_are_never_believed_to_be_slower(whole: list[int], units: list[int]) -> None:
    made = [Implementation((1, 2), (units[at] * MS, units[at + 1] * MS), (0, 0)) for at in (0, 2)]
    table = LatencyTable(
        rows_of({1: {1: whole[0] * MS}, 2: {1: whole[1] * MS}}), (1.0, 1.0), 1.0, versions((made[0],), (made[1],))
    )
    spans = TablePredictor({"a": table}).spans("a", 0, 1)
    for start in range(2):
        assert spans.block_ns(start, start + 1, 0, 0, 2) <= spans.block_ns(start, start + 1, 0, 0, 1) + 1


def test_a_table_of_versions_has_its_units() -> None:
    with pytest.raises(InvalidValueError, match="as many units as there are weights, 3"):
        LatencyTable(rows_of({1: {1: MS}}), (1.0, 1.0, 1.0), 1.0, versions((Implementation((1,), (1,), (0,)),)))
