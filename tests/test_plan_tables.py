"""Costs from tables, and the files that they are read from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import CotenantError, InvalidValueError
from cotenant.plan.tables import TableCosts, WithoutInterference, interpolate
from cotenant.plan.tables_csv import ModelFacts, read_assembly, read_latencies, read_models
from cotenant.plan.types import PlanError
from cotenant.predict.table import LatencyRow, LatencyTable
from plan_samples import Line

TABLE = {"m": {50: {1: 100, 4: 400}, 100: {1: 80, 2: 90, 4: 200}}}


def test_between_batches_latency_is_interpolated_and_sizes_are_exact() -> None:
    costs = TableCosts({"gpu": TABLE}, {"m": 7})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert [costs.latency_ns("m", batch, 50, "gpu") for batch in (1, 2, 3, 4)] == [100, 200, 300, 400]
    assert [costs.latency_ns("m", batch, 100, "gpu") for batch in (1, 2, 3, 4)] == [80, 90, 145, 200]
    assert costs.memory_bytes("m") == 7
    assert costs.factor("m", 1, 50, [("m", 4, 50)], "gpu") == 1.0


def test_no_batch_is_larger_than_every_size_has() -> None:
    costs = TableCosts({"a": {"m": {1: {2: 10, 8: 20}}}, "b": {"m": {1: {1: 10, 4: 20}}}}, {"m": 1})
    assert costs.batches("m") == (1, 2, 3, 4)
    assert costs.latency_ns("m", 1, 1, "a") == 10


def test_ratio_and_overhead_pad_every_latency() -> None:
    costs = TableCosts({"gpu": TABLE}, {"m": 7}, latency_ratio=1.1, overhead_ns={"m": {1: 5, 4: 20}})
    assert [costs.latency_ns("m", batch, 50, "gpu") for batch in (1, 2, 4)] == [116, 221, 461]


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
    with pytest.raises(PlanError, match=text):
        TableCosts({"gpu": TABLE}, {"m": 7}).latency_ns(*question)


def test_a_model_that_one_device_lacks_is_named() -> None:
    costs = TableCosts({"gpu": TABLE, "tpu": {"n": {1: {1: 1}}}}, {"m": 7, "n": 7})
    with pytest.raises(PlanError, match="'m' has no profile on device type 'tpu'"):
        costs.latency_ns("m", 1, 1, "tpu")


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
    assert costs.latency_ns("m", 1, 1, "cpu") == 70
    assert costs.latency_ns("m", 1, 2, "cpu") == 40
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
    assert blind.latency_ns("wide", 3, 50, "gpu") == costs.latency_ns("wide", 3, 50, "gpu")
    assert list(blind.batches("wide")) == [1, 2, 3, 4]
    assert blind.memory_bytes("wide") == 7


# --- files -----------------------------------------------------------------------------------------------------

LATENCIES = "model,partition_pct,batch,latency_ms\nm,20,1,1.5\nm,20,2,2.0\nm,100,1,0.5\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_latencies_are_read(tmp_path: Path) -> None:
    read = read_latencies(write(tmp_path, LATENCIES))
    assert read == {"m": {20: {1: 1_500_000, 2: 2_000_000}, 100: {1: 500_000}}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("model,batch\nm,1\n", "no column 'partition_pct'"),
        ("", "no column 'model'"),
        ("model,partition_pct,batch,latency_ms\n", "no lines below its head"),
        (LATENCIES + "m,20,x,2\n", "line 5: batch is 'x', expected a number"),
        (LATENCIES + "m,20,1.5,2\n", "line 5: batch is 1.5, expected a whole number"),
        (LATENCIES + "m,20,4,-2\n", "line 5: latency_ms is -2.0, expected a positive number"),
        (LATENCIES + "m,20,4,inf\n", "line 5: latency_ms is 'inf', expected a number"),
        (LATENCIES + "m,20\n", "line 5: column 'batch' is empty"),
        (LATENCIES + "m,20,1,9\n", "line 5: batch 1 of this model and partition_pct was given before"),
    ],
)
def test_errors_name_the_line_and_the_column(tmp_path: Path, text: str, error: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlanError, match=error) as caught:
        read_latencies(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_latencies(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanError, match="is not a CSV file"):
        read_latencies(tmp_path / "binary.csv")


def test_models_and_assembly_are_read(tmp_path: Path) -> None:
    facts = read_models(write(tmp_path, "model,input,slo_ms,memory_mb,max_batch\nm,3x2x2 fp32,1.5,2,32\n"))
    assert facts == {"m": ModelFacts(1_500_000, 2 << 20, 32, "3x2x2 fp32")}
    overhead = read_assembly(write(tmp_path, "input_shape,batch,mean_overhead_ms\n3x2x2,1,0.5\n"))
    assert overhead == {"3x2x2": {1: 0.5}}


def test_errors_can_be_caught_as_ours(tmp_path: Path) -> None:
    with pytest.raises(CotenantError):
        read_models(tmp_path / "nothing.csv")


def test_the_published_tables_can_be_used() -> None:
    folder = Path(os.environ.get("COTENANT_DATA", "")) / "glet"
    if not (folder / "models.csv").exists():
        pytest.skip("needs the papers' data: set COTENANT_DATA to its folder")
    latencies = read_latencies(folder / "latency_reconstructed_2080ti.csv")
    models = read_models(folder / "models.csv")
    costs = TableCosts({"gpu": latencies}, {model: facts.memory_bytes for model, facts in models.items()})
    for model, facts in models.items():
        assert costs.latency_ns(model, 32, 100, "gpu") == pytest.approx(facts.slo_ns / 2, rel=1e-3)
