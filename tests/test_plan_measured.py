"""Costs of a GPU that others measured, and how it may be divided, from CSV files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cotenant.plan.check import check_plan
from cotenant.plan.elastic import Elastic
from cotenant.plan.measured import measured_costs
from cotenant.plan.tables_csv import read_latencies, read_splits
from cotenant.plan.types import DeviceType, Load, Plan, PlanError
from cotenant.predict.interference_file import InterferenceFileError, read_utilisation

SOLO = "model,batch,partition_pct,throughput_rps,latency_ms\n" + "".join(
    f"{model},{batch},{size},1,{latency * batch * 50 / size}\n"
    for model, latency in (("a", 2.0), ("b", 3.0))
    for batch in (1, 2, 4)
    for size in (40, 60, 100)
)
CORUNS = "model,batch,partition_pct,other_model,other_batch,throughput_rps,latency_ms\n" + "".join(
    f"{model},{batch},{size},{other},{beside},1,{latency * batch * 50 / size * factor}\n"
    for model, latency, factor in (("a", 2.0, 1.2), ("b", 3.0, 1.5))
    for batch in (1, 2, 4)
    for size in (40, 60)
    for other in "ab"
    for beside in (1, 4)
)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    return folder


def test_latencies_alone_and_co_runs_make_costs(tmp_path: Path) -> None:
    costs = measured_costs(write(tmp_path, solo_latency=SOLO, corun_latency_train=CORUNS), "gpu", {"a": 7})
    assert costs.latency_ns("a", 2, 40, "gpu") == 5_000_000
    assert costs.latency_ns("b", 3, 60, "gpu") == 7_500_000
    assert (costs.memory_bytes("a"), costs.memory_bytes("b")) == (7, 0)
    assert costs.factor("b", 2, 40, [("a", 4, 60)], "gpu") == pytest.approx(1.5, rel=1e-3)
    assert costs.factor("a", 2, 40, [("a", 4, 60)], "gpu") == pytest.approx(1.2, rel=1e-3)
    assert costs.factor("a", 2, 100, [], "gpu") == 1.0


def test_without_co_runs_partitions_do_not_touch_each_other(tmp_path: Path) -> None:
    costs = measured_costs(write(tmp_path, solo_latency=SOLO), "gpu")
    assert costs.factor("a", 2, 40, [("b", 4, 60)], "gpu") == 1.0
    with pytest.raises(PlanError, match="cannot be read"):
        measured_costs(tmp_path / "nothing", "gpu")
    write(tmp_path, corun_latency_train=CORUNS.replace("a,1,40", "c,1,40"))
    with pytest.raises(InterferenceFileError, match="latency alone of c"):
        measured_costs(tmp_path, "gpu")


def test_planners_plan_with_them(tmp_path: Path) -> None:
    costs = measured_costs(write(tmp_path, solo_latency=SOLO, corun_latency_train=CORUNS), "gpu")
    gpu = DeviceType("gpu", ((100,), (40, 60)), 1 << 30)
    loads = (Load("one", "a", 300.0, 20_000_000), Load("two", "b", 150.0, 30_000_000))
    plan = Elastic(with_interference=True).plan(loads, [gpu, gpu], costs)
    assert isinstance(plan, Plan)
    assert check_plan(plan, loads, [gpu, gpu], costs) == ()


def test_splits_are_read(tmp_path: Path) -> None:
    head = "partition_pct,complement_pct,note\n"
    path = write(tmp_path, partitions=head + "20,80,\n50,50,equal\n80,20,\n100,0,whole\n") / "partitions.csv"
    assert read_splits(path) == ((100,), (20, 80), (50, 50))
    for line in ("60,50,", "60,-1,", "60,1.5,", "0,100,"):
        write(tmp_path, partitions=head + line + "\n")
        with pytest.raises(PlanError, match="line 2"):
            read_splits(path)


def test_the_published_tables_are_covered() -> None:
    data = Path(os.environ.get("COTENANT_DATA", ""))
    if not (data / "mps_measured" / "solo_latency.csv").exists():
        pytest.skip("needs the papers' data: set COTENANT_DATA to its folder")
    folder = data / "mps_measured"
    costs = measured_costs(folder, "gpu")
    latencies = read_latencies(folder / "solo_latency.csv")
    assert len(latencies) == 10
    utilisation = read_utilisation(folder / "utilisation.csv")
    for model, sizes in latencies.items():
        assert sorted(sizes) == [20, 40, 50, 60, 80, 100]
        assert costs.batches(model) == tuple(range(1, 65))
        assert costs.latency_ns(model, 64, 20, "gpu") == sizes[20][64]
        assert costs.factor(model, 8, 40, [("resnet50", 8, 60)], "gpu") >= 1.0
        assert min(utilisation.at(model, 8, 40)) >= 0
    assert read_splits(data / "glet" / "partitions.csv") == ((100,), (20, 80), (40, 60), (50, 50))
