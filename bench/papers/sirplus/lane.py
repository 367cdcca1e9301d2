"""The cost of lanes of a placed model: a linear model on one lane, and handing a task over to another core.

Source of the goal: waking a sleeping core takes 14 to 19 us by the kernel, which `bare_lock_us` measures beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.threads.lanes import Lane
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask
from cotenant.techniques.placement.execute.task_run import TaskRun
from cotenant.techniques.placement.unit_placement import UnitPlacement, runs_of
from cotenant.work import Share

SEED = 1
_LAYERS, _WIDTH = 12, 64
_NAP_S = 0.0004
"""So long a lane has nothing to do before it is handed something: it is asleep by then."""


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure on the first two cores of this process. `data_dir` is not used."""
    result = measured(400 if quick else 4000)
    if quick:
        Console().print("quick: a tenth of the turns; nothing else is left out")
    return result


def measured(turns: int) -> dict[str, Any]:
    """The figures of so many hand-overs of each kind."""
    cores = _two_cores()
    overhead_us, plain_us = _chain(cores, 5 * turns)
    lane = Lane(Share(cores[1:]))
    with CoreTarget().at(Share(cores)):
        asleep = _asleep(lane, turns)
        queued = _queued(lane, turns)
        bare = _bare_lock(cores, turns)
    lane.close()
    rows = [
        {"what": f"a chain of {_LAYERS} products on one lane, more than its session", **_figures(overhead_us)},
        {"what": "its session alone", **_figures(plain_us)},
        {"what": "hand-over to a lane that sleeps", **_figures(asleep)},
        {"what": "hand-over to a lane that is busy until then", **_figures(queued)},
        {"what": "waking a thread on the other core by a bare lock", **_figures(bare)},
    ]
    table = Table("what", "median us", "p10", "p90")
    for row in rows:
        table.add_row(str(row["what"]), *(f"{row[key]:.1f}" for key in ("median_us", "p10_us", "p90_us")))
    Console().print(table)
    medians = [statistics.median(each) for each in (overhead_us, asleep, queued, bare)]
    names = ("chain_overhead_us", "handover_us", "handover_queued_us", "bare_lock_us")
    return {"summary": dict(zip(names, medians, strict=True)), "rows": rows, "seeds": [SEED]}


def _two_cores() -> tuple[int, int]:
    """Raises BenchError where this process may use one alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError(f"lanes need two cores, and this process may use {cores}")
    return cores[0], cores[1]


def _figures(values: list[float]) -> dict[str, float]:
    low, high = np.percentile(values, (10, 90))
    return {"median_us": statistics.median(values), "p10_us": float(low), "p90_us": float(high)}


def _chain(cores: tuple[int, ...], turns: int) -> tuple[list[float], list[float]]:
    """By pairs of runs how much longer a placed chain takes than its session, and how long that takes."""
    rng = np.random.default_rng(SEED)
    weights = [rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) / 8 for _ in range(_LAYERS)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"x{at}", f"w{at}"], [f"x{at + 1}"]) for at in range(_LAYERS)],
        "chain",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, _WIDTH])],
        [helper.make_tensor_value_info(f"x{_LAYERS}", TensorProto.FLOAT, [1, _WIDTH])],
        [numpy_helper.from_array(each, f"w{at}") for at, each in enumerate(weights)],
    )
    extra, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        with PlacedModel(SegmentedModel.open(path)) as model, CoreTarget().at(Share(cores)):
            units = runs_of([(name, "cpu:0") for name in model.dfg.unit_names])
            model.place(UnitPlacement("chain", model.graph_path.parent.name, 2, 0, 0, 0, units))
            feeds = {"x0": np.ones((1, _WIDTH), np.float32)}
            for turn in range(turns):
                took = [_timed(model, feeds, threads) for threads in ((1, cores) if turn % 2 else (cores, 1))]
                alone, placed = took if turn % 2 else took[::-1]
                plain.append(alone)
                extra.append(placed - alone)
    return extra, plain


def _timed(model: PlacedModel, feeds: Mapping[str, Any], threads: Any) -> float:
    began = time.perf_counter_ns()
    model.run(0, _LAYERS, feeds, threads)
    return (time.perf_counter_ns() - began) / 1e3


def _piece(core: int, waits: int, *followers: int) -> PlacedTask:
    return PlacedTask(range(core, core + 1), (), (), (), followers, waits)


def _asleep(lane: Lane, turns: int) -> list[float]:
    """From the end of a task here to the start of the one on the lane, which has slept for a while."""
    pieces = (_piece(0, 0, 1), _piece(1, 1))
    stamps = [0, 0]

    def execute(at: int, _: dict[str, Any]) -> None:
        if at == 0:
            time.sleep(_NAP_S)
        stamps[at] = time.perf_counter_ns()

    found = []
    for _ in range(turns):
        TaskRun(pieces, {1: lane}, execute).run({})
        found.append((stamps[1] - stamps[0]) / 1e3)
    return found


def _queued(lane: Lane, turns: int) -> list[float]:
    """From the end of a task on the lane to the start of the next, with inputs that came from here meanwhile."""
    pieces = (_piece(0, 0, 2), _piece(1, 0, 2), _piece(1, 2))
    stamps = [0, 0, 0]

    def execute(at: int, _: dict[str, Any]) -> None:
        if at == 1:
            time.sleep(_NAP_S)
        stamps[at] = time.perf_counter_ns()

    found = []
    for _ in range(turns):
        TaskRun(pieces, {1: lane}, execute).run({})
        found.append((stamps[2] - stamps[1]) / 1e3)
    return found


def _bare_lock(cores: tuple[int, ...], turns: int) -> list[float]:
    """What the kernel and the interpreter take at least: a lock let go here and taken there."""
    ring, back = threading.Lock(), threading.Lock()
    ring.acquire()
    back.acquire()
    found: list[float] = []
    sent = [0]

    def wait() -> None:
        for _ in range(turns):
            ring.acquire()
            found.append((time.perf_counter_ns() - sent[0]) / 1e3)
            back.release()

    other = Lane(Share(cores[1:]))
    other.put(wait)
    for _ in range(turns):
        time.sleep(_NAP_S)
        sent[0] = time.perf_counter_ns()
        ring.release()
        back.acquire()
    other.close()
    return found
