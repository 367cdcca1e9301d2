"""Load-shedding policies: earliest deadline first, with an objective that selects the queries to drop under overload.

1. At every arrival, and whenever a lane is free, schedule all live queries on the lanes by deadline (`shedding.jobs`).
2. While a query would be late, drop the query of the least value up to it at once, so that its client can retry.
3. Fill the free lanes as `edf` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.snapshot import AT_ARRIVALS, WHEN_FREE, Decision, DropRule, FairQueueView, Snapshot
from cotenant.policies.decision_context import DecisionContext
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.shedding.jobs import Number
from cotenant.policies.shedding.shed import all_fit, remembered, shed
from cotenant.types import Tenant
from cotenant.work import Share, Work

_NONE: Mapping[int, int] = {}
_SOON_NS = 5_000_000
"""An arrival this close to the predicted end of a launch waits for the decision at that end: bounds the cost of
decisions."""


def _free_lanes(lanes: Sequence[Share], free: int) -> int:
    """The slots of the lanes that are inside the mask `free`."""
    found = 0
    for lane in lanes:
        mask = lane.mask
        if mask & free == mask:
            found |= mask
    return found


def _ends_soon(snapshot: Snapshot) -> bool:
    """Whether a launch is predicted to end within _SOON_NS of now."""
    now = snapshot.now_ns
    ends = [run.started_ns + run.launch.predicted_ns - now for run in snapshot.running.values()]
    return any(-_SOON_NS < left < _SOON_NS for left in ends)


@dataclass(frozen=True, slots=True)
class Most(ListPolicy):
    """Maximises the number of queries answered within their SLO: drops the query of the most work for each answer.
    Subclasses override members of `shed.SheddingPolicy`."""

    preempt: bool = True

    name: ClassVar[str] = "most"
    reserves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ListPolicy.__post_init__(self)
        self.specify(requests=AT_ARRIVALS if self.drop is DropRule.HOPELESS else WHEN_FREE)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Drop queries that cannot be in time together, then fill the free lanes by deadline."""
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
        """Whether the decision drops no query, so that the only candidate starts."""
        return self.drop is not DropRule.HOPELESS or all_fit(self, snapshot, work, deadline_ns)

    def attainment(self, queue: FairQueueView) -> float:
        """Attainment of all queries of the tenant."""
        return queue.attainment

    def virtual_deadlines(self, queue: FairQueueView | None) -> Mapping[int, int]:
        """None: the policy has no quotas."""
        return _NONE

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Minus the work for each answer."""
        return (-work_ns / answers,)


class Weighted(Most):
    """Maximises the total weight of queries answered within their SLO: drops the query of the least weight for its
    work."""

    __slots__ = ()

    name: ClassVar[str] = "weighted"

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Weight of answers over work."""
        return (weight * answers / work_ns,)


class Quotas(Most):
    """Base of policies with quotas: tenants' priorities count among queries out of quota alone, as part of their value.

    Under the drop rule `hopeless` all queries are served by deadline. Under other drop rules quotas have no effect, and
    priorities go first.
    """

    __slots__ = ()

    def rank_of(self, tenant: Tenant) -> int:
        """The same for all tenants if quotas have an effect."""
        return 0 if self.drop is DropRule.HOPELESS else tenant.rank


class Shares(Quotas):
    """Guarantees each tenant its quota of device time, then maximises the number of queries answered within their SLO.

    Drops queries out of quota first: by the lowest priority, then by the most work. If all are in quota, drops a query
    of the tenant of the largest attainment.
    """

    __slots__ = ()

    name: ClassVar[str] = "shares"
    reserves: ClassVar[bool] = True

    def attainment(self, queue: FairQueueView) -> float:
        """Attainment of queries in quota; the loss of others does not lower it."""
        return queue.quota_attainment

    def virtual_deadlines(self, queue: FairQueueView | None) -> Mapping[int, int]:
        """Virtual deadlines at the tenant's quota."""
        return _NONE if queue is None else queue.deadlines_ns

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Queries in quota are dropped last, by largest attainment first; others by priority, then as `most`."""
        return in_quota, -attainment * in_quota, (in_quota - 1) * rank, -work_ns / answers


class Fair(Quotas):
    """Maximises the smallest attainment of tenants (max-min fairness): quotas are in proportion to demand.

    Drops queries out of quota first: by the lowest priority, then by the tenant of the largest attainment, then by the
    most work.
    """

    __slots__ = ()

    name: ClassVar[str] = "fair"

    def virtual_deadlines(self, queue: FairQueueView | None) -> Mapping[int, int]:
        """Virtual deadlines at the tenant's part of all demand."""
        return _NONE if queue is None else queue.even_deadlines_ns

    def value(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Queries in quota are dropped last, others by priority; then those of the largest attainment first."""
        return in_quota, (in_quota - 1) * rank, -attainment, -work_ns / answers
