"""`python -m bench.plan`: plans for a device that others measured, by the yardstick planners too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import plan as bench_plan
from bench.papers.gpulet import _planners
from bench.papers.gpulet._tables_csv import csv_tables
from commands import Run, runner
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.file import KnownTenant, read_plan
from cotenant.techniques.partitions.plan.planners import is_blind, make_planner
from cotenant.techniques.partitions.plan.types import DeviceType, Load, Plan
from plan_samples import GIB, GPU, MODELS, MS, costs, latencies

TENANTS = """
[[device]]
name = "gpu"
kind = "gpu"
count = 2
splits = [[100], [20, 80], [40, 60], [50, 50]]
memory_gib = 11
[[tenant]]
name = "small"
rate = 100
slo_ms = 8
[[tenant]]
name = "middle"
rate = 50
slo_ms = 25
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tenants, a profile in CSV, utilisation and constants."""
    (tmp_path / "tenants.toml").write_text(TENANTS, encoding="utf-8")
    lines = ["model,partition_pct,batch,latency_ms"]
    for model, sizes in latencies(GPU.sizes, GPU.whole).items():
        lines += [f"{model},{size},{batch},{ns / MS}" for size, points in sizes.items() for batch, ns in points.items()]
    (tmp_path / "gpu.csv").write_text("\n".join(lines), encoding="utf-8")
    utilisation = ["model,batch,l2_util_pct,dram_util_pct", *[f"{model},1,90,90" for model in MODELS]]
    (tmp_path / "util.csv").write_text("\n".join(utilisation))
    (tmp_path / "constants.csv").write_text("c1,c2,c3,c4,c5\n0.1,0.9,0.3,0.1,1.0\n")
    return tmp_path


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capfd, bench_plan.main)


def test_a_plan_of_a_blind_planner_is_refused_where_it_does_not_hold(plan: Run, folder: Path) -> None:
    out = folder / "plan.toml"
    more = ("--util", folder / "util.csv", "--constants", folder / "constants.csv", "-o", out, "--quick")
    arguments = (folder / "tenants.toml", "--profiles", folder / "gpu.csv", *more)
    status, _, err = plan(*arguments, "--planner", "elastic")
    assert status == 2
    assert re.search(r"'elastic' made a plan that does not hold \(it is blind to interference: .*slo: device 0", err)
    assert not out.exists()
    status, text, _ = plan(*arguments, "--planner", "ideal")
    assert status == 0
    assert read_plan(out).plan.planner == "ideal"
    assert "interference: linear model of util.csv and constants.csv" in text


@pytest.mark.parametrize("name", ["greedy", "sbp", "ideal"])
def test_yardsticks_have_the_names_they_are_asked_for(name: str) -> None:
    planner = make_planner(name, 0.25)
    assert planner.name == name
    assert is_blind(name) == (name != "ideal")
    plan = planner.plan(
        (Load("small", "small", 40, 60 * MS),), (DeviceType("gpu", ((100,), (50, 50)), 8 * GIB),), costs()
    )
    assert isinstance(plan, Plan)
    served = sum(slot.rate_per_s for device in plan.devices for part in device.partitions for slot in part.slots)
    assert served >= 50 * (1 - 1e-9), "the headroom is not part of the plan"
    assert [planner.name for planner in _planners.baselines()] == ["sbp", "greedy", "elastic", "elastic_int"]


def test_a_file_of_models_gives_memory_slos_and_the_largest_batch(folder: Path) -> None:
    bare = csv_tables(folder / "gpu.csv")
    assert bare.known == {}
    assert set(bare.memory_bytes.values()) == {0}
    (folder / "models.csv").write_text("model,input,slo_ms,memory_mb,max_batch\nsmall,1x3x8x8,100,1024,4\n")
    found = csv_tables(folder / "gpu.csv")
    assert found.known == {"small": KnownTenant("small", 100 * MS)}
    assert found.memory_bytes["small"] == GIB
    assert found.latencies["small"].most_rows(100) == 4 < found.latencies["deep"].most_rows(100)
    assert found.digest != bare.digest


def test_interference_needs_both_files(folder: Path) -> None:
    with pytest.raises(PlanError, match="together, expected both or none"):
        csv_tables(folder / "gpu.csv", util=folder / "util.csv")
    (folder / "util.csv").write_text("model,batch,l2_util_pct,dram_util_pct\nsmall,1,90,90\n")
    with pytest.raises(PlanError, match="no utilisation of model"):
        csv_tables(folder / "gpu.csv", folder / "util.csv", folder / "constants.csv")


def test_help_is_that_of_both(plan: Run) -> None:
    status, text, _ = plan("--help")
    assert status == 0
    assert "--constants FILE.csv" in text
    assert "--headroom" in text
