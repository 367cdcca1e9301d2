"""Rounds of planned batches in every partition: the run-time side of a plan (GPU-let, ATC'22, section 4).

The planner promises that a row waits at most one duty cycle for its turn. That is kept here without a clock: a lane
gives its slots turns in order, passes over empty ones and begins the next turn as soon as the last has ended, so that
one way round never takes longer than all batches of the round together. Nobody waits for a batch to fill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, DropRule, Snapshot
from cotenant.errors import InvalidValueError
from cotenant.policies.candidates import Key, Stretch
from cotenant.policies.rounds.round_decision import RoundDecision, Turns
from cotenant.types import Query, Tenant
from cotenant.work import Round, Share


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """Give the slots of each lane their turns; let others have what a round leaves free.

    `lanes`: the partitions; `rounds`: what each of them runs, in the same order; none for a policy without a plan.
    `drop`: when waiting queries are given up. Under `hopeless` the head of a queue is given up, too, when it would be
    late in its turn's whole batch while more wait than that batch takes: smaller batches for its sake would let
    ever more be late (the early drop of Nexus, SOSP'19, section 6.3).
    `lend`: guests of a lane are tenants without a slot anywhere, and with it also those that have their slots in other
    lanes. A guest is launched only when no slot of the lane waits, and only for as long as the tightest SLO of the
    lane leaves beside all batches of the round, times `stretch`: whoever comes meanwhile can still have his turn in
    time. Lanes without slots serve guests alone, in the order of their deadlines. A query that no lane could ever serve
    is dropped with that reason, whatever the drop rule.
    `preempt`: a guest may be left at a cut, so that models longer than the spare time can be guests. Planned batches
    always run whole.

    A query is hopeless when no lane that may serve it is quick enough; one that is too slow for it leaves it to others.
    A query of more rows than the planned batch has a turn of its own. A tenant with slots in several lanes is served by
    whichever is free; where several are, by the one that is most behind its share of the rates.

    Raises InvalidValueError for a value out of its range.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    preempt: bool = False
    stretch: Stretch = 1.0
    rounds: tuple[Round, ...] = ()
    lend: bool = True
    slots_of: dict[str, tuple[tuple[int, int], ...]] = field(init=False, repr=False, compare=False)
    """Lane and position of each tenant's slots."""
    complete: tuple[Round, ...] = field(init=False, repr=False, compare=False)
    """A round for every lane."""

    cautious: ClassVar[bool] = False
    name: ClassVar[str] = "duty_cycle"
    grouped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        where = f"policy {self.name!r}"
        if not self.lanes:
            raise InvalidValueError(where, "lanes", self.lanes, "at least one partition")
        if not isinstance(self.drop, DropRule):
            raise InvalidValueError(where, "drop", self.drop, "a DropRule")
        if not 0 <= self.stretch <= 1:
            raise InvalidValueError(where, "stretch", self.stretch, "a share from 0 to 1")
        if self.rounds and len(self.rounds) != len(self.lanes):
            raise InvalidValueError(where, "rounds", len(self.rounds), f"one for each of the {len(self.lanes)} lanes")
        complete = self.rounds or (Round(),) * len(self.lanes)
        slots_of: dict[str, tuple[tuple[int, int], ...]] = {}
        for number, made in enumerate(complete):
            for at, slot in enumerate(made.slots):
                slots_of[slot.tenant] = (*slots_of.get(slot.tenant, ()), (number, at))
        object.__setattr__(self, "complete", complete)
        object.__setattr__(self, "slots_of", slots_of)

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares that launches may get: the lanes."""
        return self.lanes

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, deadline, arrival)."""
        return (query.rank, query.deadline_ns, query.id)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Give every free lane its next turn, then its guests."""
        turns = memory if isinstance(memory, Turns) else Turns.first(self.complete)
        made = RoundDecision(self, snapshot, turns)
        free = [at for at, lane in enumerate(self.lanes) if lane.mask & snapshot.free_mask == lane.mask]
        while free and (chosen := made.next_turn(free)) is not None:
            free.remove(chosen)
        made.drop_strangers()
        while free and (chosen := made.next_guest(free)) is not None:
            free.remove(chosen)
        return Decision(tuple(made.starts), tuple(made.drops), made.turns())
