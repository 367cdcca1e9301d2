"""Measures tasks: the time of each unit of a model on one core and on all cores of a share.

Units of wide models, a session call, and the engine's timing of an operator all take a few microseconds. So

1. run the model in segments of units, each one call long enough to time, and the whole, alternately on one core and on
   all. The lower quartile counts, as other processes can only slow a run down;
2. measure the overhead of a call with light neighbouring units a and b: `T(a) + T(b) - T(ab)`;
3. divide each segment's time less one call among its units, in proportion to the engine's timings less their overhead
   (`execute.onnx.unit_times`).

On one core, the CPU time of the thread is measured. On several cores only wall time is available; it is scaled by
`CPU time / wall time` of the same segment on one core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.execute.batches import row_buckets
from cotenant.execute.core_target import CoreTarget
from cotenant.execute.gpu.stream_target import StreamTarget
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.onnx.unit_times import tensor_bytes, unit_times
from cotenant.execute.protocol import TargetDevice
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.lanes import Lane
from cotenant.execute.threads.names import Threads
from cotenant.measure.campaign import Campaign, Journal, OnStep, stamp
from cotenant.measure.inputs import make_inputs
from cotenant.measure.opened_model import OpenedModel, open_version
from cotenant.measure.solo import CORES, Effort
from cotenant.profiles.device import this_device
from cotenant.repository import default_version, tasks_path
from cotenant.repository.measured_content import content_of
from cotenant.techniques.placement.execute.placeable import Placeable
from cotenant.techniques.placement.execute.placed_model import PlacedModel
from cotenant.techniques.placement.task_profile import (
    BatchTimes,
    DeviceTimes,
    ModelTasks,
    TaskProfile,
    UnitTensor,
    load_tasks,
    save_tasks,
)
from cotenant.work import Share

TASK_EFFORT = Effort(budget_s=5.0, min_runs=7, max_runs=60)
_SEGMENTS = 16
"""Most segments of a model; each has at least the mean weight, but for single units."""
_PAIRS, _PAIR_RUNS = 3, 200
_TIMED_RUNS, _HAND_OVERS = 40, 300
_STEPS, _BATCH_STEPS = 6, 3
_JOINED_MIB, _JOINS = 16, 20
Inputs = Mapping[str, Any]
_Taken = tuple[int, int]
"""Wall time, CPU time."""


def measure_tasks(
    root: Path,
    model: str,
    share: Share,
    effort: Effort,
    *,
    fresh: bool = False,
    on_step: OnStep,
    rows: int = 1,
    target: TargetDevice = CORES,
    in_a_row: bool = False,
) -> tuple[str, ModelTasks]:
    """Measure the latest version of a model in a share, unless it is known; also returns its tenant's name.

    Measured are one row and the batches of `row_buckets(rows)`; in a share of a GPU one row, there and on the cores
    beside it. `in_a_row`: the units need not be placeable, but only run in sequence on cores.

    An interrupted measurement is continued. With `fresh`, or after a disturbed measurement, this model and share are
    measured again. Raises ConfigError for a model that is missing, cannot be placed, or has one unit, and ModelError
    for one that cannot run.
    """
    found = default_version(root, model)
    content = content_of(found, placed=False)  # before loading, so that later changes are noticed
    campaign = Campaign(tasks_path(root), this_device(target.device), fresh=fresh)
    known = campaign.known(load_tasks, lambda profile: profile.device.fingerprint, whole=False)
    models = {} if known is None else dict(known.models)
    opened = open_version(root, found, target, placed=False)
    before = models.get(found.tenant, {})
    with opened.runner as runner:
        placeable(opened, on_gpu=isinstance(target, StreamTarget), in_a_row=in_a_row)
        taken = None if fresh or share.size not in before or before[share.size].is_disturbed else before[share.size]
        is_known = taken is not None and (taken.digest, len(taken.units)) == (opened.digest, runner.unit_count)
        known_rows = {1, *taken.batches} if taken is not None and is_known else set()
        wanted = [each for each in row_buckets(rows) if each not in known_rows]
        if wanted and isinstance(target, StreamTarget):
            from cotenant.techniques.placement.measure.gpu_tasks import measure_beside  # which needs torch

            with open_version(root, found, placed=False).runner as twin:
                taken = measure_beside(opened, twin, share, target, effort, campaign.journal, on_step)
        elif wanted:
            work = _Measuring(runner, opened, share, effort, campaign.journal, on_step, wanted)
            if taken is None or not is_known:
                taken = work.one_row()
            batches = {each: work.batch(each, taken) for each in wanted if each > 1}
            work.done()
            taken = msgspec.structs.replace(taken, batches=dict(sorted({**taken.batches, **batches}.items())))
    assert taken is not None  # one row is always measured
    taken = msgspec.structs.replace(taken, content=content)
    models[found.tenant] = {**before, share.size: taken}
    if before.get(share.size) != taken:
        save_tasks(campaign.path, TaskProfile(campaign.device, *stamp(), dict(sorted(models.items()))))
    campaign.journal.remove()
    return found.tenant, taken


def placeable(opened: OpenedModel, *, on_gpu: bool = False, in_a_row: bool = False) -> Any:
    """The model, if its units can run on several devices at once, or in sequence with `in_a_row`. Raises ConfigError
    with the reason otherwise."""
    runner, where = opened.runner, f"model {opened.found.model!r}"
    if runner.kernels:
        raise ConfigError(f"{where}: runs on compiled kernels, in sequence only; expected a model on onnxruntime")
    if not in_a_row and not (isinstance(runner, Placeable) if on_gpu else _is_of_onnx(runner)):
        others = "torch models only beside a GPU" if on_gpu else "ONNX models only on cores"
        raise ConfigError(f"{where}: is a {opened.found.path.suffix} file; placements support {others}")
    if runner.unit_count < 2:
        why = runner.uncut_reason or "it is one operator"
        raise ConfigError(f"{where}: has one unit ({why}), expected several")
    return runner


def _is_of_onnx(model: Runner) -> bool:
    """Whether a model runs on onnxruntime, which can time its operators."""
    return isinstance(model, SegmentedModel | PlacedModel)


class _Measuring:
    """The steps of measuring one model; finished steps are kept. `wanted`: batches to measure, in rows."""

    def __init__(
        self,
        model: Runner,
        opened: OpenedModel,
        share: Share,
        effort: Effort,
        journal: Journal,
        on_step: OnStep,
        wanted: Sequence[int],
    ) -> None:
        self._model, self._opened, self._share, self._effort = model, opened, share, effort
        self._journal, self._on_step = journal, on_step
        self._is_batched = opened.found.config.model.max_batch > 1
        self._steps = sum(_STEPS + self._is_batched if rows == 1 else _BATCH_STEPS for rows in wanted)
        self._done = 0
        self._shape = opened.sweep((share,), effort).largest_shape
        self._ways: tuple[Threads, Threads] = (1, share.cores)

    def one_row(self) -> ModelTasks:
        """All measurements of one row."""
        model, share = self._model, self._share
        inputs = self._inputs(1)
        with CoreTarget().at(share):
            model.run(0, model.unit_count, inputs)  # raises a clear error if the model cannot run
            weights, cuts = self._weights("", inputs)
            launches = self._step(
                "launch", lambda: [_launch_ns(model, inputs, weights[0], each) for each in self._ways], "calls"
            )
            rounds = self._rounds("", inputs, cuts)
            hand_over = self._step("hand-over", partial(hand_over_ns, share), "hand-overs")
            tensors = self._step(
                "tensors", lambda: msgspec.to_builtins(_tensors(model, self._shape, inputs)), "tensors"
            )
            join = self._step("join", join_ns_per_mib, "rows put together") if self._is_batched else 0
        core, whole = _times(weights, cuts, rounds, launches)
        return ModelTasks(
            self._opened.digest,
            model.graph_path.parent.name,
            share.size,
            model.dfg.unit_names,
            msgspec.convert(tensors, tuple[UnitTensor, ...]),
            core,
            whole,
            hand_over,
            rounds["variation"],
            rounds["disturbance"],
            splits=self._opened.splits or (),
            join_ns_per_mib=join,
        )

    def batch(self, rows: int, one: ModelTasks) -> BatchTimes:
        """The times of a batch; the overhead of calls is that of one row."""
        inputs = self._inputs(rows)
        with CoreTarget().at(self._share):
            weights, cuts = self._weights(f"-{rows}", inputs)
            rounds = self._rounds(f"-{rows}", inputs, cuts)
        return BatchTimes(*_times(weights, cuts, rounds, (one.core.launch_ns, one.whole.launch_ns)))

    def done(self) -> None:
        """Report that all steps are done."""
        self._on_step(self._steps, self._steps, "")

    def _inputs(self, rows: int) -> Inputs:
        return make_inputs(self._model.inputs, self._shape, rows, self._is_batched, self._opened.samples)

    def _step(self, name: str, work: Callable[[], Any], words: str) -> Any:
        self._on_step(self._done, self._steps, f"{self._opened.found.tenant}: {words}")
        self._done += 1
        return self._journal.remember(f"{self._opened.digest}/tasks{self._share.size}/{name}", work)

    def _weights(self, of: str, inputs: Inputs) -> tuple[list[list[int]], Sequence[int]]:
        """The engine's timings of the units, on one core and on all, and the ends of segments."""
        weights = [
            self._step(
                f"weights{way}{of}",
                partial(_timed, self._model, inputs, threads),
                f"operators on {len(self._share.cores) if way else 1} core(s)",
            )
            for way, threads in enumerate(self._ways)
        ]
        return weights, self._model.suggest_cuts(weights[0], max(1.0, sum(weights[0]) / _SEGMENTS))

    def _rounds(self, of: str, inputs: Inputs, cuts: Sequence[int]) -> dict[str, Any]:
        work = partial(_rounds, self._model, inputs, cuts, self._ways, self._effort)
        found: dict[str, Any] = self._step(f"segments{of}", work, f"{len(cuts) - 1} segments")
        return found


def _times(
    weights: Sequence[Sequence[int]], cuts: Sequence[int], rounds: Mapping[str, Any], launches: Sequence[int]
) -> tuple[DeviceTimes, DeviceTimes]:
    """Device times on one core and on all cores."""
    core, whole = (
        DeviceTimes(
            divided(weights[way], cuts, rounds["segments"][way], launches[way]), launches[way], rounds["whole"][way]
        )
        for way in range(2)
    )
    return core, whole


def _timed(model: Runner, inputs: Inputs, threads: Threads) -> list[int]:
    """Weights of the units; engines other than onnxruntime time units on one thread only."""
    if not _is_of_onnx(model):
        return list(model.unit_ns(inputs))
    return list(unit_times(model.graph_path, model.dfg, inputs, threads, _TIMED_RUNS))


def _rounds(
    model: Runner, inputs: Inputs, cuts: Sequence[int], ways: Sequence[Threads], effort: Effort
) -> dict[str, Any]:
    """Times in ns of each segment and of the whole, on one core and on all, from alternating runs."""
    whole, segments = [(0, model.unit_count)], list(pairwise(cuts))
    for threads in ways:
        model.prepare([*whole, *segments], threads)
    samples: list[list[list[_Taken]]] = [[] for _ in ways]
    wholes: list[list[list[_Taken]]] = [[] for _ in ways]
    began = time.perf_counter()
    runs = 0
    while runs < effort.min_runs + effort.warm_up or (
        time.perf_counter() - began < effort.budget_s and runs < effort.max_runs
    ):
        for way, threads in enumerate(ways):
            samples[way].append(chain_times(model, inputs, segments, threads))
            wholes[way].append(chain_times(model, inputs, whole, threads))
        runs += 1
    of_segments, variation = _by_way(samples, effort.warm_up)
    of_whole, _ = _by_way(wholes, effort.warm_up)
    on_core = np.array(wholes[0])
    return {
        "segments": of_segments,
        "whole": [each[0] for each in of_whole],
        "variation": round(variation, 4),
        "disturbance": round(float(on_core[..., 0].sum() / max(1, on_core[..., 1].sum())), 4),
    }


def _by_way(samples: Sequence[Sequence[Sequence[_Taken]]], warm_up: int) -> tuple[list[list[int]], float]:
    """Times of each range by way (one core, all cores), from samples (way, run, range, clock).

    Also returns the coefficient of variation of CPU time on one core."""
    kept = np.array(samples, np.float64)[:, warm_up:]
    low, middle, high = np.percentile(kept, (25, 50, 75), axis=1)
    wall, cpu = low[..., 0], low[0, :, 1]
    times = [cpu, *(each * cpu / np.maximum(1, wall[0]) for each in wall[1:])]
    variation = float(np.median((high - low)[0, :, 1] / 1.349 / np.maximum(1, middle[0, :, 1])))
    return [np.maximum(1, np.rint(each)).astype(int).tolist() for each in times], variation


def chain_times(model: Any, inputs: Inputs, ranges: Sequence[tuple[int, int]], threads: Threads) -> list[_Taken]:
    """Wall time and CPU time of this thread for each range of units, run one after the other."""
    taken, tensors = [], inputs
    for start, end in ranges:
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        tensors = model.run(start, end, tensors, threads)
        taken.append((time.perf_counter_ns() - began, time.thread_time_ns() - cpu))
    return taken


def _launch_ns(model: Runner, inputs: Inputs, weights: Sequence[int], threads: Threads) -> int:
    """Overhead of a call in ns: median of `T(a) + T(b) - T(ab)` over light neighbouring units a and b."""
    pairs = sorted(range(model.unit_count - 1), key=lambda unit: (weights[unit] + weights[unit + 1], unit))[:_PAIRS]
    found = []
    for unit in pairs:
        tensors = model.run(0, unit, inputs) if unit else inputs
        separate, joint = [(unit, unit + 1), (unit + 1, unit + 2)], [(unit, unit + 2)]
        model.prepare([*separate, *joint], threads)
        walls = [
            [sum(wall for wall, _ in chain_times(model, tensors, ranges, threads)) for ranges in (separate, joint)]
            for _ in range(_PAIR_RUNS)
        ]
        found.append(median(one - other for one, other in walls))
    return max(0, round(median(found)))


def divided(weights: Sequence[int], cuts: Sequence[int], taken: Sequence[int], launch_ns: int) -> tuple[int, ...]:
    """Time of each segment less one call, divided among its units by weight."""
    made: list[int] = []
    for (start, end), ns in zip(pairwise(cuts), taken, strict=True):
        computing, total = max(0, ns - launch_ns), sum(weights[start:end])
        made += [round(computing * each / total) for each in weights[start:end]]
    return tuple(made)


def hand_over_ns(share: Share) -> int:
    """Median time in ns from submitting a task on one lane to its start on another, sleeping lane."""
    samples: list[int] = []
    with _lanes(share) as (giver, taker):
        for _ in range(_HAND_OVERS):
            ended = threading.Event()
            given: list[int] = []

            def take(given: list[int] = given, ended: threading.Event = ended) -> None:
                samples.append(time.perf_counter_ns() - given[0])
                ended.set()

            def give(given: list[int] = given, take: Callable[[], None] = take) -> None:
                given.append(time.perf_counter_ns())
                taker.put(take)

            giver.put(give)
            ended.wait()
    return round(median(samples))


def join_ns_per_mib() -> int:
    """Median time in ns per MiB to concatenate the rows of two chunks, larger than most caches."""
    halves, samples = [np.ones(_JOINED_MIB << 17, np.float32) for _ in range(2)], []
    for _ in range(_JOINS):
        began = time.thread_time_ns()
        np.concatenate(halves)
        samples.append(time.thread_time_ns() - began)
    return round(median(samples) / _JOINED_MIB)


@contextmanager
def _lanes(share: Share) -> Iterator[tuple[Lane, Lane]]:
    lanes = Lane(Share(share.cores[:1])), Lane(Share(share.cores[-1:]))
    try:
        yield lanes
    finally:
        for lane in lanes:
            lane.close()


def tensors_of_run(model: Runner, inputs: Inputs) -> list[UnitTensor]:
    """Tensors between units, with their sizes in a run."""
    sizes: dict[str, int] = {}
    values: Any = inputs
    for unit in range(model.unit_count):
        values = model.run(unit, unit + 1, values)
        sizes |= {name: value.nbytes for name, value in to_numpy(values).items()}
    return [UnitTensor(name, *ends, sizes[name]) for name, ends in model.dfg.crossing().items()]


def _tensors(model: Runner, shape: Mapping[str, Sequence[int]], inputs: Inputs) -> list[UnitTensor]:
    """Tensors between units, at a shape; sizes that cannot be inferred are taken from a run."""
    if not _is_of_onnx(model):
        return tensors_of_run(model, inputs)
    dfg = model.dfg_at(shape)
    ends = dfg.crossing()
    sizes = {name: dfg.tensors[name].size_bytes if name in dfg.tensors else 0 for name in ends}
    open_sizes = [name for name, size in sizes.items() if not size]
    if open_sizes:
        sizes |= tensor_bytes(model.graph_path, open_sizes, inputs)
    return [UnitTensor(name, producer, readers, sizes[name]) for name, (producer, readers) in ends.items()]
