"""Costs from tables, and the files that they are read from."""

from __future__ import annotations

import pytest

from cotenant.errors import InvalidValueError, PlanError
from cotenant.predict.latency import LatencyModel
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.partitions.plan.table_costs import TableCosts, WithoutInterference
from cotenant.work import Work
from plan_samples import Line, models_of, table_costs

TABLE = {"m": {50: {1: 100, 4: 400}, 100: {1: 80, 2: 90, 4: 200}}}


def test_batches_and_sizes_between_measured_ones_are_interpolated() -> None:
    costs = table_costs({"gpu": TABLE}, {"m": 7})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert [costs.latency_ns(Work("m", 0, batch), 50, "gpu") for batch in (1, 2, 3, 4)] == [100, 200, 300, 400]
    assert [costs.latency_ns(Work("m", 0, batch), 100, "gpu") for batch in (1, 2, 3, 4)] == [80, 90, 145, 200]
    assert costs.latency_ns(Work("m", 0, 1), 75, "gpu") == 89, "the mean of both speeds"
    assert costs.memory_bytes("m") == 7
    assert costs.factor("m", 1, 50, [("m", 4, 50)], "gpu") == 1.0


def test_no_batch_is_larger_than_every_size_has() -> None:
    costs = table_costs({"a": {"m": {1: {2: 10, 8: 20}}}, "b": {"m": {1: {1: 10, 4: 20}}}}, {"m": 1})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert costs.latency_ns(Work("m", 0, 1), 1, "a") == 10


def test_ratio_and_overhead_pad_every_latency() -> None:
    costs = TableCosts(
        {"gpu": models_of(TABLE)}, {"m": 7}, latency_ratio=1.1, overhead=lambda *key: {1: 5, 4: 20}.get(key[2], 0)
    )
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
        table_costs({"gpu": TABLE}, {"m": 7}).latency_ns(Work(model, 0, batch), size, device)


def test_a_part_of_a_model_has_no_cost_here() -> None:
    for part in (Work("m", 0, 1, 0, 3), Work("m", 1, 1), Work("m", 0, 1, version=2), Work("m", 0, 1, rows=(0, 1))):
        with pytest.raises(PlanError, match="whole batches"):
            table_costs({"gpu": TABLE}, {"m": 7}).latency_ns(part, 50, "gpu")


def test_a_model_that_one_device_lacks_is_named() -> None:
    costs = table_costs({"gpu": TABLE, "tpu": {"n": {1: {1: 1}}}}, {"m": 7, "n": 7})
    with pytest.raises(PlanError, match="'m' has no profile on device type 'tpu'"):
        costs.latency_ns(Work("m", 0, 1), 1, "tpu")


def test_tables_without_sense_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="memory of model 'm'"):
        table_costs({"gpu": TABLE}, {})
    with pytest.raises(InvalidValueError, match="latency_ratio is 0"):
        TableCosts({"gpu": models_of(TABLE)}, {"m": 7}, latency_ratio=0)
    with pytest.raises(InvalidValueError, match="at least one measured point"):
        table_costs({"gpu": {"m": {50: {}}}}, {"m": 7})
    with pytest.raises(InvalidValueError, match="positive latency"):
        table_costs({"gpu": {"m": {50: {1: 0}}}}, {"m": 7})


def test_costs_of_a_profile_take_the_slowest_shape() -> None:
    rows = (LatencyRow(0, 1, 1, 50), LatencyRow(1, 1, 1, 70), LatencyRow(0, 2, 1, 90), LatencyRow(0, 1, 2, 40))
    costs = TableCosts({"cpu": {"m": LatencyModel(LatencyTable(rows))}}, {"m": 1})
    assert costs.latency_ns(Work("m", 0, 1), 1, "cpu") == 70
    assert costs.latency_ns(Work("m", 0, 1), 2, "cpu") == 70, "the second shape was measured on one core alone"
    assert costs.batches("m") == (1,)
    with pytest.raises(PlanError, match="batches from 1 to 1, not 2"):
        costs.latency_ns(Work("m", 0, 2), 1, "cpu")


def test_only_sizes_of_the_device_limit_batches() -> None:
    model = LatencyModel.of_points({1: {1: 40, 2: 70}, 2: {1: 30, 8: 90}, 4: {1: 20, 16: 95}})
    for sizes, most in (([1, 2, 4], 2), ([2, 4], 8), ([4], 16), ([3], 8), ([9], 16)):
        costs = TableCosts({"cpu": {"m": model}}, {"m": 1}, sizes={"cpu": sizes})
        assert costs.batches("m") == tuple(range(1, most + 1))
    assert TableCosts({"cpu": {"m": model}}, {"m": 1}).batches("m") == (1, 2)


def test_each_device_type_has_its_own_interference() -> None:
    latencies = {"gpu": {"wide": TABLE["m"]}, "cpu": {"wide": TABLE["m"]}}
    costs = table_costs(latencies, {"wide": 7}, {"gpu": Line()})
    blind = WithoutInterference(costs)
    beside = [("wide", 4, 50)]
    assert costs.factor("wide", 1, 50, beside, "gpu") == Line().factor("wide", 1, 50, beside, "gpu") > 1
    assert costs.factor("wide", 1, 50, [], "gpu") == 1.0
    assert costs.factor("wide", 1, 50, beside, "cpu") == 1.0
    assert blind.factor("wide", 1, 50, beside, "gpu") == 1.0
    assert blind.latency_ns(Work("wide", 0, 3), 50, "gpu") == costs.latency_ns(Work("wide", 0, 3), 50, "gpu")
    assert list(blind.batches("wide")) == [1, 2, 3, 4]
    assert blind.memory_bytes("wide") == 7
