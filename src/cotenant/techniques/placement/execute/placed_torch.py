"""A torch model that runs launches over a stream of a GPU share and cores beside it, by a placement.

No part of this has run on a GPU: docs/placement.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from cotenant.errors import CotenantError
from cotenant.execute.errors import ModelError
from cotenant.execute.gpu.chains import WARM_RUNS
from cotenant.execute.gpu.streams import Event, Named, Replay, StreamLane, wait_for
from cotenant.execute.torch.arrays import array_of
from cotenant.execute.torch.model import TorchModel, first_line
from cotenant.execute.torch.segment import Segment
from cotenant.execute.torch.threads import use_threads
from cotenant.linux import sleep_precisely
from cotenant.techniques.placement.execute.placeable import LoadedTasks, Placeable
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask
from cotenant.techniques.placement.execute.task_run import TaskRun
from cotenant.work import Share, TaskTime

LOOK_S = 1e-5
"""Polling interval in seconds of a core that waits for an event of the stream."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchTask:
    """A task of a placement as a torch function on its device.

    `crossing`: outputs that the other side (stream or cores) reads; `why_eager`: why the task is not captured, or "".
    """

    segment: Segment
    weights: tuple[torch.Tensor, ...]
    crossing: tuple[str, ...]
    why_eager: str

    def run(self, given: Sequence[torch.Tensor]) -> Named:
        """Compute on the calling thread, or submit to the thread's stream."""
        return dict(zip(self.segment.outputs, self.segment.function(*given, *self.weights), strict=True))


class PlacedTorch(Placeable):
    """A `TorchModel` with placements, which executors with streams follow."""

    inner: TorchModel

    def __init__(self, inner: TorchModel) -> None:
        super().__init__(inner)
        self.device, self.arithmetic = inner.device, inner.arithmetic
        self.check, self.check_values, self.why_eager = inner.check, inner.check_values, inner.why_eager

    def cut(self, tasks: Sequence[PlacedTask]) -> list[TorchTask]:
        """Load the tasks of a placement; weights of tasks on cores are copied to host memory.

        Raises ModelError for a task that needs an unknown size, and for a closed model.
        """
        sides = [
            {name for task in tasks if bool(task.cores[0]) == on_core for name in task.inputs}
            for on_core in (False, True)
        ]
        held: dict[str, torch.Tensor] = {}
        return [self._task(task, sides[not task.cores[0]], held) for task in tasks]

    def unit_ns(self, inputs: Mapping[str, Any], lane: StreamLane | None = None) -> tuple[int, ...]:
        """Time of each unit, by `TorchModel.unit_ns`."""
        return self.inner.unit_ns(inputs, lane)

    def _task(self, task: PlacedTask, others: set[str], held: dict[str, torch.Tensor]) -> TorchTask:
        on_core = bool(task.cores[0])
        segment, weights = self.inner.load_units(task.units, (task.inputs, task.outputs), on_host=on_core)
        if on_core:
            held.update({name: weight.cpu() for name, weight in weights.items() if name not in held})
            weights = held
        why = next(filter(None, (self.why_eager(unit, unit + 1) for unit in task.units)), "")
        crossing = tuple(name for name in segment.outputs if name in others)
        return TorchTask(segment, tuple(weights[name] for name in segment.weights), crossing, why)


@dataclass(slots=True, eq=False)
class _TensorCopies:
    """Copies of a tensor of one run, on the host (`here`) and on the device (`there`). `event`: end of the copy to the
    host."""

    here: torch.Tensor | None = None
    there: torch.Tensor | None = None
    event: Event | None = None


class CapturedTasks:
    """Tasks of a stream captured as graphs for batches of `rows` rows (0: no batch), over fixed tensors."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tensors: dict[str, torch.Tensor] = {}
        self.replays: dict[int, Replay] = {}

    def has(self, start: int, end: int) -> bool:
        """True: only the whole model is placed, so no other range is requested."""
        return True


class PlacedStream:
    """One placed model in a share of a GPU and on cores beside it. It runs one launch at a time."""

    def __init__(self, model: PlacedTorch, streams: StreamLane, loaded: LoadedTasks[TorchTask]) -> None:
        self.model = model
        self.streams = streams
        self.loaded = loaded
        for lane in loaded.lanes.values():
            lane.put(sleep_precisely)

    def launch(self, rows: int, captured: CapturedTasks | None = None) -> PlacedLaunch:
        """A launch of `rows` rows, or by captured tasks."""
        return PlacedLaunch(self, captured or CapturedTasks(rows))

    def warm(self, inputs: Named, rows: int, captured: CapturedTasks | None = None) -> PlacedLaunch:
        """Run it WARM_RUNS times on the thread of its lane and return the last launch. Raises what the model raises."""
        for _ in range(WARM_RUNS):
            launch = self.launch(rows, captured)
            launch.given = {}
            launch.fill(0, inputs)
            launch.replay(0, self.model.unit_count)
        return launch

    def capture(self, inputs: Named, rows: int) -> CapturedTasks:
        """Capture each task of the stream that can be captured, for inputs of these shapes, and warm up.

        Runs on the thread of the lane only. Raises what `StreamLane.capture` and the model raise.
        """
        given = self.warm(inputs, rows).given or {}
        made = CapturedTasks(rows)
        for at, task in enumerate(self.loaded.segments):
            if at not in given or task.why_eager:
                continue

            def work(task: TorchTask = task, like: Sequence[torch.Tensor] = given[at]) -> Named:
                for name, tensor in zip(task.segment.inputs, like, strict=True):
                    if name not in made.tensors:  # allocated from the lane's memory
                        made.tensors[name] = torch.empty_like(tensor)
                return task.run([made.tensors[name] for name in task.segment.inputs])

            made.replays[at], outputs = self.streams.capture(work)
            made.tensors.update(outputs)
        made.tensors = dict(self.streams.unowned(made.tensors))
        self.warm(inputs, rows, made)
        return made


class PlacedLaunch:
    """One launch by a placement, with the interface of a `SegmentChain`. It holds its tensors until it has ended.

    The thread of the lane submits the tasks of the stream in order, and waits for tasks of cores only. A tensor that
    the other side reads is copied once, on a stream for that direction. Outputs of the device are copied when they are
    made, inputs when a task reads them. Cores poll the event of the copy; the stream waits for it.
    """

    def __init__(self, placed: PlacedStream, captured: CapturedTasks) -> None:
        self.rows = captured.rows
        self.given: dict[int, tuple[torch.Tensor, ...]] | None = None
        """Inputs of the stream's tasks, by number; recorded for capturing only."""
        self._placed, self._streams, self._loaded, self._captured = placed, placed.streams, placed.loaded, captured
        self._tensors: dict[str, _TensorCopies] = {}
        self._held: list[torch.Tensor] = []
        """Tensors copied to the device. Their memory belongs to the copy stream, which does not track later reads."""
        self._began_ns = 0
        self._began: Event | None = None
        self._marks: dict[int, tuple[Event, Event]] = {}
        self._times: list[tuple[int, int]] = []

    def fill(self, start: int, values: Named) -> None:
        """Take the inputs in host memory, padded with rows of zeros. Raises TensorError."""
        self._placed.model.check(values)
        for name, value in values.items():
            missing = self.rows - len(value) if self.rows else 0
            if missing:
                zeros = value.new_zeros((missing, *value.shape[1:]))
                value = self._streams.gather([array_of(value), array_of(zeros)])
            self._tensors[name] = _TensorCopies(here=value)

    def replay(self, start: int, end: int) -> Named:
        """Run all tasks of the host and submit those of the device. Returns the outputs, on either side.

        Raises the first error of a task, after all cores have finished.
        """
        streams, model = self._streams, self._placed.model
        self._began, self._began_ns = streams.record(True), perf_counter_ns()
        with streams.crossing(up=True):
            streams.follow(self._began)  # earlier launches may still read the targets of copies
        names = [tensor.name for tensor in model.outputs]
        run = TaskRun(self._loaded.tasks, self._loaded.lanes, self._execute, [*names, *self._tensors])
        try:
            run.run(self._tensors)
        finally:
            for up in (True, False):
                with streams.crossing(up):
                    event = streams.record()
                streams.follow(event)
        self._times = run.times  # keeping the run would make a reference cycle
        found = {name: self._tensors[name] for name in names}
        self._tensors = {}
        return {
            name: copies.there if copies.there is not None else self._on_host(copies) for name, copies in found.items()
        }

    def times(self) -> tuple[TaskTime, ...]:
        """Start and end of each task, by the clock of its device; call after the launch has ended."""
        times = [(start - self._began_ns, end - self._began_ns) for start, end in self._times]
        for at, marks in self._marks.items():
            times[at] = (marks[0].ns_since(self._began), marks[1].ns_since(self._began))
        return tuple(
            TaskTime(tuple(task.cores), len(task.units), *each)
            for task, each in zip(self._loaded.tasks, times, strict=True)
        )

    def _execute(self, at: int, tensors: dict[str, _TensorCopies]) -> None:
        task = self._loaded.segments[at]
        try:
            if self._loaded.tasks[at].cores[0]:
                self._on_core(task, tensors)
            else:
                self._on_stream(at, task, tensors)
        except CotenantError:
            raise
        except Exception as error:
            units = self._loaded.tasks[at].units
            reason = f"units {units[0]} to {units[-1]} failed: {first_line(error)}"
            raise ModelError(self._placed.model.path, reason, "Check the shapes and values of its inputs") from error

    def _on_core(self, task: TorchTask, tensors: dict[str, _TensorCopies]) -> None:
        given = [self._on_host(tensors[name]) for name in task.segment.inputs]
        use_threads(1)
        with torch.inference_mode():
            made = task.run(given)
            for name, value in made.items():  # into pinned memory, for asynchronous copies
                is_read = name in task.crossing
                tensors[name] = _TensorCopies(here=self._streams.gather([array_of(value)]) if is_read else value)

    def _on_stream(self, at: int, task: TorchTask, tensors: dict[str, _TensorCopies]) -> None:
        streams, known = self._streams, self._captured.tensors
        names = task.segment.inputs
        given = tuple(self._on_device(name, tensors[name]) for name in names)
        if self.given is not None:
            self.given[at] = given
        before = streams.record(True)
        replay = self._captured.replays.get(at)
        if replay is not None and all(
            known[name].shape == value.shape for name, value in zip(names, given, strict=True)
        ):
            for name, value in zip(names, given, strict=True):
                if value is not known[name]:
                    known[name].copy_(value, non_blocking=True)
            replay()
            made: Named = {name: known[name] for name in task.segment.outputs}
        else:
            made = task.run(given)
        after = streams.record(True)
        self._marks[at] = before, after
        found = {name: _TensorCopies(there=value) for name, value in made.items()}
        if task.crossing:
            with streams.crossing(up=False):
                streams.follow(after)
                for name in task.crossing:
                    found[name].here = streams.download(made[name])
                event = streams.record()
            for name in task.crossing:
                found[name].event = event
        tensors.update(found)

    def _on_host(self, copies: _TensorCopies) -> torch.Tensor:
        if copies.event is not None:
            wait_for(copies.event, LOOK_S)
        assert copies.here is not None
        return copies.here

    def _on_device(self, name: str, copies: _TensorCopies) -> torch.Tensor:
        if copies.there is None:
            assert copies.here is not None
            into = self._captured.tensors.get(name)
            with self._streams.crossing(up=True):
                copies.there = self._streams.upload(
                    copies.here, into if into is not None and into.shape == copies.here.shape else None
                )
                event = self._streams.record()
            self._streams.follow(event)
            self._held.append(copies.there)
        return copies.there


def placed_stream(model: object, share: Share, streams: StreamLane, cores: Sequence[int]) -> PlacedStream | None:
    """The placed model for a share; None without a placement of several tasks, or with a warning if it fails."""
    tasks = model.tasks(share.size) if isinstance(model, PlacedTorch) else ()
    if not isinstance(model, PlacedTorch) or len(tasks) < 2:
        return None
    most = max(task.cores[-1] for task in tasks)
    try:
        if most > len(cores):
            raise ModelError(model.path, f"the placement needs {most} cores, {len(cores)} are there", "Place it again")
        return PlacedStream(model, streams, LoadedTasks(tasks, model.cut(tasks), (-1, *cores)))
    except (CotenantError, RuntimeError) as error:  # no task, no memory, or no thread
        _log.warning("model %s: runs on %s alone, not by its placement: %s", model.name, share.device, error)
        return None


def copy_times(streams: StreamLane, size_bytes: int, runs: int) -> tuple[list[int], list[int]]:
    """Times in ns of copies of `size_bytes` to the host and to the device, including the detection of their ends."""
    here = streams.gather([np.zeros(size_bytes, np.uint8)])
    there = streams.upload(here)
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(runs):
        for up, times in enumerate(taken):
            made = streams.record()
            wait_for(made)
            began = perf_counter_ns()
            with streams.crossing(bool(up)):
                streams.follow(made)
                copy = streams.upload(here, there) if up else streams.download(there)
                event = streams.record()
            wait_for(event, LOOK_S)
            times.append(perf_counter_ns() - began)
            del copy
    return taken
