"""List scheduling: free lanes are given to the candidate with the smallest key.

A candidate is the head of a tenant's queue or a batch paused at a segment boundary. Policies of this family differ in
their keys alone: fcfs, sjf and edf get the same drop rule, batching, lanes and predictor, so that they compare fairly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, Decision, DropRule, QueueView, Snapshot, Start
from cotenant.policies.base import BasePolicy
from cotenant.policies.decision_context import NEVER_NS, DecisionContext, Key, SlackShare, extent
from cotenant.policies.ordered.wide import unions, widened
from cotenant.policies.shedding.deferral import deferred_by_weight
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work

_MOST_DOUBTFUL = 32
"""Doubtful queries that one decision passes over; where there are so many, what is behind them hardly helps."""


@dataclass(frozen=True, slots=True)
class ListPolicy(BasePolicy):
    """Work-conserving list scheduling over fixed lanes; the base of fcfs, sjf and edf.

    `lanes`: partitions, each of which runs one launch at a time; the first is filled first. `drop`: when waiting
    queries are given up. `preempt`: stop at segment boundaries and choose again; else every batch runs to its end once
    it has begun. `slack_share`: with `preempt`, the share of the slack (SLO - own latency) of a more urgent arrival
    that one launch may use up before it reaches a boundary. 0 stops at every cut. `tail_aware`: first serve queries
    that meet their deadline at the upper estimate of their latency, then the others. Under overload, queries that start
    at the last moment at which their median fits are late half of the time. fcfs and sjf, the plain orders that others
    are compared with, are so only where they are told to be.

    `widen`: the most lanes of cores that one launch gets, rounded down to a power of two. With 2 and more what starts
    while nobody waits gets the free lanes beside its own where it is predicted quicker by enough, up to its next
    boundary (see `wide.widened`), and who could be in time only so is admitted, and served when the lanes are free and
    nobody else is. Costs memory: models are loaded once more for each such share.

    Under the drop rule `hopeless`, weights count in overload: see `shedding.deferral`. A query is hopeless when no
    lane is quick enough; one that is too slow for it leaves it to others.

    Raises InvalidValueError when there is no lane, `drop` is not a DropRule or `slack_share` is not a share.
    """

    slack_share: SlackShare = 0.1
    tail_aware: bool = True
    widen: Annotated[int, Meta(ge=1, le=1024)] = 1
    wide: tuple[Share, ...] = field(init=False, repr=False, compare=False)
    """Several lanes as one, the largest first."""

    name: ClassVar[str] = "list"

    def __post_init__(self) -> None:
        BasePolicy.__post_init__(self)
        self.check("slack_share", 0 <= self.slack_share <= 1, "a share from 0 to 1")
        self.check("widen", self.widen >= 1, "at least 1")
        object.__setattr__(self, "wide", unions(self.lanes, self.widen))
        self.specify(shares=(*self.lanes, *self.wide), tail_aware=self.tail_aware)

    @property
    def _all_sizes(self) -> tuple[int, ...]:
        """Sizes of all shares that a launch may get."""
        return (*self.sizes, *[share.size for share in self.wide]) if self.wide else self.sizes

    def batch_key(self, batch: BatchView, predictor: Predictor) -> Key:
        """Order of a paused batch among the candidates: that of its most urgent query."""
        if len(batch.queries) == 1:
            return self.queue_key(batch.queries[0], batch.tenant, predictor)
        return min([self.queue_key(query, batch.tenant, predictor) for query in batch.queries])

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """The smallest key that a query of this tenant could have if it arrived now; here it is its deadline."""
        return (self.rank_of(tenant), now_ns + tenant.slo_ns)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Fill the free lanes, most urgent candidate first."""
        only = self._only_start(snapshot, snapshot.free_mask)
        if only is not None:
            return Decision((only,), (), memory)
        context = self._context(snapshot)
        self._fill_lanes(context, snapshot.free_mask)
        return Decision(tuple(context.starts), tuple(context.drops), memory, again_ns=context.again_ns)

    def _only_start(self, snapshot: Snapshot, free: int) -> Start | None:
        """The start of the only candidate, a waiting query or a paused batch, in the first lane of the mask `free`.

        No choice is left where it is in time there: this is a short way to the start that `_fill_lanes` makes. None
        where there are more candidates, that lane is too slow, or lanes may be widened.
        """
        only: QueueView | None = None
        for queue in snapshot.queues.values():
            if queue.queries:
                if only is not None or snapshot.paused or len(queue.queries) > 1:
                    return None
                only = queue
        if self.wide or (only is None and len(snapshot.paused) != 1):
            return None
        for lane in self.lanes:  # a generator would cost half a microsecond
            if lane.mask & free == lane.mask:
                break
        else:
            return None
        batch, queries = None, tuple[Query, ...]()
        if only is not None:
            head, key, tenant = only.queries[0], only.keys[0], only.tenant
            work, queries, deadline_ns = tenant.work(head.shape, head.items), (head,), head.deadline_ns
        else:
            [paused] = snapshot.paused
            batch, key, tenant = paused.id, self.batch_key(paused, snapshot.predictor), paused.tenant
            work = tenant.work(paused.shape, paused.items, paused.next_unit)
            deadline_ns = max([query.deadline_ns for query in paused.queries])
        needed_ns = snapshot.predictor.latency_ns(work, lane.size)
        is_late = self.drop is DropRule.HOPELESS and snapshot.now_ns + needed_ns > deadline_ns
        if is_late or not self._is_forced(snapshot, work, deadline_ns):
            return None
        if only is None or (self.preempt and len(tenant.cuts) > 2):
            work, needed_ns = self._extent(snapshot, tenant, key, work, lane, needed_ns)
        return Start(work, queries, lane, needed_ns, batch)

    def _is_forced(self, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
        """Whether the only candidate, this work, begins in the first free lane, which ends it by its deadline."""
        return True

    def _context(self, snapshot: Snapshot) -> DecisionContext:
        """The books of a decision, with queries deferred by weight."""
        context = DecisionContext(snapshot, self.drop, self.batch_key)
        if snapshot.weights_differ and context.drops_hopeless:
            deferred = deferred_by_weight(snapshot, context.paused, len(self.lanes), self.lanes[0].size)
            if deferred:
                context.defer(deferred)
        return context

    def _fill_lanes(self, context: DecisionContext, free: int) -> None:
        """Give candidates those lanes whose slots are all in the mask `free`, and what is left to widen them."""
        size, first = 0, len(context.starts)
        for lane in self.lanes:
            mask = lane.mask
            if mask & free == mask:
                if size and lane.size != size:  # who does not fit into one may fit into another
                    context.reset()
                size = lane.size
                start = self._fill(context, lane, free & ~mask)
                if start is not None:
                    context.starts.append(start)
                    free &= ~mask
                    if not free:
                        break
                    context.assign(start)
                elif len(self.sizes) == 1:
                    break
        if free and self.wide:
            self._widen(context, first, free)

    def _widen(self, context: DecisionContext, first: int, free: int) -> None:
        """Widen starts from number `first` on; where there are none, start who is in time in several lanes alone."""
        for number, start in enumerate(context.starts[first:], first):
            tenant = context.snapshot.queues[start.work.tenant].tenant
            context.starts[number] = made = widened(context, start, tenant, self.wide, free, self.slack_share)
            free &= ~made.share.mask
        share = next((share for share in self.wide if share.mask & ~free == 0), None)
        if share is not None and len(context.starts) == first:
            context.reset()
            alone = self._fill(context, share, 0)
            if alone is not None:
                context.starts.append(alone)

    def _fill(self, context: DecisionContext, lane: Share, beside: int) -> Start | None:
        """Start the best candidate that is not hopeless; give up those before it that are.

        `beside` is the mask of the free slots that this decision may still give to other launches.

        What is doubtful is put off, and taken when nothing else is left; what needs another lane is passed over.
        """
        now, latency_ns, cores = context.now_ns, context.latency_ns, lane.size
        queries: Sequence[Query]
        while len(context.deferred) < _MOST_DOUBTFUL and (best := context.best()) is not None:
            if isinstance(best, tuple):
                queue, at = best
                head, tenant = queue.queries[at], queue.tenant
                work, queries, deadline = tenant.work(head.shape, head.items), (head,), head.deadline_ns
            else:
                tenant, queries = best.tenant, best.queries
                work = tenant.work(best.shape, best.items, best.next_unit)
                deadline = max([query.deadline_ns for query in queries])
            needed = latency_ns(work, cores)
            if context.drops_hopeless and now + needed > deadline:
                context.drop_hopeless(queries, work, self._all_sizes, deadline - now)
                context.skip(best)
            elif not isinstance(best, tuple):
                work, needed = self._extent(context.snapshot, tenant, context.paused[-1][0], work, lane, needed)
                return Start(work, (), lane, needed, best.id)
            elif (
                self.tail_aware
                and now + context.snapshot.predictor.upper_ns(tenant.name, needed, tenant.slo_ns) > deadline
            ):
                context.skip(best, deferred=True)
            else:
                return self._start_batch(context, queue, at, lane, work, needed, beside)
        doubtful = context.next_deferred()
        if doubtful is None:
            return None
        queue, at = doubtful
        head = queue.queries[at]
        work = queue.tenant.work(head.shape, head.items)
        return self._start_batch(context, queue, at, lane, work, latency_ns(work, cores), beside)

    def _start_batch(
        self, context: DecisionContext, queue: QueueView, at: int, lane: Share, work: Work, latency: int, beside: int
    ) -> Start:
        """Start the batch that is headed by the query at a position, for which `work` and `latency` are of it alone."""
        tenant = queue.tenant
        queries: tuple[Query, ...] = (queue.queries[at],)
        if tenant.max_batch > queries[0].items and len(queue.queries) > at + 1:
            lanes = sum([each.mask & beside == each.mask for each in self.lanes])
            queries, latency = context.form_batch(
                queue, at, lane.size, latency, tail_aware=self.tail_aware, lanes=lanes
            )
            if len(queries) > 1:
                work = tenant.work(work.shape, sum([query.items for query in queries]))
        if self.preempt and len(tenant.cuts) > 2:
            work, latency = self._extent(context.snapshot, tenant, queue.keys[at], work, lane, latency)
        return Start(work, queries, lane, latency)

    def _extent(
        self, snapshot: Snapshot, tenant: Tenant, key: Key, work: Work, lane: Share, remaining_ns: int
    ) -> tuple[Work, int]:
        """How much of the work to run before the next choice, and the predicted latency of that.

        Every boundary costs a little, so the stretch is as long as no query that might arrive meanwhile would miss
        more than its share of slack by waiting for the boundary.
        """
        allowed, cores, name = NEVER_NS if self.slack_share else 0, lane.size, tenant.name
        now, predictor = snapshot.now_ns, snapshot.predictor
        latency_ns = predictor.latency_ns
        for queue in snapshot.queues.values() if allowed else ():
            other = queue.tenant
            if other.name != name and self.arrival_key(other, now, predictor) < key:
                slack = other.slo_ns - latency_ns(other.work(0, 1), cores)
                allowed = min(allowed, max(0, int(slack * self.slack_share)))
        return extent(latency_ns, tenant, work, cores, remaining_ns, allowed)
