"""Costs from tables, and the files that they are read from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import InvalidValueError, PlanError
from cotenant.profile.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.partitions.plan.table_costs import TableCosts, WithoutInterference, interpolate
from cotenant.work import Work
from plan_samples import Line

TABLE = {"m": {50: {1: 100, 4: 400}, 100: {1: 80, 2: 90, 4: 200}}}


def test_between_batches_latency_is_interpolated_and_sizes_are_exact() -> None:
    costs = TableCosts({"gpu": TABLE}, {"m": 7})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert [costs.latency_ns(Work("m", 0, batch), 50, "gpu") for batch in (1, 2, 3, 4)] == [100, 200, 300, 400]
    assert [costs.latency_ns(Work("m", 0, batch), 100, "gpu") for batch in (1, 2, 3, 4)] == [80, 90, 145, 200]
    assert costs.memory_bytes("m") == 7
    assert costs.factor("m", 1, 50, [("m", 4, 50)], "gpu") == 1.0


def test_no_batch_is_larger_than_every_size_has() -> None:
    costs = TableCosts({"a": {"m": {1: {2: 10, 8: 20}}}, "b": {"m": {1: {1: 10, 4: 20}}}}, {"m": 1})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert costs.latency_ns(Work("m", 0, 1), 1, "a") == 10


def test_ratio_and_overhead_pad_every_latency() -> None:
    costs = TableCosts({"gpu": TABLE}, {"m": 7}, latency_ratio=1.1, overhead_ns={"m": {1: 5, 4: 20}})
    assert [costs.latency_ns(Work("m", 0, batch), 50, "gpu") for batch in (1, 2, 4)] == [116, 221, 461]


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (("m", 1, 20, "gpu"), "'m' was not profiled on 'gpu' at size 20; it was at 50, 100"),
        (("x", 1, 50, "gpu"), "no profile of model 'x'; profiled are m"),
        (("m", 1, 50, "tpu"), "no profile for device type 'tpu'; profiled are gpu"),
        (("m", 5, 50, "gpu"), "batches from 1 to 4, not 5"),
        (("m", 0, 50, "gpu"), "batches from 1 to 4, not 0"),
    ],
)
def test_what_was_not_measured_is_named(question: tuple[str, int, int, str], text: str) -> None:
    model, batch, size, device = question
    with pytest.raises(PlanError, match=text):
        TableCosts({"gpu": TABLE}, {"m": 7}).latency_ns(Work(model, 0, batch), size, device)


def test_a_part_of_a_model_has_no_cost_here() -> None:
    for part in (Work("m", 0, 1, 0, 3), Work("m", 1, 1), Work("m", 0, 1, version=2), Work("m", 0, 1, rows=(0, 1))):
        with pytest.raises(PlanError, match="whole batches"):
            TableCosts({"gpu": TABLE}, {"m": 7}).latency_ns(part, 50, "gpu")


def test_a_model_that_one_device_lacks_is_named() -> None:
    costs = TableCosts({"gpu": TABLE, "tpu": {"n": {1: {1: 1}}}}, {"m": 7, "n": 7})
    with pytest.raises(PlanError, match="'m' has no profile on device type 'tpu'"):
        costs.latency_ns(Work("m", 0, 1), 1, "tpu")


def test_tables_without_sense_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="memory of model 'm'"):
        TableCosts({"gpu": TABLE}, {})
    with pytest.raises(InvalidValueError, match="latency_ratio is 0"):
        TableCosts({"gpu": TABLE}, {"m": 7}, latency_ratio=0)
    with pytest.raises(InvalidValueError, match="positive latencies"):
        TableCosts({"gpu": {"m": {50: {}}}}, {"m": 7})
    with pytest.raises(InvalidValueError, match="positive latencies"):
        TableCosts({"gpu": {"m": {50: {1: 0}}}}, {"m": 7})


def test_costs_of_a_profile_take_the_slowest_shape() -> None:
    rows = (LatencyRow(0, 1, 1, 50), LatencyRow(1, 1, 1, 70), LatencyRow(0, 2, 1, 90), LatencyRow(0, 1, 2, 40))
    costs = TableCosts.of_profile({"m": LatencyTable(rows)}, {"m": 1}, "cpu")
    assert costs.latency_ns(Work("m", 0, 1), 1, "cpu") == 70
    assert costs.latency_ns(Work("m", 0, 1), 2, "cpu") == 40
    assert costs.batches("m") == (1,)


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 1000), min_size=1, max_size=6))
def test_interpolation_meets_the_points_and_stays_between_them(points: dict[int, int]) -> None:
    answers = interpolate(points, range(1, 50))
    for batch, ns in points.items():
        assert answers[batch - 1] == ns
    for batch, ns in enumerate(answers, 1):
        below = max((known for known in points if known <= batch), default=min(points))
        above = min((known for known in points if known >= batch), default=max(points))
        assert min(points[below], points[above]) <= ns <= max(points[below], points[above])


def test_each_device_type_has_its_own_interference() -> None:
    latencies = {"gpu": {"wide": TABLE["m"]}, "cpu": {"wide": TABLE["m"]}}
    costs = TableCosts(latencies, {"wide": 7}, {"gpu": Line()})
    blind = WithoutInterference(costs)
    beside = [("wide", 4, 50)]
    assert costs.factor("wide", 1, 50, beside, "gpu") == Line().factor("wide", 1, 50, beside, "gpu") > 1
    assert costs.factor("wide", 1, 50, [], "gpu") == 1.0
    assert costs.factor("wide", 1, 50, beside, "cpu") == 1.0
    assert blind.factor("wide", 1, 50, beside, "gpu") == 1.0
    assert blind.latency_ns(Work("wide", 0, 3), 50, "gpu") == costs.latency_ns(Work("wide", 0, 3), 50, "gpu")
    assert list(blind.batches("wide")) == [1, 2, 3, 4]
    assert blind.memory_bytes("wide") == 7
