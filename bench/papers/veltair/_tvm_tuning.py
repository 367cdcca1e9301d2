"""MetaSchedule of TVM, run in this process: schedules drawn for one layer, built, tried, and kept in its database."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from cotenant.techniques.layer_blocks.compile.target import Target

VERSION = str(tvm.__version__)
_PROCESSORS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "portable": "x86-64"}
_CORES = 8
"""Of the target: its tiles are cut for so many, times 16; any number runs them."""
_TRIED = 3
"""Runs of a candidate while tuning; times that count are taken later, in turn."""
_SEED = 1
_INTRINSICS = "tvm.s_tir.tensor_intrin"
_REFUSED_S = 1e9
"""TVM notes 1e10 s for a candidate that could not be built."""


def target_text(target: Target) -> str:
    """The processor by TVM's name for it; empty for that of this machine."""
    return "" if target.name == "neon" else _PROCESSORS[target.name]


def _target(target: Target) -> Any:
    text = target_text(target)
    return tvm.target.Target({"kind": "llvm", "num-cores": _CORES, **({"mcpu": text} if text else {})})


def tuned(function: Any, target: Target, folder: Path, trials: int) -> list[Any]:
    """So many schedules more for a function; gives the records of all that could be built, those of the folder too."""
    wanted = _target(target)
    rules = [
        ms.schedule_rule.MultiLevelTiling(
            structure="SSRSRS",
            max_innermost_factor=64,
            reuse_write=ms.schedule_rule.ReuseType(req="may", levels=[1, 2], scope="global"),
        ),
        ms.schedule_rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=16, max_vectorize_extent=64, unroll_max_steps=[0, 16, 64, 512], unroll_explicit=True
        ),
    ]
    after = [
        ms.postproc.DisallowDynamicLoop(),
        ms.postproc.RewriteParallelVectorizeUnroll(),
        ms.postproc.RewriteReductionBlock(),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    database = ms.database.JSONDatabase(work_dir=str(folder))
    before = len(database)
    # Tuning asks for this module of TVM, which spends a minute on intrinsics of GPUs: none of them is used for a CPU.
    sys.modules.setdefault(_INTRINSICS, types.ModuleType(_INTRINSICS))
    task = ms.TuneContext(  # without a logger: it prints nothing
        mod=tvm.IRModule({"main": function}),
        target=wanted,
        space_generator=ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=after, mutator_probs={}),
        search_strategy="replay-trace",
        rand_state=_SEED + before,
        num_threads=1,
    ).clone()
    ms.tune.tune_tasks(
        tasks=[task],
        task_weights=[1.0],
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=min(trials, 64),
        builder=_Builder(),
        runner=_Runner(),
        database=database,
        cost_model="random",
        measure_callbacks=[ms.measure_callback.AddToDatabase()],
    )
    return records_of(folder)


def records_of(folder: Path) -> list[Any]:
    """What a folder's database holds, each schedule once, those left out that could not be built."""
    if not folder.is_dir():
        return []
    found = {
        str(record.trace.as_json()): record
        for record in ms.database.JSONDatabase(work_dir=str(folder)).get_all_tuning_records()
        if min(float(each) for each in record.run_secs) < _REFUSED_S
    }
    return [found[key] for key in sorted(found)]


def export(records: Sequence[Any], names: Sequence[str], target: Target, library: Path) -> float:
    """One library with a function a record; it appears whole or not at all. Gives the seconds that it took."""
    began = time.perf_counter()
    functions = {}
    for record, name in zip(records, names, strict=True):
        schedule = tvm.s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        functions[name] = schedule.mod["main"].with_attr("global_symbol", name)
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_name(f".{library.stem}.part.so")
    try:
        tvm.compile(tvm.IRModule(functions), target=_target(target)).export_library(str(part))
        os.replace(part, library)
    finally:
        part.unlink(missing_ok=True)
    return time.perf_counter() - began


def load(library: Path) -> Any:
    """A library that was exported: functions by name."""
    return tvm.runtime.load_module(str(library))


def tensor(values: Any) -> Any:
    """A copy of an array as TVM's functions take it."""
    return tvm.runtime.tensor(np.ascontiguousarray(values))


def use_cores(cores: Sequence[int]) -> None:
    """Have the calling thread's functions run on so many cores; its own affinity stays as it is."""
    before = os.sched_getaffinity(0)
    tvm.get_global_func("runtime.config_threadpool")(-2, len(cores), [str(each) for each in cores])
    os.sched_setaffinity(0, before)


@derived_object
class _Builder(PyBuilder):  # type: ignore[misc]
    """Builds in this process: TVM's own starts others, each of which loads all of it."""

    def build(self, build_inputs: Any) -> list[Any]:
        made = []
        for each in build_inputs:
            try:
                made.append(BuilderResult(_Artifacts.keep(tvm.compile(each.mod, target=each.target)), None))
            except Exception as error:  # a schedule that TVM itself cannot build is a bad one
                made.append(BuilderResult(None, str(error)))
        return made


class _Artifacts:
    """A built candidate that waits to be run, by a name that TVM takes for its path."""

    waiting: dict[str, Any] = {}  # noqa: RUF012 - one for the process

    @classmethod
    def keep(cls, built: Any) -> str:
        name = f"{time.monotonic_ns()}"
        cls.waiting[name] = built
        return name


@derived_object
class _Future(PyRunnerFuture):  # type: ignore[misc]
    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return RunnerResult(self._seconds, None)


@derived_object
class _Runner(PyRunner):  # type: ignore[misc]
    """Runs in this process, on this thread."""

    def run(self, runner_inputs: Any) -> list[Any]:
        made = []
        for each in runner_inputs:
            function = _Artifacts.waiting.pop(str(each.artifact_path))["main"]
            arrays = [tensor(np.zeros([int(d) for d in info.shape], info.dtype)) for info in each.args_info]
            samples = []
            for _ in range(_TRIED):
                began = time.perf_counter()
                function(*arrays)
                samples.append(time.perf_counter() - began)
            made.append(_Future(samples[1:]))
        return made
