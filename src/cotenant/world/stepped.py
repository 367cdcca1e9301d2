"""Base of worlds in which the speed of a launch depends on the other running launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from cotenant.errors import InvalidValueError
from cotenant.world.simulated import World, WorldEvent


class SteppedRun(Protocol):
    """A launch that runs or will begin."""

    @property
    def id(self) -> int:
        """Id of the launch."""

    @property
    def begin_ns(self) -> int:
        """Time of its begin."""


_R = TypeVar("_R", bound=SteppedRun)


class SteppedWorld(World, ABC, Generic[_R]):
    """Computes states up to the next event, and discards later ones when a launch starts before them.

    A subclass implements `_after`, the next state of a set of launches, and `_event_of`, the event in a state.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, tuple[_R, ...]]] = [(0, ())]
        """Known states from the last returned event on; speeds are constant in between."""

    @abstractmethod
    def _after(self, now_ns: int, runs: tuple[_R, ...]) -> tuple[int, tuple[_R, ...]] | None:
        """The state at the next change of a speed; None without any."""

    @abstractmethod
    def _event_of(self, runs: tuple[_R, ...]) -> WorldEvent | None:
        """The first event in a state; None without any."""

    def _handed_out(self, run: _R) -> _R | None:
        """The rest of a launch after its event was returned; None if it is over."""
        return None

    def _add(self, run: _R) -> None:
        """Add a launch, which may begin later."""
        self._forget(run.begin_ns)
        self._steps = [(at, (*runs, run)) for at, runs in self._steps]

    def _forget(self, from_ns: int) -> None:
        """Discard the states after this time, since a launch begins at it."""
        while len(self._steps) > 1 and self._steps[-1][0] > from_ns:
            self._steps.pop()

    @override
    def next_ns(self) -> int | None:
        for at, runs in self._steps:
            if self._event_of(runs) is not None:
                return at
        while (step := self._after(*self._steps[-1])) is not None:
            self._steps.append(step)
            if self._event_of(step[1]) is not None:
                return step[0]
        return None

    @override
    def pop(self) -> WorldEvent:
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
