"""Policies that choose whom to serve when not all can be in time: each names what it makes the most of.

Queries are served by the earliest deadline. At every arrival, and whenever a lane is free, all that is inside is laid
on the lanes; where some of it would be late, what is worth least goes at once, so that its client hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.snapshot import AT_ARRIVALS, WHEN_FREE, AccountView, Decision, DropRule, Snapshot
from cotenant.policies.desk import Desk
from cotenant.policies.ordered.giving_up import all_fit, give_up, remembered
from cotenant.policies.ordered.jobs import Number
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.types import Tenant
from cotenant.work import Share, Work

_NONE: Mapping[int, int] = {}
_SOON_NS = 5_000_000
"""A query that comes so shortly before a launch ends is decided on then, with all that has come: at three times the
capacity a decision at each arrival took a fifth of a core, from models and front-ends, and seven tenants had 0.13 of
their queries in time where edf, which is not asked then, had 0.52."""


def _free_lanes(lanes: Sequence[Share], free: int) -> int:
    """The slots of those lanes whose slots are all in the mask `free`, which may have slots of no lane, too."""
    found = 0
    for lane in lanes:
        mask = lane.mask
        if mask & free == mask:
            found |= mask
    return found


def _ends_soon(snapshot: Snapshot) -> bool:
    """Whether a launch is predicted to end about now."""
    now = snapshot.now_ns
    ends = [run.started_ns + run.launch.predicted_ns - now for run in snapshot.running.values()]
    return any(-_SOON_NS < left < _SOON_NS for left in ends)


@dataclass(frozen=True, slots=True)
class Most(ListPolicy):
    """As many answers in time as there can be: gives up the query that needs the most work. See `giving_up.Selecting`
    for what the others have instead."""

    preempt: bool = True

    name: ClassVar[str] = "most"
    reserves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ListPolicy.__post_init__(self)
        self.specify(asked=AT_ARRIVALS if self.drop is DropRule.HOPELESS else WHEN_FREE)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Give up what cannot be in time together, then fill the free lanes with the earliest deadlines."""
        free = _free_lanes(self.lanes, snapshot.free_mask)
        if not free and _ends_soon(snapshot):
            return Decision(memory=memory)
        only = self._only_start(snapshot, free)
        if only is not None:
            memory = memory if self.drop is not DropRule.HOPELESS else remembered(self, snapshot, memory)
            return Decision((only,), (), memory)
        desk = Desk(snapshot, self.drop, self.batch_key)
        if desk.drops_hopeless:
            memory = give_up(self, desk, memory, is_idle=free != 0)
        if free:
            self._fill_lanes(desk, free)
        return Decision(tuple(desk.starts), tuple(desk.drops), memory, again_ns=desk.again_ns)

    def _is_forced(self, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
        """Also whether nothing has to go."""
        return self.drop is not DropRule.HOPELESS or all_fit(self, snapshot, work, deadline_ns)

    def fared(self, account: AccountView) -> float:
        """Attainment of all queries."""
        return account.attainment

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """None: everybody's queries are due at their deadlines."""
        return _NONE

    def worth(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """More for less work for an answer."""
        return (-work_ns / answers,)


class Weighted(Most):
    """The largest weight of answers in time: gives up the query with the least weight for its work."""

    __slots__ = ()

    name: ClassVar[str] = "weighted"

    def worth(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Weight for work."""
        return (weight * answers / work_ns,)


class Quotas(Most):
    """A policy of quotas: priorities of tenants count among queries out of quota alone, as part of their worth.

    Where it may drop queries, all are served by deadline. Under other drop rules quotas have no effect, and the
    priority goes first.
    """

    __slots__ = ()

    def rank_of(self, tenant: Tenant) -> int:
        """One for all tenants where quotas have an effect."""
        return 0 if self.drop is DropRule.HOPELESS else tenant.rank


class Shares(Quotas):
    """To each its share, and then as many answers as there can be: queries out of quota go first, of these the tenants
    of the lowest priority, then the most work; where none is, a query of the tenant that has fared best."""

    __slots__ = ()

    name: ClassVar[str] = "shares"
    reserves: ClassVar[bool] = True

    def fared(self, account: AccountView) -> float:
        """Attainment of what is in quota, which the loss of queries out of quota does not lower."""
        return account.kept

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's share."""
        return _NONE if account is None else account.due_ns

    def worth(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Those in quota come last, among them by how badly the tenant has fared; else by priority, then as `most`."""
        return entitled, -fared * entitled, (entitled - 1) * rank, -work_ns / answers


class Fair(Quotas):
    """The largest smallest attainment: device time is dealt in proportion to what each tenant asks for, and beyond that
    a query of the tenant of the lowest priority goes, of these of the one that has fared best of late; of one tenant,
    the one of the most work."""

    __slots__ = ()

    name: ClassVar[str] = "fair"

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's part of all that is asked for."""
        return _NONE if account is None else account.even_due_ns

    def worth(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Those in quota come last, others by priority; else by how badly the tenant has fared."""
        return entitled, (entitled - 1) * rank, -fared, -work_ns / answers
