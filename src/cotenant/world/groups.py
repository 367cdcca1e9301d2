"""A world in which the launches of a group slow each other down as was measured of groups, each group by itself."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify

from typing_extensions import override

from cotenant.core.actions import Launch, group_of
from cotenant.core.predictor import GroupPredictor, Member
from cotenant.world.simulated import TableWorld, WorldEvent


class GroupWorld(TableWorld):
    """Launches of one group end together, after what `table` says of the group times the factor of its first launch.

    That is what is measured of groups: the time to the end of their last member; when the others end is not known, and
    no later. A launch alone takes what it takes in a TableWorld, and groups do not touch each other, nor those who are
    alone.
    """

    _table: GroupPredictor

    def __init__(self, table: GroupPredictor, *, noise: float = 0.0, failure_rate: float = 0.0, seed: int = 0) -> None:
        super().__init__(table, noise=noise, failure_rate=failure_rate, seed=seed)
        self._groups: dict[int, list[_Mate]] = {}
        self._group_of: dict[int, int] = {}
        """By launch, of groups that run."""

    def _begin(self, launch: Launch, now_ns: int, factor: float, end: tuple[int, int, str | None]) -> None:
        """The launch ends then by itself; its group, as far as it has begun, ends together."""
        super()._begin(launch, now_ns, factor, end)
        mates = self._groups.setdefault(group_of(launch), [])
        mates.append(_Mate(launch, now_ns, factor, end))
        self._group_of[launch.id] = group_of(launch)
        if len(mates) == 1:
            return
        members = tuple([Member(mate.launch.work, mate.launch.share.size) for mate in mates])
        took = int(self._table.group_ns([members])[0] * mates[0].factor) or 1
        for mate in mates:
            self._ends.remove(mate.end)
            mate.end = (mates[0].began_ns + took, *mate.end[1:])
            self._ends.append(mate.end)
        heapify(self._ends)

    @override
    def pop(self) -> WorldEvent:
        event = super().pop()
        self._groups.pop(self._group_of.pop(event.launch, -1), None)
        return event


@dataclass(slots=True)
class _Mate:
    """A launch of a group that runs."""

    launch: Launch
    began_ns: int
    factor: float
    end: tuple[int, int, str | None]
