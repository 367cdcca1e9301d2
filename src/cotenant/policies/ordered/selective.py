"""Policies that shed load: each has an objective, by which it chooses the queries that are dropped under overload.

Queries are served by the earliest deadline. At every arrival, and whenever a lane is free, all live queries are laid on
the lanes. Where some would be late, the queries of the least value are dropped at once, so that clients can retry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.snapshot import AT_ARRIVALS, WHEN_FREE, AccountView, Decision, DropRule, Snapshot
from cotenant.policies.decision_context import DecisionContext
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.shedding.jobs import Number
from cotenant.policies.shedding.shed import all_fit, remembered, shed
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
    """Maximises the number of answers in time: drops the query of the most work. Subclasses change members of
    `shed.SheddingPolicy`."""

    preempt: bool = True

    name: ClassVar[str] = "most"
    reserves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ListPolicy.__post_init__(self)
        self.specify(asked=AT_ARRIVALS if self.drop is DropRule.HOPELESS else WHEN_FREE)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Drop queries that cannot be in time together, then fill the free lanes with the earliest deadlines."""
        free = _free_lanes(self.lanes, snapshot.free_mask)
        if not free and _ends_soon(snapshot):
            return Decision(memory=memory)
        only = self._only_start(snapshot, free)
        if only is not None:
            memory = memory if self.drop is not DropRule.HOPELESS else remembered(self, snapshot, memory)
            return Decision((only,), (), memory)
        context = DecisionContext(snapshot, self.drop, self.batch_key)
        if context.drops_hopeless:
            memory = shed(self, context, memory, is_idle=free != 0)
        if free:
            self._fill_lanes(context, free)
        return Decision(tuple(context.starts), tuple(context.drops), memory, again_ns=context.again_ns)

    def _is_forced(self, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
        """Whether nothing is dropped, either."""
        return self.drop is not DropRule.HOPELESS or all_fit(self, snapshot, work, deadline_ns)

    def attainment(self, account: AccountView) -> float:
        """Attainment of all queries."""
        return account.attainment

    def virtual_deadlines(self, account: AccountView | None) -> Mapping[int, int]:
        """None: the policy knows no quotas."""
        return _NONE

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """More for less work an answer."""
        return (-work_ns / answers,)


class Weighted(Most):
    """The largest weight of answers in time: drops the query of the least weight for its work."""

    __slots__ = ()

    name: ClassVar[str] = "weighted"

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Weight for work."""
        return (weight * answers / work_ns,)


class Quotas(Most):
    """A policy of quotas: priorities of tenants count among queries out of quota alone, as part of their value.

    Where it may drop queries, all are served by deadline. Under other drop rules quotas have no effect, and the
    priority goes first.
    """

    __slots__ = ()

    def rank_of(self, tenant: Tenant) -> int:
        """One for all tenants where quotas have an effect."""
        return 0 if self.drop is DropRule.HOPELESS else tenant.rank


class Shares(Quotas):
    """Guarantees each tenant its quota of device time, then maximises the number of answers in time: drops queries out
    of quota first, of these by the lowest priority of tenants, then by the most work. Where there are none, it drops a
    query of the tenant of the largest attainment."""

    __slots__ = ()

    name: ClassVar[str] = "shares"
    reserves: ClassVar[bool] = True

    def attainment(self, account: AccountView) -> float:
        """Attainment of queries in quota, which the loss of others does not lower."""
        return account.kept

    def virtual_deadlines(self, account: AccountView | None) -> Mapping[int, int]:
        """Those of the tenant's quota."""
        return _NONE if account is None else account.due_ns

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Queries in quota are dropped last, by largest attainment first; others by priority, then as `most`."""
        return in_quota, -attainment * in_quota, (in_quota - 1) * rank, -work_ns / answers


class Fair(Quotas):
    """Maximises the smallest attainment: quotas are in proportion to the demand of tenants. Out of quota it drops a
    query of the tenant of the lowest priority, of these of the largest attainment; of one tenant, the query of the
    most work."""

    __slots__ = ()

    name: ClassVar[str] = "fair"

    def virtual_deadlines(self, account: AccountView | None) -> Mapping[int, int]:
        """Those of the tenant's part of all demand."""
        return _NONE if account is None else account.even_due_ns

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Queries in quota are dropped last, others by priority; then those of the largest attainment first."""
        return in_quota, (in_quota - 1) * rank, -attainment, -work_ns / answers
