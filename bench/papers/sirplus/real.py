"""Wide models on two real cores: the best placement, one session of two threads, onnxruntime's parallel executor.

For each model tasks are measured and three placements made. One has a lane of both cores, which is the sequential
session with two threads. One has two lanes of one core each. One is the best that the search finds among both. Two
candidates are then chosen in rounds of their own. One is the best placement: another than the first where it gains as
much as the planner requires. One is the better of two settings of the parallel executor: two operators at once, each
with one thread or with two; spinning off. Then all run in turns, in an order drawn anew each round; ratios are medians
over rounds. CPU time is that of the whole process. One thread runs beside them. Where its wall time is far above its
CPU time, other processes were on the machine, and the row says so.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from bench._data import Headline
from bench._registry import BenchError
from bench._server import cache_folder
from bench.zoo.repository import build_repository
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.runner import to_numpy
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import open_version
from cotenant.measure.solo import Effort
from cotenant.repository import find_versions
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.measure.tasks import TASK_EFFORT, measure_tasks
from cotenant.techniques.placement.plan.flat import PlacementProblem, TaskPlan
from cotenant.techniques.placement.plan.overflow import OverflowSearch, PlacementGoal
from cotenant.techniques.placement.plan.overview import LEAST_GAIN_PCT
from cotenant.techniques.placement.plan.placed_units import placement_of
from cotenant.techniques.placement.plan.profiled import graph_of
from cotenant.techniques.placement.plan.task_graph import TaskGraph
from cotenant.techniques.placement.task_profile import ModelTasks
from cotenant.techniques.placement.unit_placement import UnitPlacement, whole_name
from cotenant.work import Share

NAME = "sirplus-real"
HEADLINES = (
    Headline(
        "time by the best way over one session, all models",
        "over_sequential_geomean",
        "x",
        "measured, two cores; one session itself where no placement is used",
    ),
    Headline("the same, models with a placement", "placed_over_sequential_geomean", "x", "as above"),
    Headline("the same, wide SSD", "ssd_wide_over_sequential", "x", "as above"),
)
SEED = 1
SSD = "ssd_mobilenet_by_class"
LINEAR = "resnet50"
MODELS = (
    *("googlenet", "inception_v3", "ensemble", SSD, "ssd_resnet34_by_class"),
    *("faster_rcnn_by_class", "mask_rcnn_by_class", LINEAR),
)
QUICK = ("googlenet", LINEAR)
"""The export of a detector takes minutes."""
_STEPS = 1 << 40
Call = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RealEffort:
    """How long to measure tasks, to search, to choose (rounds), and to compare (rounds, and seconds at most)."""

    tasks: Effort = TASK_EFFORT
    search_s: float = 20.0
    choosing: int = 7
    rounds: int = 60
    most_s: float = 90.0


FAST = RealEffort(Effort(0.5, 3, 8, 1), 2.0, 3, 8, 4.0)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure on the first two cores of this process; models are kept in the user's cache. `data_dir` is not used."""
    root = cache_folder() / "sirplus-real" / "models"
    names = QUICK if quick else MODELS
    result = measured(root, names, FAST if quick else RealEffort())
    if quick:
        Console().print(f"quick: fewer rounds and a short search, and of the models {', '.join(names)} alone")
    return result


def measured(root: Path, names: Sequence[str], effort: RealEffort) -> dict[str, object]:
    """The table of these models of the zoo, kept in `root`. Raises BenchError where there is one core alone."""
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    if len(cores) < 2:
        raise BenchError(f"lanes need two cores, and this process may use {list(cores)}")
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        build_repository({"onnx": root}, [name])
        Console(stderr=True).print(f"measuring {name}")
        rows.append(_row(root, name, Share(cores), effort))
    _print(rows)
    return {"summary": summary_of(rows), "rows": rows, "seeds": [SEED]}


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Worst model against its sequential run, the wide SSD against its own, all against the parallel executor."""
    over = [float(row["best_over_sequential"]) for row in rows]
    placed = [float(row["best_over_sequential"]) for row in rows if row["best"] != "sequential"]
    parallel = [math.log(row["best_over_ort_parallel"]) for row in rows]
    ssd = [float(row["best_over_sequential"]) for row in rows if row["model"] == SSD]
    return {
        "over_sequential_geomean": statistics.geometric_mean(over),
        "placed_over_sequential_geomean": statistics.geometric_mean(placed) if placed else math.nan,
        "placed_models": float(len(placed)),
        "worst_over_sequential": max(over),
        "ssd_wide_over_sequential": ssd[0] if ssd else math.nan,
        "over_ort_parallel_geomean": math.exp(statistics.mean(parallel)),
    }


def placements(tenant: str, tasks: ModelTasks, search_s: float) -> dict[str, UnitPlacement]:
    """By name: two lanes of one core, and the mix of these with both cores together."""
    whole = graph_of(tasks)
    found = {}
    for name, graph in (("two lanes", _lanes_alone(whole, whole_name(tasks.cores))), ("mixed", whole)):
        problem = PlacementProblem(graph)
        noise = min(0.3, tasks.variation)
        plan: TaskPlan = OverflowSearch(PlacementGoal(), _STEPS, search_s, noise=noise).solve(problem).plan
        found[name] = placement_of(tenant, tasks.graph, problem, plan, tasks.sequential_ns, 0)
    return found


def _lanes_alone(graph: TaskGraph, both: str) -> TaskGraph:
    devices = tuple(each for each in graph.devices if each.name != both)
    names = [each.name for each in devices]
    tasks = tuple(replace(task, compute_ns={name: task.compute_ns[name] for name in names}) for task in graph.tasks)
    return replace(graph, devices=devices, tasks=tasks)


def _row(root: Path, name: str, share: Share, effort: RealEffort) -> dict[str, Any]:
    tenant, tasks = measure_tasks(root, name, share, effort.tasks, on_step=lambda *_: None)
    plans = placements(tenant, tasks, effort.search_s)
    opened = open_version(root, find_versions(root, name)[-1], placed=False)
    with opened.runner as runner:
        assert isinstance(runner, PlacedModel)
        inputs = make_inputs(runner.inputs, opened.shapes[0], 1, opened.found.config.model.max_batch > 1)
        feeds = {key: np.asarray(value) for key, value in inputs.items()}
        sessions = {f"parallel, {threads}": _parallel(runner.files[0], threads) for threads in (1, 2)}
        whole = (0, runner.unit_count)

        def sequential(threads: Any) -> Call:
            runner.inner.prepare([whole], threads)
            return lambda: to_numpy(runner.inner.run(*whole, feeds, threads))

        def by(placed: PlacedModel) -> Call:
            placed.prepare([whole], share.cores)
            return lambda: to_numpy(placed.run(*whole, feeds, share.cores))

        ways: dict[str, Call] = {"sequential": sequential(share.cores), "one thread": sequential(1)}
        pieces = {"sequential": 1}
        others = []
        for way, placement in plans.items():
            model = PlacedModel(SegmentedModel.open(runner.path, cache_dir=runner.graph_path.parents[1], name=name))
            others.append(model)
            model.place(placement)
            pieces[way] = len(model.tasks(share.size))
            ways[way] = by(model)
        for way, session in sessions.items():
            ways[way] = _free(session, feeds, share.cores)
        try:
            expected = ways["one thread"]()
            error = max(_error(call(), expected) for call in ways.values())
            return _compared(name, runner.unit_count, share, ways, pieces, effort) | {"max_error": error}
        finally:
            for model in others:
                model.close()


def _compared(
    name: str, units: int, share: Share, ways: Mapping[str, Call], pieces: Mapping[str, int], effort: RealEffort
) -> dict[str, Any]:
    first = _in_turns(ways, share, effort.choosing, effort.most_s)
    quick = {way: float(np.percentile([wall for wall, _ in first[way]], 25)) for way in ways}
    best = min(pieces, key=quick.__getitem__)
    if quick[best] > (1 - LEAST_GAIN_PCT / 100) * quick["sequential"]:  # of several that are as good one looks better
        best = "sequential"
    parallel = min((way for way in ways if way.startswith("parallel")), key=quick.__getitem__)
    kept = {way: ways[way] for way in dict.fromkeys(("one thread", "sequential", best, parallel))}
    times = _in_turns(kept, share, effort.rounds, effort.most_s)
    wall = {way: [wall for wall, _ in each] for way, each in times.items()}

    def over(way: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(wall[way], wall[other], strict=True))

    return {
        "model": name,
        "units": units,
        "best": best,
        "pieces": pieces[best],
        "rounds": len(wall["sequential"]),
        "best_over_sequential": over(best, "sequential"),
        "best_over_ort_parallel": over(best, parallel),
        "ort_parallel": parallel,
        **{
            f"{key}_{unit}_ms": statistics.median(each[at] for each in times[way]) / 1e6
            for key, way in (
                ("best", best),
                ("sequential", "sequential"),
                ("ort_parallel", parallel),
                ("one_thread", "one thread"),
            )
            for at, unit in enumerate(("wall", "cpu"))
        },
        "chosen_from_ms": {way: ns / 1e6 for way, ns in quick.items()},
        "disturbance": statistics.median(wall / max(1, cpu) for wall, cpu in times["one thread"]),
    }


def _in_turns(ways: Mapping[str, Call], share: Share, rounds: int, most_s: float) -> dict[str, list[tuple[int, int]]]:
    """Wall and CPU time of each call in ns, in rounds; the first one is not counted."""
    times: dict[str, list[tuple[int, int]]] = {way: [] for way in ways}
    order, names = Random(SEED), list(ways)
    began = time.perf_counter()
    with CoreTarget().at(share):
        for round_ in range(rounds + 1):
            for way in order.sample(names, len(names)):
                cpu, wall = time.process_time_ns(), time.perf_counter_ns()
                ways[way]()
                wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
                if round_:
                    times[way].append((wall, cpu))
            if round_ and time.perf_counter() - began > most_s:
                break
    return times


def _parallel(path: Path, threads: int) -> ort.InferenceSession:
    """onnxruntime's parallel executor: two operators at once, each on so many threads, without spinning."""
    options = ort.SessionOptions()
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads, options.intra_op_num_threads = 2, threads
    for pool in ("intra", "inter"):
        options.add_session_config_entry(f"session.{pool}_op.allow_spinning", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _free(session: ort.InferenceSession, feeds: Mapping[str, Any], cores: Sequence[int]) -> Call:
    """A run of which the calling thread may sit on either core, as its pool's."""
    names = [each.name for each in session.get_outputs()]

    def call() -> Mapping[str, Any]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            return dict(zip(names, session.run(None, dict(feeds)), strict=True))
        finally:
            os.sched_setaffinity(0, before)

    return call


def _error(got: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    return max(float(np.max(np.abs(got[name] - value), initial=0)) for name, value in expected.items())


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("model", "best (pieces)", "best", "seq.", "ORT", "of seq.", "of ORT", "disturbed", title="wall ms")
    for row in rows:
        times = (f"{row[f'{key}_wall_ms']:.1f}" for key in ("best", "sequential", "ort_parallel"))
        ratios = (f"{row[key]:.3f}" for key in ("best_over_sequential", "best_over_ort_parallel"))
        best = f"{row['best']} ({row['pieces']})"
        table.add_row(row["model"].replace("_by_class", " *"), best, *times, *ratios, f"{row['disturbance']:.2f}")
    console = Console()
    console.print(table)
    for row in rows:
        cpu = (f"{row[f'{key}_cpu_ms']:.1f}" for key in ("best", "sequential", "ort_parallel", "one_thread"))
        console.print(f"CPU ms of {row['model']}: {', '.join(cpu)} (best, sequential, ORT parallel, one thread)")
    console.print(
        "*: a branch for each class; ORT: its parallel executor; disturbed: wall over CPU time of one thread",
        style="dim",
    )
