"""Launches as the engine makes them, one, several at once or without pause, and what they took.

Everything goes through the executor that serves, from `start` to `on_end`. That is the latency which a policy plans
with, including the copies of inputs and outputs. `infer_ns` is what the executor says of the units alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.gpu._journal import MeasureError
from bench.gpu._models import Subject
from cotenant.core.actions import GroupBasis, Launch
from cotenant.execute.protocol import Timing
from cotenant.work import Share, Work

PATIENCE_S = 30.0
"""How long a launch may take before the point is abandoned."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure a point: `min_runs`, then until `seconds` are spent or `max_runs` are done.

    After `longest_s` two runs are enough, and one to warm up: a point must not cost the others their time.
    """

    seconds: float = 0.2
    min_runs: int = 5
    max_runs: int = 200
    warm_up: int = 3
    """Enough for the executor to have captured what it captures."""
    longest_s: float = 4.0

    def is_enough(self, runs: int, spent_s: float) -> bool:
        """Whether no further run is needed."""
        if spent_s > self.longest_s and runs >= min(2, self.min_runs):
            return True
        return runs >= self.min_runs and (spent_s >= self.seconds or runs >= self.max_runs)


QUICK = Effort(0.01, 3, 5, 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A launch to be measured: units [start, end) of a batch of `items` rows."""

    model: str
    items: int
    start: int
    end: int
    partition: Share


@dataclass(frozen=True, slots=True)
class Ran:
    """Times of a launch: from its start until its end was reported, of its units alone, and when it ended."""

    latency_ns: int
    infer_ns: int
    ended_ns: int


@dataclass(slots=True)
class _Run:
    """A launch under way."""

    launch: Launch
    began_ns: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    timing: Timing = field(default_factory=Timing)
    ended_ns: int = 0
    then: Callable[[_Run], None] | None = None

    def on_end(self, launch: int, error: str | None, timing: Timing) -> None:
        """See OnEnd."""
        self.ended_ns = time.perf_counter_ns()
        self.error, self.timing = error, timing
        if self.then is not None:
            self.then(self)
        self.ended.set()


class Runner:
    """Runs jobs on an executor that has the models. Not thread-safe."""

    def __init__(
        self,
        executor: Any,
        subject: Callable[[str], Subject],
        prepare: Callable[[Job], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.executor = executor
        self._subject = subject
        self._prepare_job = prepare
        self._patience_s = patience_s
        self._count = 0
        self._warmed: set[Job] = set()
        self._took_ns: dict[Job, int] = {}
        """The predicted latency of the next launch of a job: when its end is looked for."""
        self._lock = threading.Lock()

    def units(self, model: str) -> int:
        """Number of units of a model."""
        return self._subject(model).units

    def whole(self, model: str, items: int, partition: Share) -> Job:
        """The job of a whole model."""
        return Job(model, items, 0, self.units(model), partition)

    def once(self, job: Job) -> Ran:
        """Run one job alone. Raises MeasureError when it fails or takes too long."""
        return self.group([job])[0]

    def group(self, jobs: Sequence[Job]) -> list[Ran]:
        """Run jobs that start together. Units before their first one are run before, and not counted."""
        runs = [self._prepare(job) for job in jobs]
        for run in runs:
            self._start(run)
        for run in runs:
            self._wait(run)
        for run in runs:
            self._forget(run.launch)
        found = [_ran(run) for run in runs]
        self._took_ns.update((job, ran.latency_ns) for job, ran in zip(jobs, found, strict=True))
        return found

    def warm(self, jobs: Sequence[Job], effort: Effort) -> None:
        """Run jobs that were not run before, each alone, until they are as fast as they get.

        Every measurement comes through here first: this call prepares the executor for its jobs.
        """
        began = time.perf_counter()
        for job in dict.fromkeys(jobs):
            if job not in self._warmed:
                self._prepare_job(job)
            for turn in range(0 if job in self._warmed else effort.warm_up):
                if turn and time.perf_counter() - began > effort.longest_s:
                    break
                self.once(job)
            self._warmed.add(job)

    def sample(self, jobs: Sequence[Job], effort: Effort) -> list[list[Ran]]:
        """Repeat a group as long as `effort` says, after warming up; a list of runs, each with one entry a job."""
        self.warm(jobs, effort)
        found: list[list[Ran]] = []
        began = time.perf_counter()
        while not effort.is_enough(len(found), time.perf_counter() - began):
            found.append(self.group(jobs))
        return found

    def chain(self, job: Job, cuts: Sequence[int]) -> list[Ran]:
        """Run a model as the launches between `cuts`, each started when the one before has ended."""
        number, ran = self._next(), []
        self.executor.put(number, self._subject(job.model).feeds(job.items))
        for start, end in pairwise(cuts):
            run = _Run(self._launch(Job(job.model, job.items, start, end, job.partition), number))
            self._start(run)
            self._wait(run)
            ran.append(_ran(run))
        self.executor.discard(number)
        return ran

    def without_pause(self, jobs: Sequence[Job], effort: Effort) -> list[list[Ran]]:
        """Run whole models beside each other, the next launch of a job starting when its last one has ended.

        All go on until every one of them has had enough runs. Raises MeasureError when one fails.
        """
        self.warm(jobs, effort)
        found: list[list[Ran]] = [[] for _ in jobs]
        began = time.perf_counter()
        quiet = threading.Semaphore(0)
        errors: list[str] = []

        def follow(at: int) -> Callable[[_Run], None]:
            def then(run: _Run) -> None:
                try:
                    self._forget(run.launch)
                    if run.error is None:
                        found[at].append(_ran(run))
                    else:
                        errors.append(f"{jobs[at].model}: {run.error}")
                    spent = time.perf_counter() - began
                    if errors or spent > self._patience_s or effort.is_enough(min(map(len, found)), spent):
                        quiet.release()
                        return
                    following = self._prepare(jobs[at])
                    following.then = then
                    self._start(following)
                except Exception as error:  # it runs on a thread of the executor, which must not end
                    errors.append(f"{jobs[at].model}: {error}")
                    quiet.release()

            return then

        for at, job in enumerate(jobs):
            run = self._prepare(job)
            run.then = follow(at)
            self._start(run)
        for _ in jobs:
            if not quiet.acquire(timeout=self._patience_s + effort.seconds):
                raise MeasureError(f"{', '.join(job.model for job in jobs)}: no end after {self._patience_s:g} s")
        if errors:
            raise MeasureError(errors[0])
        return found

    def _prepare(self, job: Job) -> _Run:
        """Let a batch arrive and bring it to the first unit of the job."""
        number = self._next()
        self.executor.put(number, self._subject(job.model).feeds(job.items))
        if job.start:
            before = _Run(self._launch(Job(job.model, job.items, 0, job.start, job.partition), number))
            self._start(before)
            self._wait(before)
        return _Run(self._launch(job, number))

    def _start(self, run: _Run) -> None:
        run.began_ns = time.perf_counter_ns()
        self.executor.start(run.launch, run.on_end)

    def _wait(self, run: _Run) -> None:
        if not run.ended.wait(self._patience_s):
            raise MeasureError(f"{run.launch.work.tenant}: no end after {self._patience_s:g} s")
        if run.error is not None:
            self._forget(run.launch)
            raise MeasureError(f"{run.launch.work.tenant}: {run.error}")

    def _forget(self, launch: Launch) -> None:
        if not launch.last:
            self.executor.release(launch.batch)
        self.executor.discard(launch.queries[0])

    def _launch(self, job: Job, number: int) -> Launch:
        """A batch of one query; query, batch and group have the same number. Launches of it differ in theirs."""
        last = job.end == self.units(job.model)
        launch = self._next()
        return Launch(
            launch,
            number,
            (number,),
            Work(job.model, 0, job.items, job.start, job.end),
            last,
            job.partition,
            self._took_ns.get(job, 0),
            basis=GroupBasis(number),
        )

    def _next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count


def _ran(run: _Run) -> Ran:
    return Ran(run.ended_ns - run.began_ns, run.timing.infer_ns, run.ended_ns)
