"""Sets of models that start together on two real cores: rows split over lanes, in steps, free lanes, both threads.

Every way runs launches through the executor of the server, with onnxruntime, which does not spin:

- `sequential`: each model on both threads, one after another; `one thread`: on one.
- `split`: each lane of one core runs half of the rows of each model, in turn, with no wait between.
- `stepped`: models in four segments each, dealt to lanes longest first; all wait at the end of each step.
- `free`: a lane that is free takes the next model; `balanced`: the longest of those that are left.

A repetition runs all ways in an order drawn anew. Just before it and just after, two lanes do a fixed amount of work
beside each other. The repetition counts where that was 1.7 times as fast as one after the other: else other processes
were on the machine. The gain on more cores is a model, not a measurement: 1 + s (n - 1) for n cores, each s from the
gain on two cores.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import cache_folder
from bench.zoo.repository import build_repository
from cotenant.core.actions import Launch
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.protocol import LoadSpec, Timing
from cotenant.execute.runner import Runner
from cotenant.execute.threads.executor import ThreadExecutor
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import open_version
from cotenant.repository import find_versions
from cotenant.work import Share, Work

NAME = "gacer-real-cpu"
SEED = 1
SETS: tuple[Mapping[str, int], ...] = (
    {"alexnet": 8, "vgg16": 8, "resnet18": 8},
    {"densenet121": 8, "vgg16": 8, "lstm_classifier": 128},
    {"resnet50": 8, "vgg16": 8, "mobilenet_v3_large": 8},
    {"resnet101": 8, "densenet121": 8, "mobilenet_v3_large": 8},
    {"resnet34": 8, "lstm_classifier": 128, "bst": 64},
)
"""Those of the paper, with its batches."""
QUICK: tuple[Mapping[str, int], ...] = ({"resnet18": 4, "lstm_classifier": 16, "bst": 16},)
STEPS = 4
LEAST_SPEEDUP = 1.7
MOST_CORES = 128
_WAIT_S = 120.0
_PIECE = 6
"""Convolutions of the fixed work, of 64 channels of 28 x 28."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Units of a model for some of its rows, or for all where `rows` is empty."""

    tenant: str
    start: int
    end: int
    rows: tuple[int, ...] = ()


Queue = Sequence[_Job]
Step = Sequence[tuple[Sequence[Share], Queue]]
"""Queues of jobs, and the lanes that take from each; a step ends when all have run."""


@dataclass(slots=True)
class _Member:
    runner: Runner
    rows: int
    inputs: Mapping[str, Any]
    cuts: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


@dataclass(slots=True)
class _Stage:
    """An executor with the models of a set. `outputs` are those of the last play."""

    cores: tuple[int, int]
    executor: ThreadExecutor = field(default_factory=ThreadExecutor)
    members: dict[str, _Member] = field(default_factory=dict)
    outputs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def lanes(self) -> tuple[Share, Share]:
        return Share(self.cores[:1]), Share(self.cores[1:])

    @property
    def both(self) -> Share:
        return Share(self.cores)

    def add(self, tenant: str, member: _Member) -> None:
        """Load a model for one core and for both, whole and in segments."""
        spec = LoadSpec((*self.lanes, self.both), member.cuts)
        self.executor.add_model(tenant, self.executor.load(tenant, member.runner, spec))
        self.members[tenant] = member

    def play(self, steps: Sequence[Step]) -> int:
        """Run these steps, and give how long that took in ns."""
        queries = {tenant: next(self._numbers) for tenant in self.members}
        for tenant, query in queries.items():
            self.executor.put(query, self.members[tenant].inputs)
        began = time.perf_counter_ns()
        for step in steps:
            self._play_step(step, queries)
        took = time.perf_counter_ns() - began
        ran = {job.tenant for step in steps for _, queue in step for job in queue}
        self.outputs = {tenant: self.executor.take(query) for tenant, query in queries.items() if tenant in ran}
        for tenant, query in queries.items():
            if tenant not in ran:
                self.executor.discard(query)
        return took

    def _play_step(self, step: Step, queries: Mapping[str, int]) -> None:
        left = threading.Semaphore(0)
        errors: list[str] = []

        def next_of(queue: deque[_Job], share: Share) -> None:
            try:
                job = queue.popleft()
            except IndexError:
                left.release()
                return
            member, query = self.members[job.tenant], queries[job.tenant]
            count = job.rows[1] - job.rows[0] if job.rows else member.rows
            work = Work(job.tenant, 0, count, job.start, job.end, rows=job.rows)
            is_last = job.end == member.runner.unit_count
            launch = Launch(next(self._numbers), query, (query,), work, is_last, share, 0, part=bool(job.rows))

            def ended(_: int, error: str | None, __: Timing) -> None:
                errors.extend([error] if error else [])
                next_of(queue, share)

            self.executor.start(launch, ended)

        lanes = 0
        for shares, jobs in step:
            queue = deque(jobs)
            for share in shares:
                lanes += 1
                next_of(queue, share)
        for _ in range(lanes):
            if not left.acquire(timeout=_WAIT_S):
                raise BenchError(f"a launch did not end within {_WAIT_S:g} s")
        if errors:
            raise BenchError(f"a launch failed: {errors[0]}")


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure on the first two cores of this process; models are kept in the user's cache. `data_dir` is not used."""
    root = cache_folder() / NAME / "models"
    result = measured(root, QUICK if quick else SETS, 4 if quick else 40, 8.0 if quick else 300.0)
    if quick:
        Console().print("quick: one small set of small batches, four repetitions")
    return result


def measured(
    root: Path, sets: Sequence[Mapping[str, int]], repetitions: int, most_s: float, least: float = LEAST_SPEEDUP
) -> dict[str, object]:
    """The table of these sets, their models kept in `root`; at most so many repetitions, and seconds, for each.

    Raises BenchError where there is one core alone, or a model mixes rows.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    if len(cores) < 2:
        raise BenchError(f"lanes need two cores, and this process may use {list(cores)}")
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    for members in sets:
        build_repository({"onnx": root}, list(members))
        Console(stderr=True).print(f"measuring {', '.join(f'{name}:{count}' for name, count in members.items())}")
        rows.append(_row(root, members, (cores[0], cores[1]), repetitions, most_s, least))
    _print(rows)
    return {"summary": summary_of(rows), "rows": rows, "seeds": [SEED]}


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Rows split over lanes against both threads (geometric mean) and balanced free lanes (the least); how many
    repetitions counted."""
    counted = [row for row in rows if row["counted"]]
    over = [row["split_over_sequential"] for row in counted]
    gains = [row["cores_for_1_1"] for row in counted if row["cores_for_1_1"]]
    return {
        "split_over_sequential_geomean": math.exp(statistics.mean(map(math.log, over))) if over else math.nan,
        "split_over_free_balanced_min": min((row["split_over_balanced"] for row in counted), default=math.nan),
        "stepped_over_sequential_geomean": math.exp(
            statistics.mean(math.log(row["stepped_over_sequential"]) for row in counted)
        )
        if counted
        else math.nan,
        "cores_for_1_1_median": statistics.median(gains) if gains else math.nan,
        "sets_counted": len(counted),
    }


def cores_for(gain: float, split: float, threads: float, most: int = MOST_CORES) -> int:
    """From how many cores on splitting rows is so much faster than threads, by the model 1 + s (n - 1); 0: never.

    `split` and `threads` are the s of each: what the second core adds to the speed of one.
    """
    for cores in range(2, most + 1):
        if 1 + split * (cores - 1) >= gain * (1 + threads * (cores - 1)):
            return cores
    return 0


def ways_of(stage: _Stage, names: Sequence[str], solo_ns: Mapping[str, int]) -> dict[str, Sequence[Step]]:
    """The steps of each way for a set."""
    whole = {name: _Job(name, 0, stage.members[name].runner.unit_count) for name in names}
    longest = sorted(names, key=lambda name: -solo_ns[name])
    halves = []
    for lane in (0, 1):
        queue = []
        for name in names:
            rows = stage.members[name].rows
            part = (0, rows // 2) if lane == 0 else (rows // 2, rows)
            queue.append(_Job(name, 0, whole[name].end, part))
        halves.append(([stage.lanes[lane]], queue))
    return {
        "one thread": [[([stage.lanes[0]], [whole[name] for name in names])]],
        "sequential": [[([stage.both], [whole[name] for name in names])]],
        "split": [halves],
        "stepped": [_stepped(stage, names, step) for step in range(STEPS)],
        "free": [[(stage.lanes, [whole[name] for name in names])]],
        "balanced": [[(stage.lanes, [whole[name] for name in longest])]],
    }


def _stepped(stage: _Stage, names: Sequence[str], step: int) -> Step:
    """The segments of a step, each on the lane that has least to do, longest first."""
    segments = []
    for name in names:
        member = stage.members[name]
        start, end = member.cuts[step], member.cuts[step + 1]
        segments.append((sum(member.weights[start:end]), _Job(name, start, end)))
    queues: list[list[_Job]] = [[], []]
    loads = [0, 0]
    for weight, job in sorted(segments, key=lambda each: -each[0]):
        lane = loads.index(min(loads))
        loads[lane] += weight
        queues[lane].append(job)
    return [([stage.lanes[lane]], queues[lane]) for lane in (0, 1)]


def _row(
    root: Path, members: Mapping[str, int], cores: tuple[int, int], repetitions: int, most_s: float, least: float
) -> dict[str, Any]:
    stage, piece = _Stage(cores), _Stage(cores)
    opened = []
    try:
        for name, rows in members.items():
            found = open_version(root, find_versions(root, name)[-1], placed=False)
            opened.append(found.runner)
            runner, shape = found.runner, found.shapes[0]
            runner.row_graph(shape).check(0, runner.unit_count)
            one = make_inputs(runner.inputs, shape, 1, True)
            weights = runner.unit_ns(one)
            inputs = {key: np.asarray(each) for key, each in make_inputs(runner.inputs, shape, rows, True).items()}
            stage.add(name, _Member(runner, rows, inputs, _quarters(weights), weights))
        opened.append(_add_piece(piece, root))
        names = list(members)
        solo_ns = {}
        for name in names:
            alone: Sequence[Step] = [[([stage.lanes[0]], [_Job(name, 0, stage.members[name].runner.unit_count)])]]
            stage.play(alone)
            solo_ns[name] = stage.play(alone)
        ways = ways_of(stage, names, solo_ns)
        error = _error(stage, ways)
        times, all_of_them, speedups = _repeat(stage, piece, ways, repetitions, most_s, least)
        return _figures(members, times, all_of_them, speedups) | {"max_error": error}
    finally:
        stage.executor.close()
        piece.executor.close()
        for each in opened:
            each.close()


def _quarters(weights: Sequence[int]) -> tuple[int, ...]:
    """Cuts into as many segments as there are steps, of about equal weight, none of them empty."""
    sums = list(itertools.accumulate(weights, initial=0))
    cuts = [0]
    for step in range(1, STEPS):
        low, high = cuts[-1] + 1, len(weights) - (STEPS - step)
        if low > high:
            raise BenchError(f"a model of {len(weights)} units has no {STEPS} segments")
        wanted = sums[-1] * step / STEPS
        cuts.append(min(range(low, high + 1), key=lambda cut: abs(sums[cut] - wanted)))
    return (*cuts, len(weights))


def _add_piece(stage: _Stage, root: Path) -> SegmentedModel:
    """The fixed work: convolutions that fit into a cache, so that two cores need not share anything."""
    rng = np.random.default_rng(SEED)
    nodes, weights = [], []
    for at in range(_PIECE):
        kernel = (rng.standard_normal((64, 64, 3, 3)) * 0.04).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"w{at}"))
        nodes.append(helper.make_node("Conv", [f"x{at}", f"w{at}"], [f"x{at + 1}"], pads=[1] * 4))
    ends = [helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, ("rows", 64, 28, 28)) for at in (0, _PIECE)]
    graph = helper.make_graph(nodes, "piece", ends[:1], ends[1:], weights)
    path = root.parent / "piece.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = SegmentedModel.open(path, cache_dir=root.parent / "piece")
    inputs = {"x0": np.ones((4, 64, 28, 28), np.float32)}
    for name in ("left", "right"):
        stage.add(name, _Member(model, 4, inputs, (0, model.unit_count)))
    return model


def _speedup(piece: _Stage) -> float:
    """How much faster two lanes do two runs of the fixed work than one lane does."""
    jobs = [_Job(name, 0, piece.members[name].runner.unit_count) for name in ("left", "right")]
    beside: Sequence[Step] = [[([piece.lanes[at]], [jobs[at]]) for at in (0, 1)]]
    ways: Sequence[Sequence[Step]] = [[[([piece.lanes[0]], jobs)]], beside, [[([piece.lanes[1]], jobs)]]]
    first, both, second = (min(piece.play(way) for _ in range(3)) for way in ways)
    return (first + second) / 2 / both


def _repeat(
    stage: _Stage,
    piece: _Stage,
    ways: Mapping[str, Sequence[Step]],
    repetitions: int,
    most_s: float,
    least: float,
) -> tuple[dict[str, list[int]], int, list[float]]:
    """Times of each way in the repetitions that count, how many there were, and the speed-ups of the fixed work."""
    order = Random(SEED)
    times: dict[str, list[int]] = {way: [] for way in ways}
    speedups = [_speedup(piece)]
    began, count = time.perf_counter(), 0
    while count < repetitions and (count < 2 or time.perf_counter() - began < most_s):
        count += 1
        took = {way: stage.play(ways[way]) for way in order.sample(list(ways), len(ways))}
        speedups.append(_speedup(piece))
        if min(speedups[-2:]) >= least:
            for way, ns in took.items():
                times[way].append(ns)
    return times, count, speedups


def _figures(
    members: Mapping[str, int], times: Mapping[str, Sequence[int]], count: int, speedups: Sequence[float]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "set": ", ".join(f"{name}:{rows}" for name, rows in members.items()),
        "repetitions": count,
        "counted": len(times["split"]),
        "piece_speedup": statistics.median(speedups),
    }
    if not times["split"]:
        return row

    def over(way: str, other: str) -> float:
        """How much faster one way is than another."""
        return statistics.median(b / a for a, b in zip(times[way], times[other], strict=True))

    split, threads = over("split", "one thread") - 1, over("sequential", "one thread") - 1
    return (
        row
        | {f"{way.replace(' ', '_')}_ms": statistics.median(each) / 1e6 for way, each in times.items()}
        | {f"{way}_over_sequential": over(way, "sequential") for way in ("split", "stepped", "free", "balanced")}
        | {
            "split_over_balanced": over("split", "balanced"),
            "s_split": split,
            "s_threads": threads,
            "cores_for_1_1": cores_for(1.1, split, threads),
        }
    )


def _error(stage: _Stage, ways: Mapping[str, Sequence[Step]]) -> float:
    """The largest difference of any output of any way from that of one thread, as a part of the largest number."""
    play: Callable[[str], Mapping[str, Mapping[str, Any]]] = partial(_played, stage, ways)
    expected = play("one thread")
    worst = 0.0
    for way in ways:
        for name, outputs in play(way).items():
            for key, value in outputs.items():
                wanted = expected[name][key]
                worst = max(worst, float(np.abs(value - wanted).max() / max(1e-9, np.abs(wanted).max())))
    return worst


def _played(stage: _Stage, ways: Mapping[str, Sequence[Step]], way: str) -> Mapping[str, Mapping[str, Any]]:
    stage.play(ways[way])
    return stage.outputs


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    ways = {"one thr.": "one_thread", "seq.": "sequential"} | {
        name: name for name in ("split", "stepped", "free", "balanced")
    }
    table = Table("set", *ways, "/ seq.", "/ bal.", "1.1x at", "of", title="makespan in ms")
    for number, row in enumerate(rows, 1):
        counted = f"{row['counted']}/{row['repetitions']}"
        if not row["counted"]:
            table.add_row(str(number), *["-"] * (len(ways) + 3), counted)
            continue
        times = (f"{row[f'{way}_ms']:.0f}" for way in ways.values())
        ratios = (f"{row[key]:.2f}" for key in ("split_over_sequential", "split_over_balanced"))
        table.add_row(str(number), *times, *ratios, str(row["cores_for_1_1"] or "never"), counted)
    console = Console()
    console.print(table)
    for number, row in enumerate(rows, 1):
        console.print(f"{number}: {row['set']}")
    console.print(
        "/ seq., / bal.: how much faster split is than sequential and balanced; 1.1x at: cores from which split is "
        "1.1x of sequential, by a model, 1 + s (n - 1), not measured; of: repetitions in which two lanes did "
        f"fixed work {LEAST_SPEEDUP}x as fast as one",
        style="dim",
    )
