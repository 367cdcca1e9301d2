"""What tables say of parts of models, of versions of their units, and after a correction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError
from cotenant.predict.grouped import GroupedPredictor
from cotenant.predict.latency import LatencyModel
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.profiles.version_table import Implementation, UnitVersions, VersionTable
from cotenant.work import Work

MS = 1_000_000


def rows_of(measured: dict[int, dict[int, int]]) -> tuple[LatencyRow, ...]:
    """Rows from latencies by cores and batch."""
    return tuple(LatencyRow(0, items, cores, ns) for cores, of in measured.items() for items, ns in of.items())


def test_an_answer_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    answer = LatencyModel.latency_ns

    def counted(model: LatencyModel, *point: int) -> int:
        asked.append(point)
        return answer(model, *point)

    monkeypatch.setattr(LatencyModel, "latency_ns", counted)
    predictor = TablePredictor({"a": LatencyTable(rows_of({1: {1: MS}, 4: {1: MS}}), (1.0, 1.0))})
    assert len({predictor.latency_ns(Work("a", 0, 3, 0, 2), 3) for _ in range(5)}) == 1
    assert predictor.latency_ns(Work("a", 0, 3, 0, 1), 3) < predictor.latency_ns(Work("a", 0, 3, 0, 2), 3)
    assert asked == [(0, 3, 3)]


def test_models_are_made_once_of_a_table() -> None:
    one, two = (LatencyTable(rows_of({1: {1: ns}}), (1.0,)) for ns in (MS, 2 * MS))
    predictor = TablePredictor({"a": one, "b": two})
    slower = predictor.scaled({"a": 3.0})
    assert slower.models == predictor.models
    assert slower.latency_ns(Work("a", 0, 1), 1) == 3 * MS
    grouped = GroupedPredictor({"a": one, "b": one}, models=slower.models)
    again = grouped.with_beliefs({"a": two, "b": one}, {}, 1.0)
    assert again.models["b"] is grouped.models["b"]
    assert again.latency_ns(Work("a", 0, 1), 1) == 2 * MS


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
