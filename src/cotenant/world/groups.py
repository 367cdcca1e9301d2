"""A world in which launches slow each other down only within their group, by measured latencies of groups."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify

from typing_extensions import override

from cotenant.core.actions import Launch, group_of
from cotenant.core.predictor import GroupPredictor, Member
from cotenant.world.simulated import TableWorld, WorldEvent


class GroupWorld(TableWorld):
    """Launches of one group end together, after the latency of the group in `table` times the factor of the first.

    Measurements of groups have only the end of the last member; the other ends are not known, and not later. A launch
    alone takes its time in a TableWorld. Groups do not affect each other, nor launches alone.
    """

    _table: GroupPredictor

    def __init__(self, table: GroupPredictor, *, noise: float = 0.0, failure_rate: float = 0.0, seed: int = 0) -> None:
        super().__init__(table, noise=noise, failure_rate=failure_rate, seed=seed)
        self._groups: dict[int, list[_Mate]] = {}
        self._group_of: dict[int, int] = {}
        """Group by launch, for running groups."""

    @override
    def _begin(self, launch: Launch, now_ns: int, factor: float, end: tuple[int, int, str | None]) -> None:
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
    """A running launch of a group."""

    launch: Launch
    began_ns: int
    factor: float
    end: tuple[int, int, str | None]
