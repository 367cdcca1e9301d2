"""What every step works with: the device as partitions, the models, the journal, and how much to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.gpu._journal import Journal, MeasureError, Row
from bench.gpu._models import Subject, Subjects
from bench.gpu._rig import CpuRig, CudaRig, Opened, Way
from bench.gpu._runner import Effort, Job, Runner
from cotenant.errors import CotenantError
from cotenant.execute.protocol import LoadSpec
from cotenant.work import Machine, Share

FRACTIONS = (1.0, 0.5, 0.25, 0.75, 0.125, 0.375)
"""Shares of the device at which latencies are taken, the ones that others build on first."""
BATCHES = (1, 8, 32, 4, 16, 2)
"""The ends and the middle first: what lies between is interpolated until it is measured."""
SEGMENTS, PARTS = 4, 8
"""Into how many segments models are cut where they are served, and where their units are measured."""


@dataclass(frozen=True, slots=True)
class Point:
    """Something to measure once. `key` names it within its step for good: finished points are never measured again."""

    key: str
    measure: Callable[[], Sequence[Row]]
    tier: int = 0
    """What tells most is of tier 0: all steps measure theirs before one goes on to the next tier."""


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of measurement: its table's name, what it is, and its points."""

    name: str
    about: str
    points: Callable[[Context], Iterator[Point]]


@dataclass(slots=True)
class Context:
    """Shared by all steps of a run. Keeps one executor for each way of sharing, since new threads are slow at first."""

    rig: CpuRig | CudaRig
    subjects: Subjects
    journal: Journal
    effort: Effort
    quick: bool = False
    seed: int = 1
    _stack: ExitStack = field(default_factory=ExitStack)
    _open: dict[Way, tuple[Opened, Runner]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The models."""
        return self.subjects.names

    @property
    def whole(self) -> Share:
        """All of the device."""
        return Share(self.rig.slots, self.rig.device)

    @property
    def machine(self) -> Machine:
        """The device, for an engine."""
        return Machine.of({self.rig.device: self.rig.slots})

    def share(self, fraction: float) -> Share:
        """About that part of the device from the first slot on, whole granules and at least one."""
        if fraction >= 1:
            return self.whole
        granule = self.rig.granule
        return self.of_size(
            min(len(self.rig.parted), max(1, round(fraction * len(self.rig.slots) / granule)) * granule)
        )

    def of_size(self, size: int) -> Share:
        """The share of the first `size` slots."""
        return Share(self.rig.slots[:size], self.rig.device)

    def lanes(self, count: int) -> tuple[Share, ...]:
        """Disjoint shares that differ by a granule at most; fewer when the device has fewer granules."""
        slots, granule = self.rig.parted, self.rig.granule
        granules = len(slots) // granule
        count = min(count, granules)
        ends = [granules * at // count * granule for at in range(count + 1)]
        return tuple(Share(slots[start:end], self.rig.device) for start, end in pairwise(ends))

    def runner(self, partitions: Sequence[Share], way: Way = Way.SHARES) -> Runner:
        """The executor of this way with all models that open, divided into these partitions beside those before."""
        way = way if way in self.rig.ways else self.rig.ways[0]
        if way not in self._open:
            opened = self._stack.enter_context(self.rig.open(way))
            models = _Models(self.subjects, opened.executor)
            self._open[way] = opened, Runner(opened.executor, models.get, models.prepare)
        opened, runner = self._open[way]
        now = opened.shares.granted
        if any(each not in now for each in partitions):
            opened.shares.split(tuple(dict.fromkeys([*now, *partitions])))  # shares from before keep their streams
        return runner

    @property
    def suffix(self) -> str:
        """What keys of points in shares end with where shares are plain streams: not to be taken for the others."""
        return "" if Way.SHARES in self.rig.ways else "/streams"

    def sizes(self, partition: Share) -> Row:
        """SMs or cores that were asked for, and that a partition has been given."""
        way = Way.SHARES if Way.SHARES in self.rig.ways else self.rig.ways[0]
        granted = self._open[way][0].shares.granted
        return {"asked_sms": partition.size, "granted_sms": granted.get(partition, partition.size)}

    def close(self) -> None:
        """Close the executors."""
        self._open.clear()
        self._stack.close()


class _Models:
    """The models as an executor has them: handed over when they are first used, prepared as they are asked for."""

    def __init__(self, subjects: Subjects, executor: Any) -> None:
        self._subjects = subjects
        self._executor = executor
        self._loaded: dict[str, Any] = {}

    def get(self, name: str) -> Subject:
        """A model that the executor has."""
        subject = self._subjects.get(name)
        if name not in self._loaded:
            self._loaded[name] = self._executor.load_shared(subject.model, self._spec(subject, (), ()))
            self._executor.add_model(name, self._loaded[name])
        return subject

    def prepare(self, job: Job) -> None:
        """Have captured what a job will replay."""
        subject = self.get(job.model)
        self._executor.prepare(self._loaded[job.model], self._spec(subject, (job.partition,), (job.items,)))

    def _spec(self, subject: Subject, shares: tuple[Share, ...], rows: tuple[int, ...]) -> LoadSpec:
        shapes = {name: shape for name, (_, shape) in subject.spec.inputs.items()}
        cuts = sorted({*subject.cuts(PARTS), *subject.cuts(SEGMENTS)})  # all that are asked for
        return LoadSpec(shares, tuple(cuts), (shapes,), max(BATCHES) if subject.spec.batched else 1, rows=rows)


def measure_points(
    context: Context, step: Step, tier: int, is_over: Callable[[], bool], tell: Callable[[str], None]
) -> tuple[int, bool]:
    """Measure points of a step that the journal lacks until time is over; how many were, and whether none is left.

    A point that cannot be measured is noted and left. Raises MeasureError when the device is lost.
    """
    done = 0
    for point in step.points(context):
        if point.tier != tier or context.journal.has(step.name, point.key):
            continue
        if is_over():
            return done, False
        began = time.perf_counter()
        try:
            rows = list(point.measure())
        except (CotenantError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            context.journal.fail(step.name, point.key, reason)
            tell(f"{step.name}: {point.key} failed: {reason}")
            problem = context.rig.problem()
            if problem:
                raise MeasureError(f"the device is lost: {problem}") from error
            context.close()  # whatever is left in its streams is not measured with
            continue
        context.journal.put(step.name, point.key, rows, time.perf_counter() - began)
        done += 1
    return done, True
