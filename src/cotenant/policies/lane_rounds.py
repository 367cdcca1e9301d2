"""Rounds of lanes: what the policy `duty_cycle` is given of a plan, and what it remembers of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class LaneSlot:
    """A tenant's turn in a round: `batch` rows at most, for `rate_per_s` rows a second of its rate.

    Raises InvalidValueError for a value out of its range.
    """

    tenant: str
    batch: int
    rate_per_s: float

    def __post_init__(self) -> None:
        where = f"slot of tenant {self.tenant!r}"
        if self.batch < 1:
            raise InvalidValueError(where, "batch", self.batch, "at least 1 row")
        if not 0 < self.rate_per_s < float("inf"):
            raise InvalidValueError(where, "rate_per_s", self.rate_per_s, "a positive finite number")


@dataclass(frozen=True, slots=True)
class LaneRound:
    """The round of one lane: its slots in order, all of them once every `duty_ns`. Without slots the lane is free.

    Raises InvalidValueError for slots without a duty cycle.
    """

    duty_ns: int = 0
    slots: tuple[LaneSlot, ...] = ()

    def __post_init__(self) -> None:
        if self.slots and self.duty_ns < 1:
            raise InvalidValueError("round", "duty_ns", self.duty_ns, "a positive duty cycle")


@dataclass(frozen=True, slots=True)
class Turns:
    """What the policy remembers. `following` has, by lane, the position of the slot whose turn is next; `launched` the
    rows launched by lane and slot, of tenants that have several slots."""

    following: tuple[int, ...]
    launched: tuple[tuple[int, ...], ...]

    @classmethod
    def first(cls, rounds: Sequence[LaneRound]) -> Turns:
        """Before the first turn."""
        return cls((0,) * len(rounds), tuple((0,) * len(each.slots) for each in rounds))
