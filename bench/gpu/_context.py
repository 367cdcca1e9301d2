"""What every step works with: the device as partitions, the models, the journal, and how much to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from bench.gpu._journal import Journal, MeasureError, Row
from bench.gpu._models import Subject, Subjects
from bench.gpu._runner import Effort, Runner
from cotenant.errors import CotenantError
from cotenant.work import Share

FRACTIONS = (1.0, 0.5, 0.25, 0.75, 0.125, 0.375)
"""Shares of the device at which latencies are taken, the ones that others build on first."""


class Way(StrEnum):
    """How launches share the device."""

    SHARES = "own"
    """Each partition has SMs of its own by green contexts (on a CPU: cores)."""
    STREAMS = "streams"
    """Partitions are streams of the whole device."""


class Rig(Protocol):
    """A device, seen as numbered slots (SMs or cores) that partitions are made of."""

    kind: str
    device: str
    """As models are opened on it, "cpu" or "cuda:N"."""
    slots: tuple[int, ...]
    granule: int
    """Partitions are multiples of so many slots."""
    ways: tuple[Way, ...]
    graphs: tuple[bool, ...]
    """With and without captured segments, where it can capture them."""

    def open(self, partitions: Sequence[Share], way: Way, graphs: int) -> AbstractContextManager[Opened]:
        """An executor whose launches may run in these partitions, with at most `graphs` captured segments."""

    def problem(self) -> str:
        """Why nothing can be measured any more; "" while it can."""

    def survey(self, shares: Split) -> tuple[int, str] | None:
        """On how many SMs kernels of the shares really ran, and what is wrong with that; None where nobody can say."""

    def close(self) -> None:
        """Give the device back."""


class Split(Protocol):
    """What divides a device: `execute.sm_streams.GpuPartitioner`, or cores."""

    @property
    def granted(self) -> Mapping[Share, int]:
        """SMs or cores of each partition, read back."""

    def split(self, partitions: Sequence[Share]) -> int:
        """Divide anew, at any time; the nanoseconds that it took."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An executor, and what divides the device that it runs on."""

    executor: Any
    shares: Split


@dataclass(frozen=True, slots=True)
class Point:
    """Something to measure once. `key` names it within its step for good: finished points are never measured again."""

    key: str
    measure: Callable[[], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of measurement: its table's name, what it is, and the share of the budget that it may use at first."""

    name: str
    about: str
    share: float
    points: Callable[[Context], Iterator[Point]]


@dataclass(slots=True)
class Context:
    """Shared by all steps of a run. Holds one executor at a time, and makes another one when other partitions come."""

    rig: Rig
    subjects: Subjects
    journal: Journal
    effort: Effort
    quick: bool = False
    seed: int = 1
    graphs: int = 2048
    warmed: set[str] = field(default_factory=set)
    """What the present executor has been warmed up for; steps write here."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _key: object = None
    _runner: Runner | None = None
    _opened: Opened | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The models."""
        return self.subjects.names

    @property
    def whole(self) -> Share:
        """All of the device."""
        return Share(self.rig.slots, self.rig.device)

    def share(self, fraction: float, first: int = 0) -> Share:
        """About that part of the device, whole granules and at least one, from slot `first` on."""
        if fraction >= 1:
            return self.whole
        granule = self.rig.granule
        size = min(len(self.rig.slots), max(1, round(fraction * len(self.rig.slots) / granule)) * granule)
        return Share(self.rig.slots[first : first + size], self.rig.device)

    def of_size(self, size: int) -> Share:
        """The share of the first `size` slots."""
        return Share(self.rig.slots[:size], self.rig.device)

    def lanes(self, count: int) -> tuple[Share, ...]:
        """Equal disjoint shares; fewer when the device has fewer granules."""
        total, granule = len(self.rig.slots), self.rig.granule
        count = min(count, total // granule)
        size = total // count // granule * granule
        return tuple(Share(self.rig.slots[at * size : (at + 1) * size], self.rig.device) for at in range(count))

    def runner(self, partitions: Sequence[Share], way: Way = Way.SHARES, graphs: bool = True) -> Runner:
        """An executor for these partitions with all models that opened."""
        key = (tuple(partitions), way, graphs)
        if key != self._key or self._runner is None:
            self.close()
            self._opened = self._stack.enter_context(self.rig.open(partitions, way, self.graphs if graphs else 0))
            self._runner = Runner(self._opened.executor, _Models(self.subjects, self._opened.executor))
            self._key = key
        return self._runner

    @property
    def suffix(self) -> str:
        """What keys of points in shares end with where shares are plain streams: not to be taken for the others."""
        return "" if Way.SHARES in self.rig.ways else "/streams"

    @property
    def opened(self) -> Opened:
        """What the present runner runs on."""
        assert self._opened is not None
        return self._opened

    def granted(self, partition: Share) -> int:
        """SMs or cores that a partition of the present runner was given."""
        return self.opened.shares.granted.get(partition, partition.size)

    def resplit(self, partitions: Sequence[Share]) -> int:
        """Divide the device anew below the present runner, as a server would; the nanoseconds that it took."""
        self.opened.executor.forget_graphs()  # they are bound to the shares that they were captured in
        self.warmed.clear()
        self._key = None
        return self.opened.shares.split(partitions)

    def close(self) -> None:
        """Close the present executor."""
        self.warmed.clear()
        self._stack.close()
        self._key = self._runner = self._opened = None


class _Models(Mapping[str, Subject]):
    """The models as an executor has them: handed over when they are first used."""

    def __init__(self, subjects: Subjects, executor: Any) -> None:
        self._subjects = subjects
        self._executor = executor
        self._added: dict[str, Subject] = {}

    def __getitem__(self, name: str) -> Subject:
        if name not in self._added:
            subject = self._subjects.get(name)
            self._executor.add_model(name, subject.model)
            self._executor.announce(name)
            self._added[name] = subject
        return self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._subjects.names)

    def __len__(self) -> int:
        return len(self._subjects.names)


def measure_points(
    context: Context, step: Step, is_over: Callable[[], bool], tell: Callable[[str], None], retry: bool = False
) -> tuple[int, bool]:
    """Measure points of a step that the journal lacks until time is over; how many were, and whether none is left.

    Only with `retry`, and then only, those that failed in an earlier run: one that never ends again costs the run.

    A point that cannot be measured is noted and left. Raises MeasureError when the device is lost.
    """
    done = 0
    for point in step.points(context):
        if context.journal.has(step.name, point.key) or context.journal.is_retry(step.name, point.key) != retry:
            continue
        if is_over():
            return done, False
        began = time.perf_counter()
        try:
            rows = list(point.measure())
        except (CotenantError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            context.journal.fail(step.name, point.key, reason)
            context.close()  # whatever is left in its streams is not measured with
            tell(f"{step.name}: {point.key} failed: {reason}")
            problem = context.rig.problem()
            if problem:
                raise MeasureError(f"the device is lost: {problem}") from error
            continue
        context.journal.put(step.name, point.key, rows, time.perf_counter() - began)
        done += 1
    return done, True
