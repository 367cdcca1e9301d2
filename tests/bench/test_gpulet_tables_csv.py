"""The CSV files that costs of a GPU which others measured are read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.papers.gpulet._tables_csv import ModelFacts, read_assembly, read_latencies, read_models
from cotenant.errors import CotenantError, PlanError
from cotenant.work import Work
from plan_samples import table_costs

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


def test_the_published_tables_can_be_used(papers_data: Path) -> None:
    folder = papers_data / "glet"
    latencies = read_latencies(folder / "latency_reconstructed_2080ti.csv")
    models = read_models(folder / "models.csv")
    costs = table_costs({"gpu": latencies}, {model: facts.memory_bytes for model, facts in models.items()})
    for model, facts in models.items():
        assert costs.latency_ns(Work(model, 0, 32), 100, "gpu") == pytest.approx(facts.slo_ns / 2, rel=1e-3)
