"""One run of a placement's tasks: a thread for each core runs its tasks in order, and sleeps until one is ready."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from cotenant.execute.threads.lanes import Lane
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask

Execute = Callable[[int, dict[str, Any]], None]
"""Runs the task of a number: takes its inputs from the tensors by name, and adds its outputs."""


class TaskRun:
    """Runs all tasks once. The thread that calls `run` is that of core 0; `lanes`: lanes of the other cores.

    No lock is held while a task runs. A tensor is released when its last reader has ended, except those of `kept`.
    After an error no further task starts, and `stop` is called to end running tasks early. When all lanes are done,
    `run` raises the first error.
    """

    def __init__(
        self,
        tasks: Sequence[PlacedTask],
        lanes: Mapping[int, Lane],
        execute: Execute,
        kept: Collection[str] = (),
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks = tasks
        self._lanes = lanes
        self._execute = execute
        self._stop = stop
        # Counters are lists of numbers down to 0: `pop` is atomic, and the thread that gets 0 is the last one.
        self._missing = [[*range(task.dependency_count)] for task in tasks]
        readers = Counter(name for task in tasks for name in task.inputs if name not in kept)
        self._readers = {name: [*range(count)] for name, count in readers.items()}
        self._left = [*range(len(tasks))]
        self.times: list[tuple[int, int]] = [(0, 0)] * len(tasks)
        """Start and end of each task in ns, by the performance counter."""
        self._tensors: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        """Acquired by the first failing thread."""
        self._ready: SimpleQueue[int] = SimpleQueue()
        """Ready tasks of the calling thread; -1 when all have ended."""

    def run(self, tensors: dict[str, Any]) -> None:
        """Run the tasks on these tensors. Afterwards `tensors` has the kept and the unread ones."""
        self._tensors = tensors
        for at in [at for at, dependency_count in enumerate(self._missing) if not dependency_count]:
            self._submit(at)
        while True:
            try:
                at = self._ready.get()
            except BaseException as error:  # an interrupt: leave when the lanes have finished
                self._fail(error)
                continue
            if at < 0:
                break
            self._follow(at)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback would keep this run with its sessions and tensors

    def _submit(self, at: int) -> None:
        core = self._tasks[at].cores[0]
        if core:
            self._lanes[core].put(partial(self._follow, at))
        else:
            self._ready.put(at)

    def _follow(self, at: int) -> None:
        """Run a task, and then ready followers on the same thread."""
        upcoming: int | None = at
        while upcoming is not None:
            if self._error is None:
                began = time.perf_counter_ns()
                try:
                    self._execute(upcoming, self._tensors)
                except BaseException as error:
                    self._fail(error)
                self.times[upcoming] = began, time.perf_counter_ns()
            upcoming = self._end(upcoming)

    def _fail(self, error: BaseException) -> None:
        if self._failing.acquire(blocking=False):
            self._error = error
            self._stop()

    def _end(self, at: int) -> int | None:
        """End a task: submit ready followers, and release inputs. Returns a ready follower of this thread, or None."""
        task = self._tasks[at]
        core, mine = task.cores[0], None
        for follower in task.followers:  # first, as other threads wait for them
            if not self._missing[follower].pop():
                if self._tasks[follower].cores[0] == core:
                    mine = follower
                else:
                    self._submit(follower)
        for name in task.inputs:
            readers = self._readers.get(name)
            if readers is not None and not readers.pop():
                self._tensors.pop(name, None)
        if not self._left.pop():
            self._ready.put(-1)
        return mine
