"""The second back end: kernels that TVM's MetaSchedule finds. They are candidates, to compare and to select from.

No compiled model runs them: their parallel loops belong to TVM's own pool of threads, which cannot take in cores while
a layer runs nor share them with the threads of other models, and their outputs have no rim.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from cotenant.techniques.layer_blocks.compile.backend import OnBuilt, SearchEffort
from cotenant.techniques.layer_blocks.compile.errors import CompileError
from cotenant.techniques.layer_blocks.compile.packing import Array
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.store import KernelCandidate, Store
from cotenant.techniques.layer_blocks.compile.trial import Trial
from cotenant.techniques.layer_blocks.compile.tvm.traces import TracedKnobs, read_trace, task_bytes

TUNING = "tvm"
"""In a store: the databases of the layers."""
_TOLERANCE = 1e-3
"""Of the largest number, beside the first: sums in another order, and other functions exp."""
_ROUNDS, _SLOW_NS = 9, 20_000_000
"""Measurements of each candidate; what takes longer than this at first gets a third of them."""


def require_tvm() -> None:
    """Raise CompileError, with what mends it, where TVM is not installed."""
    if importlib.util.find_spec("tvm") is None:
        raise CompileError("the back end tvm needs apache-tvm, which is missing; run: pip install 'cotenant[tvm]'")


class TvmSearch:
    """See `compile.backend.KernelBackend`. Raises CompileError where TVM is not installed."""

    name = "tvm"
    serves = False

    def __init__(self) -> None:
        require_tvm()
        from cotenant.techniques.layer_blocks.compile.tvm import tuning

        self._tuning = tuning

    def build(self, problem: Problem, store: Store, effort: SearchEffort, on_built: OnBuilt) -> list[KernelCandidate]:
        """See KernelBackend. A layer's candidates are one library; schedules of earlier searches are in it again."""
        known = [each for each in store.candidates(problem, self.name) if store.whole(each.name) is not None]
        known = [each for each in known if self.is_current(each, store)]
        if len(known) >= effort.candidates or (known and time.monotonic() > effort.deadline):
            return known
        from cotenant.techniques.layer_blocks.compile.tvm.workload import layer

        version, text = self._tuning.VERSION, self._tuning.target_text(store.target)
        folder = store.folder / TUNING / database_of(store, problem, version, text)
        records = self._tuning.records_of(folder)
        lacking = effort.candidates - len(records) if time.monotonic() <= effort.deadline else 1 - len(records)
        if lacking > 0:
            records = self._tuning.tuned(layer(problem, store.target.lanes), store.target, folder, lacking)
        if not records:
            raise CompileError(f"TVM could build no schedule for {problem}; use the back end ckernel")
        knobs = [read_trace(each.trace.as_json(), version, text) for each in records]
        names = [f"version_{at}" for at in range(len(records))]
        key = store.key_of(folder.name, *(str(each.trace.as_json()) for each in records))
        library = store.built(key, partial(self._tuning.export, records, names, store.target))
        made = []
        for each, function in zip(knobs, names, strict=True):
            size = task_bytes(problem, each, store.target.lanes)
            made.append(KernelCandidate(problem, each, library, each.tasks, each.parallelism, size, function=function))
            store.keep(made[-1])
            on_built(made[-1])
        return made

    def measure(self, problem: Problem, store: Store, built: Sequence[KernelCandidate]) -> list[KernelCandidate]:
        """See KernelBackend."""
        self._tuning.use_cores(sorted(os.sched_getaffinity(0))[:1])
        calls: list[Callable[[], object]] = []
        kept: list[KernelCandidate] = []
        first: Array | None = None
        given = self.arguments(problem, store)
        took = []
        for each in built:
            call, out = self.call(each, store, given)
            began = time.thread_time_ns()
            call()
            took.append(time.thread_time_ns() - began)
            result = out.numpy()
            first = result if first is None else first
            if float(np.max(np.abs(result - first))) > _TOLERANCE * max(1.0, float(np.max(np.abs(first)))):
                continue
            calls.append(call)
            kept.append(each)
        samples = []
        for _ in range(_ROUNDS if max(took) < _SLOW_NS else _ROUNDS // 3):
            row = []
            for call in calls:
                began = time.thread_time_ns()
                call()
                row.append(time.thread_time_ns() - began)
            samples.append(row)
        times = np.quantile(np.array(samples), 0.25, axis=0, method="lower")
        return [store.measured(each, int(ns)) for each, ns in zip(kept, times, strict=True)]

    def is_current(self, candidate: KernelCandidate, store: Store) -> bool:
        """See KernelBackend."""
        knobs = candidate.knobs
        made_by = (self._tuning.VERSION, self._tuning.target_text(store.target))
        return isinstance(knobs, TracedKnobs) and (knobs.version, knobs.target) == made_by

    def arguments(self, problem: Problem, store: Store) -> list[Any]:
        """Tensors of a trial as a kernel takes them, all but its output."""
        from cotenant.techniques.layer_blocks.compile.tvm.workload import output_shape

        lanes = store.target.lanes
        trial = Trial(problem, lanes)
        made = [trial.input[0], trial.packed_weights, trial.packed_bias.reshape(-1, lanes)]
        if problem.rows:
            made[0] = made[0].reshape(made[0].shape[0], 1, problem.width, lanes)
        if problem.adds:
            shape = output_shape(problem, lanes)
            padded = np.zeros((shape[0] * lanes, *shape[1:3]), np.float32)
            padded[: problem.filters] = trial.plain_added[0]
            made.append(padded.reshape(shape[0], lanes, *shape[1:3]).transpose(0, 2, 3, 1))
        return [self._tuning.tensor(each) for each in made]

    def call(self, candidate: KernelCandidate, store: Store, given: Sequence[Any]) -> tuple[Callable[[], object], Any]:
        """A call of a kernel on these tensors, and its output. Raises CompileError as `Store.checked` does."""
        from cotenant.techniques.layer_blocks.compile.tvm.workload import output_shape

        out = self._tuning.tensor(np.zeros(output_shape(candidate.problem, store.target.lanes), np.float32))
        function = self._tuning.load(store.checked(candidate.library))[candidate.function]
        return partial(function, *given, out), out

    def use_cores(self, cores: Sequence[int]) -> None:
        """How many cores run what the calling thread calls."""
        self._tuning.use_cores(cores)


def database_of(store: Store, problem: Problem, version: str, target: str) -> str:
    """The folder of a layer that was tuned, below `TUNING`."""
    return store.key_of("tvm", msgspec.json.encode(problem).decode(), version, target)


def remove_databases(store: Store) -> None:
    """Remove what was kept of layers that have no candidates any more."""
    made = [(each.problem, each.knobs) for each in store.all()]
    wanted = {
        database_of(store, problem, knobs.version, knobs.target)
        for problem, knobs in made
        if isinstance(knobs, TracedKnobs)
    }
    folder = store.folder / TUNING
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.name not in wanted:
            shutil.rmtree(each, ignore_errors=True)
