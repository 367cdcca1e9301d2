"""Runs a launch from its inputs to its outputs on the thread of a lane, in the server or in a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cotenant.core.actions import Launch
from cotenant.execute.batches import Batches, BatchTensors, ModelGoneError, for_client, for_engine, reason_of
from cotenant.execute.protocol import OnEnd, OnExpanded, Tensors, Timing
from cotenant.execute.runner import Runner, to_numpy
from cotenant.execute.threads.team import Team
from cotenant.work import Share, TaskTime

if TYPE_CHECKING:
    from cotenant.execute.worker.channel import Run

_MOST_EXPANDING = 64
"""Most launches that may have an expansion that their next stop has not yet applied."""


class LaunchRunner:
    """Runs launches on the threads that call `run`. Tensors of paused batches stay in `batches`. Thread-safe.

    A malleable launch pauses at each of its stops, unless cores can join the model while it runs.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._expanding: dict[int, tuple[Share, OnExpanded]] = {}
        """By launch under way: the share that it takes over at its next stop."""
        self._teams: dict[int, Team] = {}
        """By launch under way: the cores of a model that takes in cores at once."""
        self._lock = threading.Lock()

    def expand(self, launch: int, share: Share, on_expanded: OnExpanded) -> bool:
        """Give a launch under way a larger share; returns True where the cores join at once, else at the next stop."""
        with self._lock:
            team = self._teams.get(launch)
            if team is None:
                if (
                    len(self._expanding) >= _MOST_EXPANDING
                ):  # a message of the server may come after the launch has ended
                    del self._expanding[next(iter(self._expanding))]
                self._expanding[launch] = share, on_expanded
                return False
        team.expand(share.cores)
        return True

    def run(
        self,
        launch: Launch | Run,
        share: Share,
        model: Runner | None,
        batch: BatchTensors | Tensors | Exception,
        hand_out: Callable[[Any, Any, Tensors], None],
        on_end: OnEnd,
        began_ns: int = 0,
    ) -> None:
        """Run a launch of a batch, and report how it ended. `began_ns` is when it began, 0 for now.

        `batch` is the begun batch, the inputs alone for a launch of the whole model, or the reason why the launch
        fails. `hand_out` takes the outputs and may raise. A launch fails with an exception's reason, or without
        `model`.
        """
        began = gathered = ran = began_ns or time.perf_counter_ns()
        error: str | None = None
        task_times: tuple[TaskTime, ...] = ()
        steal_ns = 0
        try:
            if isinstance(batch, Exception):
                raise batch
            if model is None:
                raise ModelGoneError(launch.work.tenant)
            start = launch.work.start
            task_rows = batch.task_rows if isinstance(batch, BatchTensors) else None
            tensors: Any
            if task_rows is not None:
                read, made = model.dfg.segment_io(start, launch.work.end)
                tensors = task_rows.tensors(read if start else None)
                if not start:
                    tensors = {name: for_engine(array) for name, array in tensors.items()}
            elif start == 0:
                inputs = batch.whole() if isinstance(batch, BatchTensors) else batch
                tensors = {name: for_engine(array) for name, array in inputs.items()}
            elif isinstance(batch, BatchTensors):
                tensors = batch.kept
            given = frozenset(tensors) if task_rows is not None else frozenset()  # names alone: tensors may be freed
            version = {"version": launch.work.version} if launch.work.version else {}
            gathered = ran = time.perf_counter_ns()
            on_core_ns = time.thread_time_ns()
            team = self._team(launch, share) if launch.stops and model.joins else None
            for end in (launch.work.end,) if team else (*launch.stops, launch.work.end):
                threads = team or (share.cores if share.size > 1 else 1)
                tensors = model.run(start, end, tensors, threads, **version)
                if end != launch.work.end and (more := self._expanding.pop(launch.id, None)) is not None:
                    share, on_expanded = more
                    on_expanded(launch.id)
                start = end
            ran = time.perf_counter_ns()
            if share.size == 1 and not team:  # else threads of the engine also compute, and wait for each other
                steal_ns = max(0, ran - gathered - (time.thread_time_ns() - on_core_ns))
            take_task_times = getattr(model, "take_task_times", None)
            task_times = () if take_task_times is None else take_task_times()
            if task_rows is not None:
                own = {name: tensors[name] for name in made}
                alike = {name: tensors[name] for name in tensors if name not in own and name not in given}
                names = [tensor.name for tensor in model.outputs]
                joined = self._batches.join(launch, names, own, alike if launch.last else {})
                if joined is not None:
                    hand_out(launch, joined[0], for_client(joined[1]))
            elif launch.last:
                hand_out(launch, batch, for_client(to_numpy(tensors)))
            elif isinstance(batch, BatchTensors):
                self._batches.pause(launch, batch, tensors)
        except Exception as caught:
            ran = max(gathered, time.perf_counter_ns())
            error = reason_of(caught)
        output_ns = time.perf_counter_ns() - ran
        on_end(launch.id, error, Timing(gathered - began, ran - gathered, output_ns, task_times, steal_ns))
        if launch.stops:  # from here on no expansion comes
            with self._lock:
                self._expanding.pop(launch.id, None)
                self._teams.pop(launch.id, None)

    def _team(self, launch: Launch | Run, share: Share) -> Team:
        """The cores of a launch, with those by which it was expanded before it began."""
        team = Team(share.cores)
        with self._lock:
            self._teams[launch.id] = team
            early = self._expanding.pop(launch.id, None)
        if early is not None:
            team.expand(early[0].cores)
            early[1](launch.id)
        return team
