"""The experiments with planners, on made-up tables: what they print and refuse. Figures are not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import _record
from bench.__main__ import main
from glet_tables import write, write_gpu

MODELS = {"one": (40.0, 4.0), "two": (60.0, 6.0)}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of two models; results are kept apart."""
    monkeypatch.setattr(_record.save, "__defaults__", (tmp_path / "results",))
    write_gpu(tmp_path, MODELS)
    return tmp_path


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_all_mixes_are_counted_and_none_is_refuted(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpulet-scenarios", "--data", str(data), "--json", "--rates", "0,50,150"]) == 0
    found = result(capsys)
    assert found["summary"]["scenarios"] == 8
    assert found["summary"]["checked_violations"] == 0
    planners = {row["planner"]: row for row in found["rows"]}
    assert {"sbp", "greedy", "elastic", "elastic_int", "ideal", "ours_two", "ours"} == set(planners)
    for name in planners:
        assert found["summary"][name] == planners[name]["schedulable"]
    assert found["summary"]["elastic_int"] <= found["summary"]["ideal"]
    assert found["summary"]["mean_gpus_ours"] <= found["summary"]["mean_gpus_elastic_int"]
    assert found["summary"]["seconds_elastic"] > 0
    for row in planners.values():
        assert row["schedulable"] + sum(row["reasons"].values()) == 8
    for name in ("elastic_int", "ideal", "ours_two", "ours"):
        assert planners[name]["holding_beside_neighbours"] == planners[name]["schedulable"]


def test_other_files_take_the_place_of_the_data(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = data / "other.csv"
    source = (data / "glet" / "latency_reconstructed_2080ti.csv").read_text(encoding="utf-8").splitlines()
    write(other, source[0], [line for line in source[1:] if line.startswith("one")])
    options = ["gpulet-scenarios", "--data", str(data), "--json", "--rates", "0,50,150", "--profile", str(other)]
    assert main(options) == 0
    assert result(capsys)["summary"]["scenarios"] == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--rates", "1,x"], "--rates is '1,x', expected different rates"),
        (["--rates", "0,1,1"], "expected different rates"),
        (["--util", "nothing.csv"], "nothing.csv: cannot be read"),
    ],
)
def test_wrong_options_are_named(
    data: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert main(["gpulet-scenarios", "--data", str(data), *options]) == 2
    assert error in capsys.readouterr().err


def test_tables_of_other_models_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = data / "other.csv"
    write(other, "model,partition_pct,batch,latency_ms", ["three,100,1,5"])
    assert main(["gpulet-scenarios", "--data", str(data), "--profile", str(other)]) == 2
    assert "has none of the models" in capsys.readouterr().err
    write(other, "model,batch,l2_util_pct,dram_util_pct", ["one,1,5,5"])
    assert main(["planner", "--data", str(data), "--util", str(other)]) == 2
    assert "has no utilisation of model 'two'" in capsys.readouterr().err


def test_plans_of_many_models_are_timed_and_checked(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.papers.gpulet import planner

    monkeypatch.setattr(planner, "QUICK_SEEDS", (1,))
    monkeypatch.setattr(planner, "LOADS", (planner.MAIN_LOAD,))
    assert main(["planner", "--data", str(data), "--json", "--quick"]) == 0
    found = result(capsys)
    assert found["summary"]["checked_violations"] == 0
    assert found["summary"]["elastic_20x8_ms"] > 0
    assert found["summary"]["ours_20x8_s"] > 0
    assert "ours_gap_pct" in found["summary"] or not found["summary"]["mean_devices_ours"]


def test_a_table_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpulet-scenarios", "--data", str(tmp_path)]) == 2
    assert f"{tmp_path / 'glet' / 'models.csv'}: cannot be read" in capsys.readouterr().err


def test_the_tables_of_the_repository_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.papers.gpulet import scenarios

    monkeypatch.delenv("COTENANT_DATA", raising=False)
    monkeypatch.setattr(scenarios, "_QUICK_MIXES", 4)
    assert main(["gpulet-scenarios", "--json", "--quick"]) == 0
    assert result(capsys)["summary"]["checked_violations"] == 0
