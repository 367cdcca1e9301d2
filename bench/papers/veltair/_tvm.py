"""Kernels that TVM's MetaSchedule finds for a layer: a yardstick beside those of `cotenant compile`.

Schedules are drawn at random, without a cost model, on the blocks, rims and packed weights of the kernels in C. No
compiled model could run these kernels: parallel loops run on TVM's own pool of threads, and outputs have no rim.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.papers.veltair import _tvm_tuning as tuning
from bench.papers.veltair._tvm_layer import layer, output_shape
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import Target
from cotenant.techniques.layer_blocks.compile.trial import Trial

_ROUNDS, _SLOW_NS = 9, 20_000_000
"""Measurements of each schedule; where one takes longer than this at first, a third of them."""


class TvmKernel:
    """The fastest of the schedules that were found for a layer, with its tensors. `call` runs it, into `out`."""

    def __init__(self, problem: Problem, target: Target, folder: Path, trials: int) -> None:
        """Take the schedules of `folder` and search for more, up to `trials`. Raises CompileError if there is none."""
        found = folder / _key(problem, target)
        records = tuning.records_of(found)
        if len(records) < trials:
            records = tuning.tuned(layer(problem, target.lanes), target, found, trials - len(records))
        if not records:
            raise CompileError(f"TVM could build no schedule for {problem}")
        names = [f"version_{at}" for at in range(len(records))]
        library = found / f"{len(records)}.so"
        if not library.is_file():
            tuning.export(records, names, target, library)
        module, given = tuning.load(library), arguments(problem, target)
        self.out = tuning.tensor(np.zeros(output_shape(problem, target.lanes), np.float32))
        self.call: Callable[[], object] = _fastest([partial(module[name], *given, self.out) for name in names])


def is_tuned(problem: Problem, target: Target, folder: Path) -> bool:
    """Whether the folder has a schedule for the layer."""
    return bool(tuning.records_of(folder / _key(problem, target)))


def arguments(problem: Problem, target: Target) -> list[Any]:
    """Tensors of a trial as a kernel takes them, all but its output."""
    lanes = target.lanes
    trial = Trial(problem, lanes)
    made = [trial.input[0], trial.packed_weights, trial.packed_bias.reshape(-1, lanes)]
    if problem.rows:
        made[0] = made[0].reshape(made[0].shape[0], 1, problem.width, lanes)
    if problem.adds:
        shape = output_shape(problem, lanes)
        padded = np.zeros((shape[0] * lanes, *shape[1:3]), np.float32)
        padded[: problem.filters] = trial.plain_added[0]
        made.append(padded.reshape(shape[0], lanes, *shape[1:3]).transpose(0, 2, 3, 1))
    return [tuning.tensor(each) for each in made]


def _key(problem: Problem, target: Target) -> str:
    """The folder of a layer's database: by the problem, and by TVM and its target."""
    made_of = (msgspec.json.encode(problem).decode(), tuning.VERSION, tuning.target_text(target))
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32]


def _fastest(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The call of least CPU time on one core: lower quartile, taken in turn."""
    tuning.use_cores(sorted(os.sched_getaffinity(0))[:1])
    first = max(_timed(call) for call in calls)
    samples = [[_timed(call) for call in calls] for _ in range(_ROUNDS if first < _SLOW_NS else _ROUNDS // 3)]
    times = np.quantile(np.array(samples), 0.25, axis=0, method="lower")
    return calls[int(times.argmin())]


def _timed(call: Callable[[], object]) -> int:
    began = time.thread_time_ns()
    call()
    return time.thread_time_ns() - began
