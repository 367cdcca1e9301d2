"""An ONNX model that runs launches over the cores of a share by a placement."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import onnxruntime as ort
from typing_extensions import override

from cotenant.errors import CotenantError
from cotenant.execute.onnx.segment_session import LoadedSegment, as_ort_value
from cotenant.execute.onnx.segments import SegmentedModel
from cotenant.execute.threads.names import Threads
from cotenant.execute.threads.team import Team
from cotenant.techniques.placement.execute.placeable import LoadedTasks, Placeable
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask
from cotenant.techniques.placement.execute.task_run import TaskRun
from cotenant.work import TaskTime

_log = logging.getLogger(__name__)


class PlacedModel(Placeable):
    """Runs any range of units of one ONNX model (`execute.runner.Runner`), the whole by a placement.

    A run of the whole on n named cores follows the placement for n cores, if there is one. The calling thread runs the
    tasks of core 0, and those of several cores that begin at core 0; each other core has a lane. All other runs are
    sequential. So are runs of tasks that cannot be loaded; a warning says so.
    """

    inner: SegmentedModel

    def __init__(self, inner: SegmentedModel) -> None:
        super().__init__(inner)
        self._is_closed = False
        self._loaded: dict[tuple[int, ...], LoadedTasks[LoadedSegment] | None] = {}
        """Loaded tasks by cores of the machine; None where loading failed."""
        self._load_lock = threading.Lock()
        self._reported = threading.local()

    @override
    def prepare(self, ranges: Iterable[tuple[int, int]], threads: Threads = 1) -> None:
        """Load ranges; with a placement for these threads, its tasks instead of the whole."""
        whole = (0, self.unit_count)
        for each in ranges:
            if each != whole or self._loaded_tasks(threads) is None:
                super().prepare([each], self._sequential(threads) if each == whole else threads)

    @override
    def keep(self, threads: Iterable[Threads]) -> None:
        kept = list(threads)
        with self._load_lock:
            self._loaded = {cores: loaded for cores, loaded in self._loaded.items() if cores in kept}
        super().keep([*kept, *map(self._sequential, kept)])

    @override
    def run(
        self, start: int, end: int, tensors: Mapping[str, Any], threads: Threads | Team = 1, version: int = 0
    ) -> dict[str, Any]:
        inner = self.inner
        if start or end != self.unit_count or not isinstance(threads, tuple):
            return inner.run(start, end, tensors, threads, version)
        loaded = self._loaded_tasks(threads)
        if loaded is None:
            return inner.run(start, end, tensors, self._sequential(threads), version)
        inner.check_inputs(tensors)
        values = {name: as_ort_value(value) for name, value in tensors.items()}
        options = ort.RunOptions()

        def stop() -> None:
            options.terminate = True

        def execute(at: int, values: dict[str, Any]) -> None:
            if loaded.segments[at].session is not None:
                inner.run_segment(loaded.segments[at], values, options)

        began = time.perf_counter_ns()
        run = TaskRun(loaded.tasks, loaded.lanes, execute, [tensor.name for tensor in self.outputs], stop)
        run.run(values)
        self._reported.tasks = tuple(
            TaskTime(tuple(task.cores), len(task.units), start - began, end - began)
            for task, (start, end) in zip(loaded.tasks, run.times, strict=True)
        )
        return inner.outputs_of(values)

    def take_task_times(self) -> tuple[TaskTime, ...]:
        """Return and clear the task times of the last run by a placement on this thread."""
        tasks: tuple[TaskTime, ...] = self._reported.__dict__.pop("tasks", ())
        return tasks

    @override
    def close(self) -> None:
        self._is_closed = True
        super().close()
        with self._load_lock:
            self._loaded = {}

    def _replace(self, tasks: Mapping[int, tuple[PlacedTask, ...]], placed: tuple[tuple[int, str], ...]) -> None:
        with self._load_lock:
            super()._replace(tasks, placed)
            self._loaded = {}

    def _sequential(self, threads: Threads) -> Threads:
        """Threads of a sequential run of the whole: a placement of a single task may use one core."""
        tasks = () if isinstance(threads, int) else self.tasks(len(threads))
        return 1 if len(tasks) == 1 and len(tasks[0].cores) == 1 else threads

    def _loaded_tasks(self, threads: Threads) -> LoadedTasks[LoadedSegment] | None:
        """The loaded tasks for these cores, loaded at the first call; None if there is one task or loading failed."""
        if isinstance(threads, int) or len(self.tasks(len(threads))) < 2:
            return None
        loaded = self._loaded  # `keep` may put another one there
        if threads in loaded:
            return loaded[threads]
        with self._load_lock:
            if threads not in self._loaded:
                self._loaded[threads] = None if self._is_closed else self._load(threads)
            return self._loaded[threads]

    def _load(self, cores: tuple[int, ...]) -> LoadedTasks[LoadedSegment] | None:
        tasks = self.tasks(len(cores))
        try:
            keys = [tuple(cores[each] for each in task.cores) if len(task.cores) > 1 else 1 for task in tasks]
            weights = [sum(self.dfg.units[unit].macs for unit in task.units) for task in tasks]
            segments = [
                self.inner.load_units(key, each.units, (each.inputs, each.outputs), is_most=2 * weight > sum(weights))
                for key, each, weight in zip(keys, tasks, weights, strict=True)
            ]
            return LoadedTasks(tasks, segments, cores)
        except (CotenantError, RuntimeError) as error:  # no session, or no thread
            _log.warning(
                "model %s: runs sequentially on %d cores, not by its placement: %s", *(self.name, len(cores)), error
            )
            return None
