"""What the predictions of the groups of a run rested on: how many were near measured ones, and how many were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotenant.core.actions import Action, Launch
from cotenant.core.events import Event


@dataclass(slots=True)
class GroupBasis:
    """Groups of so many `members` that started: with no measured group near them, and where none had so many."""

    members: int
    started: int = 0
    nothing_near: int = 0
    unmeasured: int = 0

    def __str__(self) -> str:
        known = f"{self.nothing_near} with no measured group near"
        if self.unmeasured:
            known = f"{self.unmeasured} with none of so many members measured, sure to be in time even in turn"
        return f"{self.started} of {self.members} member{'' if self.members == 1 else 's'} ({known})"


class GroupTally:
    """Counts the groups of a run as a log of what happens; `then` is told, too."""

    def __init__(self, then: Callable[[int, Event, list[Action]], None] | None = None) -> None:
        self._then = then
        self._found: dict[int, GroupBasis] = {}

    def __call__(self, time_ns: int, event: Event, actions: list[Action]) -> None:
        """See Log."""
        launches = [each for each in actions if isinstance(each, Launch) and each.near >= 0]
        sizes = Counter([each.group for each in launches])
        for launch in {each.group: each for each in launches}.values():
            size = sizes[launch.group]
            basis = self._found.setdefault(size, GroupBasis(size))
            basis.started += 1
            basis.nothing_near += launch.near == 0
            basis.unmeasured += launch.longest_ns > 0
        if self._then is not None:
            self._then(time_ns, event, actions)

    @property
    def found(self) -> Sequence[GroupBasis]:
        """By number of members; empty where nothing was predicted from measured groups."""
        return [self._found[size] for size in sorted(self._found)]
