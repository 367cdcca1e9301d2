"""What worlds have in common in which the speed of a launch changes while it runs, by what runs beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from cotenant.errors import InvalidValueError
from cotenant.world.simulated import WorldEvent


class SteppedRun(Protocol):
    """A launch under way, or about to begin."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def begin_ns(self) -> int:
        """When it begins."""


_R = TypeVar("_R", bound=SteppedRun)


class SteppedWorld(ABC, Generic[_R]):
    """Looks as far ahead as the next event, and forgets what it saw when something starts before that.

    A subclass says how a set of launches goes on, and what has happened to it that a driver has to know.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, tuple[_R, ...]]] = [(0, ())]
        """States from the last event that was handed out on, as far as was looked; rates are constant in between."""

    @abstractmethod
    def _after(self, now_ns: int, runs: tuple[_R, ...]) -> tuple[int, tuple[_R, ...]] | None:
        """The state at the next change of any rate; None when nothing is to come."""

    @abstractmethod
    def _event_of(self, runs: tuple[_R, ...]) -> WorldEvent | None:
        """The first thing in a state that a driver has to know; None when there is none."""

    def _handed_out(self, run: _R) -> _R | None:
        """What is left of the launch of an event that has been handed out."""
        return None

    def _add(self, run: _R) -> None:
        """A launch begins, perhaps later than now."""
        self._forget(run.begin_ns)
        self._steps = [(at, (*runs, run)) for at, runs in self._steps]

    def _forget(self, from_ns: int) -> None:
        """Something changes then: what was seen to come later is not true any more."""
        while len(self._steps) > 1 and self._steps[-1][0] > from_ns:
            self._steps.pop()

    def next_ns(self) -> int | None:
        """See World."""
        for at, runs in self._steps:
            if self._event_of(runs) is not None:
                return at
        while (step := self._after(*self._steps[-1])) is not None:
            self._steps.append(step)
            if self._event_of(step[1]) is not None:
                return step[0]
        return None

    def pop(self) -> WorldEvent:
        """See World. Raises InvalidValueError when nothing is to come."""
        self.next_ns()
        for number, (_, runs) in enumerate(self._steps):
            event = self._event_of(runs)
            if event is not None:
                self._steps = [(at, self._without(those, event.launch)) for at, those in self._steps[number:]]
                return event
        raise InvalidValueError("world", "running launches", 0, "one that ends")

    def _without(self, runs: tuple[_R, ...], number: int) -> tuple[_R, ...]:
        left = [self._handed_out(run) if run.id == number else run for run in runs]
        return tuple([run for run in left if run is not None])
