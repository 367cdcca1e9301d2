"""The experiments on placement: graphs of others are read or refused with a reason; those that are generated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench._registry import BenchError, benchmarks
from bench.papers.sirplus import lane, optimality, real
from bench.papers.sirplus._detectors import BASELINE_MS, CLASSES, WIDE, DetectorWorld, task_graph
from bench.papers.sirplus._graph_csv import read_graph
from bench.papers.sirplus._graphs import chains_with_fan_out, random_wide
from cotenant.measure.solo import Effort
from cotenant.plan.placement.compiled import PLAIN
from cotenant.plan.placement.flat import PlacementProblem, TaskPlan
from cotenant.plan.placement.strategies import CommSlowdown, Sequential, Slowdown, makespan_ns, sequential_ns
from cotenant.plan.placement.verify import violations
from onnx_samples import Sketch, info
from repositories import write_model

TASKS = "task,device,ms,memory\na,gpu,1,10\na,cpu:0,9,10\nb,gpu,2,10\nb,cpu:0,2.5,10\nc,gpu,2,10\nc,cpu:0,2.5,10\n"
EDGES = "from,to,bytes,tensor\na,b,1000,x\na,c,1000,x\n"
LINK = "gpu:cpu:0=1GB/s,10us"


def files(folder: Path, tasks: str = TASKS, edges: str = EDGES) -> tuple[Path, Path]:
    paths = folder / "tasks.csv", folder / "edges.csv"
    for path, text in zip(paths, (tasks, edges), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_a_graph_of_tables_is_placed(tmp_path: Path) -> None:
    tasks, edges = files(tmp_path)
    graph = read_graph(tasks, edges, [LINK], ["gpu=25", "cpu:0=1kB"])
    assert [tensor.readers for tensor in graph.tensors] == [("b", "c")]
    assert [(link.source, link.target, link.transfer_ns(1000)) for link in graph.links] == [
        ("gpu", "cpu:0", 11_000),
        ("cpu:0", "gpu", 11_000),
    ]
    assert graph.limits_bytes == {"gpu": 25, "cpu:0": 1000}
    result = optimality.place_graph(tasks, edges, [LINK], ["gpu=25"], 0.5)
    assert result["summary"]["feasible"] == 1
    assert result["summary"]["makespan_ms"] == pytest.approx(1 + 0.011 + 2.5)
    assert result["summary"]["bound_ms"] <= result["summary"]["makespan_ms"]
    assert result["summary"]["sequential_ms"] is None, "all three on the GPU take 30 bytes"
    assert {row["task"]: row["device"] for row in result["rows"]}["a"] == "gpu"


def test_a_plan_that_breaks_a_limit_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = optimality.place_graph(*files(tmp_path), [LINK], ["gpu=5", "cpu:0=10"], 0.2)
    assert result["summary"]["feasible"] == 0
    assert result["summary"]["makespan_ms"] is None
    assert result["rows"] == []
    assert "no placement was found within the limits" in " ".join(capsys.readouterr().out.split())


def test_where_no_placement_can_run_there_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = "task,device,ms\na,x,1\nb,gpu,1\nc,gpu,0\n"
    result = optimality.place_graph(*files(tmp_path, tasks, "from,to,bytes\nb,c,0\na,b,1\n"), [], [], 0.2)
    assert result["summary"] == dict.fromkeys(
        ("makespan_ms", "bound_ms", "sequential_ms", "comm_sd_ms", "heft_ms"), None
    ) | {"feasible": 0}
    printed = " ".join(capsys.readouterr().out.split())
    assert "no --link x:gpu: nothing is copied" in printed
    assert "no placement can run" in printed


@pytest.mark.parametrize(
    ("tasks", "edges", "named"),
    [
        ("task,device\na,gpu\n", EDGES, r"tasks.csv, line 1: .* expected task, device, ms"),
        ("task,device,ms\n", EDGES, r"tasks.csv: has no rows"),
        ("task,device,ms\na,gpu,fast\n", EDGES, r"tasks.csv, line 2: ms is 'fast', expected a number from 0"),
        ("task,device,ms\na,gpu,-1\n", EDGES, r"tasks.csv, line 2: ms is '-1'"),
        ("task,device,ms\na,gpu,nan\n", EDGES, r"tasks.csv, line 2: ms is 'nan'"),
        ("task,device,ms\na,gpu,1\n\na,gpu,2\n", EDGES, r"tasks.csv, line 4: task 'a' on 'gpu' was given before"),
        ("task,device,ms\na,gpu,1,2\n", EDGES, r"tasks.csv, line 2: has 4 fields, expected 3"),
        ("task,device,ms\n,gpu,1\n", EDGES, r"tasks.csv, line 2: task is empty"),
        ("task,device,ms,memory\na,gpu,1,1.5\n", EDGES, r"tasks.csv, line 2: memory is '1.5', expected a whole"),
        (TASKS, "from,to\na,b\n", r"edges.csv, line 1: .* expected from, to, bytes"),
        (TASKS, "from,to,bytes\na,z,1\n", r"edges.csv, line 2: there is no task 'z'"),
        (TASKS, "from,to,bytes\na,a,1\n", r"edges.csv, line 2: task 'a' reads its own"),
        (TASKS, "from,to,bytes\na,b,1\nb,c,1\nc,b,1\n", r"edges.csv, line [34]: this edge is part of a circle"),
        (TASKS, "from,to,bytes,tensor\na,b,1,x\na,c,2,x\n", r"edges.csv, line 3: tensor 'x' of 'a' has 2 bytes"),
        (TASKS, "from,to,bytes,tensor\na,b,1,x\na,b,1,x\n", r"edges.csv, line 3: 'b' reads tensor 'x' of 'a' twice"),
    ],
)
def test_bad_tables_are_refused_by_line(tmp_path: Path, tasks: str, edges: str, named: str) -> None:
    with pytest.raises(BenchError, match=named):
        read_graph(*files(tmp_path, tasks, edges))


@pytest.mark.parametrize(
    ("links", "memory", "named"),
    [
        (["gpu:tpu=1GB/s,1us"], [], "two different devices of gpu, cpu:0"),
        (["gpu:gpu=1GB/s,1us"], [], "two different devices"),
        (["gpu:cpu:0=1GB,1us"], [], "a positive rate and a latency"),
        (["gpu:cpu:0=0GB/s,1us"], [], "a positive rate"),
        (["gpu:cpu:0=1GB/s,1"], [], "a latency in ns, us, ms or s"),
        ([LINK, LINK], [], "given before"),
        ([], ["tpu=1"], "a device of gpu, cpu:0"),
        ([], ["gpu=-1"], r"bytes from 0"),
        ([], ["gpu=1", "gpu=2"], "given before"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, links: list[str], memory: list[str], named: str) -> None:
    with pytest.raises(BenchError, match=named):
        read_graph(*files(tmp_path), links, memory)


def test_missing_files_and_options_without_a_graph_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none.csv: cannot be read \(No such file"):
        read_graph(tmp_path / "none.csv", None)
    with pytest.raises(BenchError, match="expected --graph"):
        optimality.run(True, tmp_path, memory=["gpu=1"])


def test_the_command_takes_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, edges = map(str, files(tmp_path))
    name = "sirplus-optimality"
    assert main([name, "--graph", tasks, "--edges", edges, "--link", LINK, "--quick", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["summary"]["feasible"] == 1
    assert f"--link={LINK}" in record["command"]
    assert main([name, "--graph", tasks, "--link", "gpu=1"]) == 2
    assert "--link 'gpu=1'" in capsys.readouterr().err


def test_a_second_look_finds_what_a_plan_breaks(tmp_path: Path) -> None:
    problem = PlacementProblem(read_graph(*files(tmp_path), [LINK], ["gpu=25"]), PLAIN)
    plan = TaskPlan((0, 0, 1), (0, 1, 2))
    line = problem.evaluate(plan)
    assert line is not None
    assert violations(problem, plan, line) == []
    early = replace(line, start_ns=(0, 0, 500_000), end_ns=(1_000_000, 2_000_000, 2_000_000))
    found = " ".join(violations(problem, plan, early))
    for named in ("b starts on gpu before a has ended", "c takes less than its time", "c starts before what it reads"):
        assert named in found
    all_there = TaskPlan((0, 0, 0), (0, 1, 2))
    line = problem.evaluate(all_there)
    assert line is not None
    assert violations(problem, all_there, line) == ["gpu takes 30 bytes, the limit is 25"]
    assert violations(problem, plan, replace(line, makespan_ns=1))[-1] == "the makespan is not the end of the last task"


def test_generated_graphs_are_as_large_as_asked() -> None:
    for size in (24, 60, 150, 500):
        for make in (chains_with_fan_out, random_wide):
            assert len(make(size, 1).tasks) == size
            assert make(size, 1) == make(size, 1) != make(size, 2)


@pytest.mark.parametrize("model", WIDE)
def test_detectors_take_what_the_paper_says_and_are_as_wide(model: str) -> None:
    world = DetectorWorld(8.0, 12e9, 10.0, 7.0, 20.0, 1)
    problem = PlacementProblem(task_graph(model, world), PLAIN)
    plan = Sequential().place(problem)
    alone = sequential_ns(problem, plan.place)
    assert alone is not None
    assert alone / 1e6 == pytest.approx(BASELINE_MS[model], rel=0.01)
    fan_out = max(map(len, problem.succs))
    assert CLASSES - 1 <= fan_out <= CLASSES + 2
    if model != "ssd":
        assert 2000 <= problem.size <= 2200
        comm_sd, sd = (makespan_ns(problem, each.place(problem)) for each in (CommSlowdown(), Slowdown()))
        assert comm_sd < alone < sd
    line = problem.evaluate(plan)
    assert line is not None
    assert violations(problem, plan, line) == []
    assert {"sirplus-optimality", "sirplus-strategies", "sirplus-real", "lane"} <= set(benchmarks())


def test_lanes_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lane, "_NAP_S", 0.0)
    summary = lane.measured(3)["summary"]
    assert set(summary) == {"chain_overhead_us", "handover_us", "handover_queued_us", "bare_lock_us"}
    assert min(summary[name] for name in ("handover_us", "handover_queued_us")) > 0
    assert "a lane that sleeps" in capsys.readouterr().out


def test_wide_models_run_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork stands in for the zoo's models, whose export takes long."""
    s = Sketch(1)
    stem = s.op("MatMul", "x", s.weight(4, 4))
    s.op("Concat", *(s.op("MatMul", stem, s.weight(4, 4)) for _ in range(4)), out="y", axis=1)
    fork = s.model([info("x", ["batch", 4])], [info("y", ["batch", 16])])
    for name in (real.SSD, real.LINEAR):
        write_model(tmp_path, name, "[tenant]\nslo_ms = 1000\n", {1: lambda: fork})
    monkeypatch.setattr(real, "build_repository", lambda *_: [])
    monkeypatch.setattr(real, "PlacementProblem", partial(PlacementProblem, kernels=PLAIN))
    monkeypatch.setattr(real, "_STEPS", 200)
    few = Effort(0.0, 1, 1, 0)
    result = real.measured(tmp_path, [real.SSD, real.LINEAR], real.RealEffort(few, 0.05, 1, 2, 5.0))
    rows: Any = result["rows"]
    assert [row["model"] for row in rows] == [real.SSD, real.LINEAR]
    assert all(row["max_error"] == 0 for row in rows)
    assert all(set(row["chosen_from_ms"]) >= {"sequential", "two lanes", "mixed"} for row in rows)
    assert all(row["pieces"] == 1 for row in rows if row["best"] == "sequential")
    assert "ORT: its parallel executor" in capsys.readouterr().out
    ratios = {"best_over_sequential": 0.9, "best_over_ort_parallel": 0.5}
    worse = {"model": "other", "best_over_sequential": 1.2, "best_over_ort_parallel": 2.0}
    assert real.summary_of([{"model": real.SSD, **ratios}, worse]) == pytest.approx(
        {"worst_over_sequential": 1.2, "ssd_wide_over_sequential": 0.9, "over_ort_parallel_geomean": 1.0}
    )
