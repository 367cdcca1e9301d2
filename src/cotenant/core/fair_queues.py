"""Fair queueing of tenants: quotas of lanes, virtual deadlines, attainment and demand of each tenant.

A tenant's quota is a virtual device of `quota` lanes, which serves the tenant's queries one after the other. At the
arrival of a query, `v` is the time at which the device ends it (virtual clock: Zhang, SIGCOMM 1990):

    v = max(now, v) + work / quota

The query is in quota if `v <= deadline`, or if the device was idle; else `v` stays as it was. Its virtual deadline is
`min(v, deadline)`, moved towards the deadline by a share `lead` (`_FULL_LEAD`).

All virtual devices together are no faster than the lanes. So virtual deadlines can be kept, up to the time that lanes
and cuts waste. A quota that a tenant leaves unused is lost: an absent tenant collects no claim. A quota counts answers:
a query answered in time out of quota uses up the quota of a later one (`_MOST_CREDIT` at most).

Quotas depend on the configuration and the predictor alone, never on traffic. A guaranteed rate costs one row of the
first declared shape for each query. Rates that need more than all lanes are scaled down in proportion.

Each tenant has two virtual devices. One has its quota. The other is for even attainment: its lanes are in proportion to
the tenant's recent demand, and more for a tenant of low attainment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, expm1

from msgspec import UNSET

from cotenant.types import UNSET_RANK, Outcome, Query, Tenant

_ATTAINMENT_STEP = 1 / 64
"""Weight of one query in the moving averages of attainment, once a tenant had so many: some seconds under load."""
_DECAY_NS = 10_000_000_000
"""Time in which the weight of past demand falls to 1/e."""
_EVEN_POWER = 4
"""Power of (mean attainment / own attainment) that multiplies the lanes of a tenant's device for even attainment."""
_FULL_LEAD = 0.1
"""Attainment lead at which a tenant's priority boost reaches zero. From there on its in-quota queries use their real
deadlines."""
_MOST_CREDIT = 8
"""Answers out of quota, at most, that take the place of later queries in quota. Bounds how long past service counts."""
_MERGE_STEP = 1 / 64
"""Weight of a query in the moving average of `merge_factor`."""
_INITIAL_NS = 1_000_000_000
"""Time over which the first demand is averaged."""
_MOST_SCALES = 200.0
"""Exponent of the decay in one step, at most: avoids overflow."""
_LEAST_ATTAINMENT = 0.05
"""Lower bound of attainments that divide."""
_IDLE_NS = 1e-3
"""Work below which a virtual device counts as idle: rounding error of sums."""
_ANSWERED = Outcome.ANSWERED
_COUNTED = (_ANSWERED, Outcome.LATE, Outcome.REJECTED, Outcome.DROPPED)


class VirtualDevice:
    """A virtual device of `quota` lanes; `deadlines_ns` has the virtual deadlines of live queries in quota, by number.
    `left`, the work in lane-ns that the device has not done at time `at`, stands for `v = at + left / quota`."""

    __slots__ = ("_at_ns", "_left_ns", "deadlines_ns", "quota")

    def __init__(self) -> None:
        self.deadlines_ns: dict[int, int] = {}
        self.quota = 0.0
        self._left_ns = 0.0
        """Work in lane-ns that the device has not done at `_at_ns`."""
        self._at_ns = 0

    def set_quota(self, quota: float, now_ns: int) -> None:
        """Let the device have `quota` lanes from now on."""
        left = self._left_ns - self.quota * (now_ns - self._at_ns)
        self._left_ns, self._at_ns, self.quota = left if left >= _IDLE_NS else 0.0, now_ns, quota

    def enter(self, query: Query, work_ns: int, quota: float, now_ns: int, lead: float = 0.0) -> bool:
        """Add a query of `work_ns` lane-ns; the device has `quota` lanes from now on. Whether the query is in quota.
        `lead`, from 0 to 1, moves the virtual deadline towards the real one."""
        left = self._left_ns - self.quota * (now_ns - self._at_ns)  # inline set_quota: a call would double the cost
        if left < _IDLE_NS:
            left = 0.0
        self._at_ns, self.quota = now_ns, quota
        if quota > 0:
            deadline_ns = query.deadline_ns
            due = now_ns + (left + work_ns) / quota
            if due <= deadline_ns or not left:
                self._left_ns = left + work_ns
                if due > deadline_ns:
                    due = deadline_ns
                self.deadlines_ns[query.id] = int(due + lead * (deadline_ns - due))
                return True
        self._left_ns = left
        return False

    def replace(self, query: Query, work_ns: int, waiting: Mapping[int, tuple[int, int]]) -> int | None:
        """Put a query in quota in place of a waiting one of lower rank and at least as much work: the last one.

        `waiting` has rank and work of each waiting query, by number. Returns the number of the query that leaves the
        quota; None when there is none. Replaces the dictionary `deadlines_ns`.
        """
        rank, deadlines, deadline_ns = query.rank, self.deadlines_ns, query.deadline_ns
        found = [
            (other, deadlines[number], number)
            for number, (other, work) in waiting.items()
            if other > rank and work >= work_ns and deadlines.get(number, deadline_ns + 1) <= deadline_ns
        ]
        if not found:
            return None
        _, due, number = max(found)
        self.deadlines_ns = {each: at for each, at in deadlines.items() if each != number} | {query.id: due}
        return number


class DemandDecay:
    """Exponential decay of demand: new demand is multiplied by `scale`, which grows, instead of decaying all sums."""

    __slots__ = ("_begun_ns", "_now_ns", "scale")

    def __init__(self) -> None:
        self.scale = 1.0
        self._begun_ns = self._now_ns = 0

    def advance(self, now_ns: int) -> None:
        """Move the present to `now_ns`."""
        if not self._now_ns:  # the clock may start at any time
            self._begun_ns = self._now_ns = now_ns
        self.scale *= exp(min(_MOST_SCALES, (now_ns - self._now_ns) / _DECAY_NS))
        self._now_ns = now_ns

    @property
    def full_lane_ns(self) -> float:
        """Sum of the demand that would keep one lane busy all the time."""
        age = (self._now_ns - self._begun_ns + _INITIAL_NS) / _DECAY_NS
        return self.scale * (_DECAY_NS * -expm1(-age))


class FairQueue:
    """Quota, virtual deadlines, attainment and demand of one tenant; see `core.snapshot.FairQueueView`. `share` is its
    part, from 0 to 1, of the lanes that rates leave; `reserved` the lanes that its own rate takes."""

    __slots__ = (
        *("_count", "_credit", "_decay", "_even_device", "_in_quota", "_quota_device", "_quota_share", "_waiting"),
        *("attainment", "demand_ns", "merge_factor", "quota_attainment", "reserved", "share"),
    )

    def __init__(self, decay: DemandDecay) -> None:
        self.share = self.reserved = 0.0
        self.attainment = self.quota_attainment = 1.0
        self.demand_ns = 0.0
        self._decay = decay
        self._quota_share = 1.0
        """Moving average: share of its queries that were in quota."""
        self._quota_device, self._even_device = VirtualDevice(), VirtualDevice()
        self._count = 0
        self._in_quota: set[int] = set()
        """Live queries in quota, without those that credit replaces."""
        self._waiting: dict[int, tuple[int, int]] = {}
        """Rank and work of queries that have not begun, by number: a higher rank can take their place in quota."""
        self.merge_factor = 1.0
        """Moving average: work of its batches over the work of their queries alone; 1 without merging."""
        self._credit = 0
        """Answers in time minus queries in quota that have ended."""

    @property
    def demand(self) -> float:
        """Recent offered load in lanes."""
        return self.demand_ns / self._decay.full_lane_ns

    @property
    def quota(self) -> float:
        """Lanes of its virtual device."""
        return self._quota_device.quota

    @property
    def deadlines_ns(self) -> dict[int, int]:
        """Virtual deadlines in ns of its live queries in quota, by number."""
        return self._quota_device.deadlines_ns

    @property
    def even_deadlines_ns(self) -> dict[int, int]:
        """As `deadlines_ns`, for the quotas of even attainment."""
        return self._even_device.deadlines_ns

    def set_quotas(self, quota: float, even: float, now_ns: int) -> None:
        """Set the lanes of both virtual devices from now on."""
        self._quota_device.set_quota(quota, now_ns)
        self._even_device.set_quota(even, now_ns)

    def enter(self, query: Query, work_ns: int, even: float, now_ns: int) -> None:
        """Add an admitted query; `even` are the tenant's lanes for even attainment."""
        own, waiting, has_rank = self._quota_device, self._waiting, query.rank < UNSET_RANK
        lead = self.quota_attainment - 1
        if own.enter(query, work_ns, own.quota, now_ns, min(1.0, lead / _FULL_LEAD) if lead > 0 else 0.0):
            if self._credit > 0:
                self._credit -= 1
                del own.deadlines_ns[query.id]
            else:
                self._in_quota.add(query.id)
        elif has_rank and (other := own.replace(query, work_ns, waiting)) is not None:
            self._in_quota.discard(other)
            self._in_quota.add(query.id)
        if not self._even_device.enter(query, work_ns, even, now_ns) and has_rank:
            self._even_device.replace(query, work_ns, waiting)
        waiting[query.id] = query.rank, work_ns

    def begin(self, queries: Sequence[Query], part: float) -> None:
        """Queries begin as one batch, which takes `part` of the work of its queries alone."""
        waiting = self._waiting
        for query in queries:
            waiting.pop(query.id, None)
        if part != self.merge_factor:
            self.merge_factor += min(1.0, len(queries) * _MERGE_STEP) * (part - self.merge_factor)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """Remove a query that has ended, and count its outcome."""
        number = query.id
        is_in_quota = number in self._in_quota
        self._in_quota.discard(number)
        self._quota_device.deadlines_ns.pop(number, None)
        self._even_device.deadlines_ns.pop(number, None)
        is_answered = outcome is _ANSWERED
        if not is_answered:  # else it has begun
            self._waiting.pop(number, None)
        if outcome in _COUNTED:
            self._credit = max(-_MOST_CREDIT, min(_MOST_CREDIT, self._credit + is_answered - is_in_quota))
            self._count += 1
            step = max(_ATTAINMENT_STEP, 1 / (self._count + 1))  # as if one before the first had been in time
            self.attainment += step * (is_answered - self.attainment)
            self._quota_share += step * (is_in_quota - self._quota_share)
            self.quota_attainment = self.attainment / max(self._quota_share, _LEAST_ATTAINMENT)


class FairQueues:
    """The fair queues of all tenants, by name in `known`."""

    __slots__ = ("_answered_ns", "_decay", "_demand_ns", "_lanes", "known", "rated_part")

    def __init__(self) -> None:
        self.known: dict[str, FairQueue] = {}
        self._demand_ns = self._answered_ns = 0.0
        self._decay = DemandDecay()
        self._lanes = 0
        self.rated_part = 0.0
        """Share of all lanes that guaranteed rates need; above 1 each rate is divided by it."""

    def set_quotas(self, tenants: Iterable[Tenant], lanes: int, row_ns: Callable[[Tenant], float], now_ns: int) -> None:
        """Set the tenants and the number of lanes, and compute the quotas.

        1. A guaranteed rate reserves `rate * row_ns` lane-ns a second, where `row_ns` is the work of one row of the
           first shape. If rates need more than all lanes, each is scaled down in proportion.
        2. The lanes that rates leave are divided by `share`. Shares above 1 in total are scaled down to 1.
        3. Tenants without `share` divide the rest by weight.
        4. A tenant's quota is the larger one of its reserved lanes and its share. Known tenants keep their history.
        """
        present = {tenant.name: tenant for tenant in tenants}
        self.known = {name: self.known.get(name) or FairQueue(self._decay) for name in present}
        self._lanes = lanes
        self._sum_demand()
        reserved = {name: each.rate * row_ns(each) / 1e9 for name, each in present.items() if each.rate is not UNSET}
        self.rated_part = sum(reserved.values()) / max(1, lanes)
        named = sum([each.share for each in present.values()])
        weights = sum([each.weight for each in present.values() if not each.share])
        unrated, left = lanes * max(0.0, 1 - self.rated_part), max(0.0, 1 - named)
        for name, each in present.items():
            queue = self.known[name]
            queue.reserved = reserved.get(name, 0.0) / max(1.0, self.rated_part)
            queue.share = each.share / max(1.0, named) if each.share else left * each.weight / weights
            queue.set_quotas(max(queue.reserved, queue.share * unrated), self._even_lanes(queue), now_ns)

    def enter(self, query: Query, work_ns: int, now_ns: int) -> None:
        """Add an admitted query, which is predicted to take `work_ns` of a lane alone."""
        queue = self.known[query.tenant]
        work_ns = self._add_demand(queue, work_ns, now_ns)
        queue.enter(query, work_ns, self._even_lanes(queue), now_ns)

    def refused(self, query: Query, work_ns: int, now_ns: int) -> None:
        """Count a query that was rejected because its tenant's queue was full: as demand, and as lost."""
        self._add_demand(self.known[query.tenant], work_ns, now_ns)
        self.leave(query, Outcome.REJECTED)

    def begin(self, tenant: str, queries: Sequence[Query], part: float) -> None:
        """Queries of a tenant begin as one batch, which takes `part` of the work of its queries alone."""
        if (queue := self.known.get(tenant)) is not None:
            queue.begin(queries, part)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """Remove a query that has ended, and count its outcome."""
        queue = self.known.get(query.tenant)
        if queue is not None:
            before = queue.attainment
            queue.leave(query, outcome)
            self._answered_ns += queue.demand_ns * (queue.attainment - before)

    def _add_demand(self, queue: FairQueue, work_ns: int, now_ns: int) -> int:
        """Count a query's work as demand; returns the work that is left after merging, by `merge_factor`."""
        decay, work_ns = self._decay, round(work_ns * queue.merge_factor)
        decay.advance(now_ns)
        if decay.scale > 1e100:
            for each in self.known.values():
                each.demand_ns /= decay.scale
            decay.scale = 1.0
            self._sum_demand()
        counted = work_ns * decay.scale
        queue.demand_ns += counted
        self._demand_ns += counted
        self._answered_ns += counted * queue.attainment
        return work_ns

    def _even_lanes(self, queue: FairQueue) -> float:
        """Lanes for even attainment: `lanes * demand / all demand * (mean / own attainment) ** _EVEN_POWER`, where the
        power is clipped to 0.5 to 2."""
        if not queue.demand_ns:
            return 0.0
        mean = self._answered_ns / self._demand_ns
        faster = min(2.0, max(0.5, (mean / max(queue.attainment, _LEAST_ATTAINMENT)) ** _EVEN_POWER))
        return self._lanes * min(1.0, queue.demand_ns / self._demand_ns * faster)

    def _sum_demand(self) -> None:
        every = self.known.values()
        self._demand_ns = sum([each.demand_ns for each in every])
        self._answered_ns = sum([each.demand_ns * each.attainment for each in every])
