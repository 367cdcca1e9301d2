"""List scheduling: each free lane gets the candidate with the smallest key.

A candidate is the head of a tenant's queue, or a batch paused at a segment boundary. The policies fcfs, sjf and edf
differ in their keys alone: drop rule, batching, lanes and predictor are the same.
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

_MOST_DEFERRED = 32
"""Most queries that one decision defers because their upper estimate misses the deadline."""


@dataclass(frozen=True, slots=True)
class ListPolicy(BasePolicy):
    """Work-conserving list scheduling over fixed lanes; the base of fcfs, sjf and edf.

    1. Under the drop rule `hopeless`, drop candidates that no share ends by their deadline.
    2. For each free lane, in the order of `lanes`, take the candidate with the smallest key. Under `hopeless`, skip
       candidates that this lane does not end in time.
    3. Batch further queries with it (`DecisionContext.form_batch`).
    4. With `preempt`, run it up to a boundary within `slack_share` of the slack (SLO - own latency) of every more
       urgent arrival. 0 stops at every cut. Without `preempt`, run it to the end of the model.

    - `drop`: when waiting queries are dropped. Under `hopeless`, weights count in overload: see `shedding.deferral`.
    - `tail_aware`: first serve queries that meet their deadline at the upper estimate of latency, then the others.
      Under overload, queries that start at the last possible moment by median are late half of the time. The baselines
      fcfs and sjf are not tail-aware by default.
    - `widen`: the most lanes of one launch, rounded down to a power of two; see `wide.widened`. From 2 on, models are
      loaded once more for each wider share. A query that only a wider share ends in time is admitted. It starts when
      these lanes are free and no other query can start.

    Raises InvalidValueError without lanes, or for a `drop`, `slack_share` or `widen` out of range.
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
        """Key of a paused batch: that of its most urgent query."""
        if len(batch.queries) == 1:
            return self.queue_key(batch.queries[0], batch.tenant, predictor)
        return min([self.queue_key(query, batch.tenant, predictor) for query in batch.queries])

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """Lower bound of the key of a query of this tenant that arrives now: (priority, deadline)."""
        return (self.rank_of(tenant), now_ns + tenant.slo_ns)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Fill the free lanes, smallest key first."""
        only = self._only_start(snapshot, snapshot.free_mask)
        if only is not None:
            return Decision((only,), (), memory)
        context = self._context(snapshot)
        self._fill_lanes(context, snapshot.free_mask)
        return Decision(tuple(context.starts), tuple(context.drops), memory, again_ns=context.again_ns)

    def _only_start(self, snapshot: Snapshot, free: int) -> Start | None:
        """The start of the only candidate, a query or a paused batch, in the first lane of the mask `free`.

        Fast path to the start that `_fill_lanes` would make. None with more candidates, if that lane is too slow, or if
        lanes may be widened.
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
        """Whether the only candidate, which is in time in the first free lane, certainly starts there."""
        return True

    def _context(self, snapshot: Snapshot) -> DecisionContext:
        """The context of a decision, with queries deferred by weight."""
        context = DecisionContext(snapshot, self.drop, self.batch_key)
        if snapshot.weights_differ and context.drops_hopeless:
            deferred = deferred_by_weight(snapshot, context.paused, len(self.lanes), self.lanes[0].size)
            if deferred:
                context.defer(deferred)
        return context

    def _fill_lanes(self, context: DecisionContext, free: int) -> None:
        """Give candidates the lanes inside the mask `free`, then use the rest of it to widen the starts."""
        size, first = 0, len(context.starts)
        for lane in self.lanes:
            mask = lane.mask
            if mask & free == mask:
                if size and lane.size != size:  # a candidate too slow for one size may fit another
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
        """Widen the starts from position `first` on; without any, start a candidate that needs a wide share."""
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
        """The start of a lane; None without a candidate.

        For each candidate, by key: drop it if no share ends it in time. Skip it if this lane is too slow. With
        `tail_aware`, defer it if its upper estimate misses the deadline. Else start it. If none is left, start the
        first deferred one. `beside` is the mask of free slots that this decision may give to other launches.
        """
        now, latency_ns, cores = context.now_ns, context.latency_ns, lane.size
        queries: Sequence[Query]
        while len(context.deferred) < _MOST_DEFERRED and (best := context.best()) is not None:
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
        """Start the batch that begins with the query at a position; `work` and `latency` are those of that query."""
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
        """The part of the work to run before the next choice, and its predicted latency.

        Each boundary costs time, so the segment is as long as `slack_share` allows. The slack is that of every tenant
        with a query that would go first if it arrived now.
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
