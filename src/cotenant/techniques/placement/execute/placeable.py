"""Base of models that follow placements, for every engine: their tasks, and lanes that run them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from cotenant.execute.protocol import Followed
from cotenant.execute.strategy import RunnerWrapper, follows_of
from cotenant.execute.threads.lanes import Lane
from cotenant.profiles.profile_file import ProfileError
from cotenant.techniques.placement.execute.placed_tasks import PlacedTask, tasks_of
from cotenant.techniques.placement.unit_placement import UnitPlacement, cores_of, device_names
from cotenant.work import Share

T = TypeVar("T")
STRATEGY = "placement"
"""Name under which the run strategy is registered."""


class Placeable(RunnerWrapper):
    """A model that follows the placements it was given, and else runs as the inner model does."""

    placed: Followed = ()
    """Sizes of the shares with a placement, each with its digest."""
    _tasks: Mapping[int, tuple[PlacedTask, ...]] = {}

    @property
    def follows(self) -> Mapping[str, Followed]:
        """Plans that the model follows, by run strategy."""
        return {**follows_of(self.inner), **({STRATEGY: self.placed} if self.placed else {})}

    def place(self, *placements: UnitPlacement) -> None:
        """Follow exactly these placements from now on, one for each size of share.

        Raises ProfileError or InvalidValueError for a placement of another graph.
        """
        graph = self.graph_path.parent.name
        tasks = {}
        for each in placements:
            if each.graph != graph:
                raise ProfileError(
                    f"placement of {each.model!r}: it is of graph {each.graph}, expected {graph}; "
                    "run 'cotenant place' again"
                )
            order, place = each.places(self.dfg.unit_names, device_names(each.cores, each.sms))
            tasks[each.size] = tasks_of(self.dfg, order, [cores_of(device, each.sms) for device in place])
        self._replace(tasks, tuple((each.size, digest_of(each)) for each in placements))

    def tasks(self, size: int) -> tuple[PlacedTask, ...]:
        """The tasks of a run of the whole in a share of this size; empty without a placement for it."""
        return self._tasks.get(size, ())

    def _replace(self, tasks: Mapping[int, tuple[PlacedTask, ...]], placed: Followed) -> None:
        self._tasks, self.placed = tasks, placed


class LoadedTasks(Generic[T]):
    """The loaded tasks of a placement, and lanes of cores to run them. The lanes end with the last reference to this.

    `segments`: the executable form of each task. `cores`: cores of the machine, by their numbers in the tasks; number 0
    is the core of the calling thread.
    """

    def __init__(self, tasks: Sequence[PlacedTask], segments: Sequence[T], cores: Sequence[int]) -> None:
        self.tasks, self.segments = tasks, segments
        self.lanes: dict[int, Lane] = {}
        weakref.finalize(self, _stop, self.lanes).atexit = False
        for core in sorted({task.cores[0] for task in tasks} - {0}):
            self.lanes[core] = Lane(Share((cores[core],)))


def _stop(lanes: Mapping[int, Lane]) -> None:
    for lane in lanes.values():
        lane.stop()


def digest_of(placement: UnitPlacement) -> str:
    """Digest of a placement."""
    return hashlib.sha256(msgspec.json.encode(placement)).hexdigest()[:16]
