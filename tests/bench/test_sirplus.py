"""The experiments on placement: graphs of others are read or refused with a reason; those that are generated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench._registry import BenchError, benchmarks
from bench.papers.sirplus import _break_even, load, optimality
from bench.papers.sirplus._break_even import break_even
from bench.papers.sirplus._detectors import BASELINE_MS, WIDE, DetectorWorld, task_graph
from bench.papers.sirplus._graph_csv import read_graph
from bench.papers.sirplus._graphs import chains_with_fan_out, random_wide
from bench.papers.sirplus._stream import QueryStream
from bench.papers.sirplus._zoo_graphs import branches, computing, operators_of, read_table, write_table, zoo_operators
from cotenant.graph.onnx import load_dfg
from cotenant.techniques.placement.plan.flat import PLAIN, PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.strategies import (
    CommSlowdown,
    QueueDelay,
    Sequential,
    Slowdown,
    makespan_ns,
    sequential_ns,
)
from cotenant.techniques.placement.plan.task_graph import TransferMode
from cotenant.techniques.placement.plan.verify import violations
from cotenant.zoo import graph as onnx_graphs

TASKS = "task,device,ms,memory\na,gpu,1,10\na,cpu:0,9,10\nb,gpu,2,10\nb,cpu:0,2.5,10\nc,gpu,2,10\nc,cpu:0,2.5,10\n"
EDGES = "from,to,bytes,tensor\na,b,1000,x\na,c,1000,x\n"
LINK = "gpu:cpu:0=1GB/s,10us"
WORLD = DetectorWorld(8.0, 12e9, 10.0, 7.0, 20.0, 1)


def files(folder: Path, tasks: str = TASKS, edges: str = EDGES) -> tuple[Path, Path]:
    paths = folder / "tasks.csv", folder / "edges.csv"
    for path, text in zip(paths, (tasks, edges), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_a_graph_of_tables_is_placed(tmp_path: Path) -> None:
    tasks, edges = files(tmp_path)
    graph = read_graph(tasks, edges, [LINK], ["gpu=25", "cpu:0=1kB"])
    assert [[graph.tasks[at].name for at in tensor.readers] for tensor in graph.tensors] == [["b", "c"]]
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
    problem = PlacementProblem(task_graph(model, WORLD), PLAIN)
    plan = Sequential().place(problem)
    alone = sequential_ns(problem, plan.place)
    assert alone is not None
    assert alone / 1e6 == pytest.approx(BASELINE_MS[model], rel=0.01)
    assert max(map(len, problem.succs)) in (80, 90), "the classes read the same scores"
    line = problem.evaluate(plan)
    assert line is not None
    assert violations(problem, plan, line) == []


def test_the_published_order_appears() -> None:
    problem = PlacementProblem(task_graph("faster_rcnn", WORLD), PLAIN)
    strategies = (CommSlowdown(), Sequential(), Slowdown(), QueueDelay(moves_all=True))
    times = [makespan_ns(problem, each.place(problem)) for each in strategies]
    assert times == sorted(times)


@pytest.mark.parametrize(("model", "classes"), [("faster_rcnn_by_class", 90), ("ssd_resnet34_by_class", 80)])
def test_the_files_have_a_branch_for_each_class(model: str, classes: int) -> None:
    operators = computing(zoo_operators(model))
    found = branches(operators)
    assert len(found) == classes
    assert len({frozenset(operators[row].kind for row in branch) for branch in found}) == 1, "all alike"
    home = [{operators[row].unit for row in branch} for branch in found]
    assert sum(map(len, home)) == len(set().union(*home)), "fused operators stay in their branch"
    assert all(read[0] < number for number, op in enumerate(operators) for read in op.reads)


def test_tables_of_operators_are_written_and_read(tmp_path: Path) -> None:
    """A view is what it shows, and what does not come from the picture is none of its work."""
    writer = onnx_graphs.GraphWriter("g")
    x = writer.input("x", np.float32, (2, 8))
    first = writer.op("Relu", [x], "first")
    view = writer.op("Reshape", [first, writer.int64(4, 4)], "view")
    constant = writer.op("Identity", [writer.constant("ones", np.ones((4, 4), np.float32))], "constant")
    parts = writer.op("Add", [view, constant], "sum")
    writer.output("y", (4, 4), parts)
    writer.write(tmp_path / "m.onnx", {})
    operators = operators_of(load_dfg(tmp_path / "m.onnx"))
    write_table(tmp_path / "m.csv", operators)
    assert read_table(tmp_path / "m.csv") == operators
    kept = computing(operators)
    assert [(op.kind, op.reads, op.output_bytes) for op in kept] == [("Relu", (), (64,)), ("Add", ((0, 0),), (64,))]


def test_a_stream_of_one_query_is_what_the_evaluator_says() -> None:
    """And queries that never meet are each like it; when all are there, the busiest lane decides."""
    world = replace(WORLD, lanes=2, transfers=TransferMode.ENGINE)
    problem = PlacementProblem(task_graph("resnet50", world), PLAIN)
    for strategy in (Sequential(), CommSlowdown()):
        plan = strategy.place(problem)
        line = problem.evaluate(plan)
        assert line is not None
        stream = QueryStream(problem, 3)
        exact = np.ones((3, problem.size, 3))
        alone = stream.latencies_ns(plan, [10 * line.makespan_ns] * 3, exact)
        assert alone.tolist() == [line.makespan_ns] * 3
        slower = stream.latencies_ns(
            plan, [10 * line.makespan_ns] * 3, np.array([1.0, 2.0, 1.0])[:, None, None] * exact
        )
        assert slower[0] == slower[2] == line.makespan_ns < slower[1]
        crowd = stream.latencies_ns(plan, [0, 0, 0], exact)
        assert sorted(crowd) == crowd.tolist(), "the oldest query first"
        assert crowd[-1] >= 3 * line.period_ns
        per_s = QueryStream(problem, 24).queries_per_s(plan, np.ones((24, problem.size, 3)))
        assert per_s == pytest.approx(1e9 / line.period_ns, rel=0.05)


def test_a_linear_model_never_pays_and_launches_decide_what_does() -> None:
    assert all(row["can_pay"] == 0 for row in break_even("resnet50"))
    found = {(row["launch_us"], row["crossing_us"]): row for row in break_even("ssd")}
    for crossing in _break_even.CROSSINGS_US:
        counts = [found[launch, crossing]["can_pay"] for launch in _break_even.LAUNCHES_US]
        assert counts == sorted(counts)
    for launch in _break_even.LAUNCHES_US:
        counts = [found[launch, crossing]["can_pay"] for crossing in _break_even.CROSSINGS_US]
        assert counts == sorted(counts, reverse=True)
    assert 0 == found[1.0, 200.0]["can_pay"] < found[8.0, 10.0]["can_pay"] < found[8.0, 10.0]["units"]


def test_load_is_summed_up_over_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "our_plans", lambda problem, *_: {load.OURS_LATENCY: Sequential().place(problem)})
    rows = load.measure("resnet50", 1, (load.LOW, load.HIGH), 4, 0)
    assert [row["strategy"] for row in rows] == [load.SEQUENTIAL, load.COMM_SD, load.OURS_LATENCY, load.OURS]
    assert rows == load.measure("resnet50", 1, (load.LOW, load.HIGH), 4, 0)
    assert [rows[-1][f"chosen_{key}"] for key in (load.LOW, load.HIGH, "peak")] == [load.SEQUENTIAL] * 3
    every = [row | {"model": model} for row in rows for model in (*WIDE, "resnet50")]
    summary = load.summary_of(every)
    assert summary["latency_gain_pct"] == summary["throughput_gain_pct"] == summary["resnet50_change_pct"] == 0
    assert summary["comm_sd_latency_gain_pct"] < 0 < summary["comm_sd_throughput_gain_pct"], "slower, and the GPU freer"
    peaks = {row["strategy"]: row["peak_per_s"] for row in rows}
    gain = 100 * (peaks[load.COMM_SD] / peaks[load.SEQUENTIAL] - 1)
    assert summary["comm_sd_throughput_gain_pct"] == pytest.approx(gain)


def test_the_plan_is_chosen_that_is_believed_to_be_best() -> None:
    slow = {"strategy": "a", "peak_per_s": 9, "believed_peak_per_s": 2, "mean_ms_0.5": 1, "samples_0.5": [1]}
    rows = [slow | {"believed_ms_0.5": 3}, slow | {"strategy": "b", "believed_peak_per_s": 1, "believed_ms_0.5": 2}]
    made = load._chosen(rows, (0.5,))
    assert (made["strategy"], made["chosen_0.5"], made["chosen_peak"]) == (load.OURS, "b", "a")


def test_all_are_registered() -> None:
    assert {"sirplus-load", "sirplus-optimality", "sirplus-strategies"} <= set(benchmarks())
