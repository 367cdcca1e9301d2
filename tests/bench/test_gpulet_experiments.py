"""The experiments that simulate plans, on made-up tables: what they give and refuse. Figures are not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import _record
from bench.__main__ import main
from bench.papers.gpulet import rates, violations, wave
from bench.papers.gpulet._data import read_gpu
from bench.papers.gpulet._workloads import read_specloads
from cotenant.techniques.partitions.plan.elastic import Elastic
from glet_tables import write, write_gpu

MODELS = {"one": (40.0, 4.0), "two": (60.0, 6.0), "three": (90.0, 8.0)}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of three models, two mixes of them and an application; results and pictures are kept apart."""
    monkeypatch.setattr(_record.save, "__defaults__", (tmp_path / "results",))
    monkeypatch.setattr(wave, "PLOT", tmp_path / "wave.svg")
    folder = write_gpu(tmp_path, MODELS)
    mixes = ["scen1,one,x,0.25", "scen1,two,x,0.5", "scen3,two,x,0.5", "scen3,three,x,0.5", "scen4,absent,x,1"]
    write(folder / "scenarios.csv", "scenario,model,memory_class,rate_share", mixes)
    stages = ["game,first,one,input,second,1,130 (whole app)", "game,second,two,first,output,2,130 (whole app)"]
    write(folder / "apps.csv", "app,node,model,parents,children,stage,slo_paper_ms", stages)
    return tmp_path


def result(capsys: pytest.CaptureFixture[str], name: str, data: Path) -> dict[str, Any]:
    assert main([name, "--data", str(data), "--json", "--quick"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_workloads_are_those_whose_models_are_known(data: Path) -> None:
    gpu = read_gpu(data)
    mixes = {mix.name: mix for mix in read_specloads(data, gpu)}
    assert list(mixes) == ["scen1", "scen3", "game"]
    loads, apps = mixes["scen1"].at(90.0, gpu)
    assert [(load.tenant, load.rate_per_s) for load in loads] == [("one", 30.0), ("two", 60.0)]
    assert apps == ()
    loads, (app,) = mixes["game"].at(50.0, gpu)
    assert [(load.tenant, load.rate_per_s) for load in loads] == [("game.first", 50.0), ("game.second", 50.0)]
    assert app.slo_ns == 130_000_000 >= sum(load.slo_ns for load in loads)


def test_rates_are_planned_for_and_kept(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"DEVICES": 1, "STEP": 1.1, "QUICK_TRIAL_S": 2, "CONFIRM_S": 3}.items():
        monkeypatch.setattr(rates, key, value)
    # a quick stand-in: the planner has tests of its own
    monkeypatch.setattr(rates, "Optimal", lambda **_: Elastic(with_interference=True, label="ours"))
    found = result(capsys, "gpulet-rates", data)
    assert found["summary"]["checked_violations"] == 0
    assert {"elastic_int_over_sbp", "ours_over_elastic_int"} <= set(found["summary"])
    measured = [row for row in found["rows"] if "planner" in row]
    assert {row["planner"] for row in measured} == {"sbp", "greedy", "elastic", "elastic_int", "ours"}
    for row in measured:
        assert row["violation_pct"] <= 1.0
        assert 1 < row["rate"] <= row["planned_rate"] * 1.1
    assert all(0 < row["bearable_share"] <= 1.5 for row in found["rows"] if "headroom" in row)


def test_the_wave_is_followed_and_drawn(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wave, "QUICK_S", 100)
    monkeypatch.setattr(wave, "DEVICES", 2)
    found = result(capsys, "gpulet-wave", data)
    assert {"violation_pct", "gpu_hours_ours_over_elastic"} <= set(found["summary"])
    for row in found["rows"]:
        assert row["queries"] > 1000
        assert 0 < row["gpu_hours"] <= found["summary"]["gpu_hours_all_devices"]
        assert 1 <= row["most_gpus"] <= wave.DEVICES
    drawn = (data / "wave.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in ("Rates offered", "GPUs held", "Late or dropped", "elastic_int"))


def test_who_knows_of_interference_does_not_allow_more(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violations, "DEVICES", 1)
    monkeypatch.setattr(violations, "STEP", 1.05)
    found = result(capsys, "gpulet-violations", data)
    assert {row["world"] for row in found["rows"]} == {"artifact"}  # nobody measured co-runs here
    for row in found["rows"]:
        assert row["violation_pct"] >= 0
        assert row["share_of_blind"] == 1 or row["planner"] != "blind"
    assert found["summary"]["artifact_blind_share_of_blind_rate"] == 1


@pytest.mark.parametrize("name", ["gpulet-rates", "gpulet-wave", "gpulet-violations"])
def test_a_table_that_is_not_there_is_named(name: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "glet" / "scenarios.csv").unlink()
    assert main([name, "--data", str(data)]) == 2
    assert f"{data / 'glet' / 'scenarios.csv'}: cannot be read" in capsys.readouterr().err


def test_a_table_without_a_column_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(data / "glet" / "scenarios.csv", "scenario,model", ["scen1,one"])
    assert main(["gpulet-rates", "--data", str(data)]) == 2
    assert "scenarios.csv: has no column 'rate_share'" in capsys.readouterr().err
