"""List scheduling: free lanes are given to the candidate with the smallest key.

A candidate is the head of a tenant's queue or a batch paused at a segment boundary. Policies of this family differ in
their keys alone: fcfs, sjf and edf get the same drop rule, batching, lanes and predictor, so that they compare fairly.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, Decision, Drop, DropRule, QueueView, Snapshot, Start
from cotenant.errors import InvalidValueError
from cotenant.policies.batching import form_batch
from cotenant.policies.candidates import Candidates, Key, Stretch
from cotenant.policies.ordered.overload import busy_ns, differ_in_weight, outweighed, waiting_jobs
from cotenant.types import Query, Tenant
from cotenant.work import Share, Work

_HOPELESS = DropRule.HOPELESS
_MOST_DOUBTFUL = 32
"""Doubtful queries that one decision passes over; where there are so many, what is behind them hardly helps."""


@dataclass(frozen=True, slots=True)
class ListPolicy:
    """Work-conserving list scheduling over fixed lanes; the base of fcfs, sjf and edf.

    `lanes`: partitions, each of which runs one launch at a time; the first is filled first.
    `drop`: when waiting queries are given up.
    `preempt`: stop at segment boundaries and choose again; else every batch runs to its end once it has begun.
    `stretch`: with `preempt`, how much of the slack (SLO less own latency) of a query that might arrive and go first
    one launch may use up before it reaches a boundary. 0 stops at every cut.
    `cautious`: serve waiting queries that are sure to be in time first, with what the predictor's margin adds to their
    latencies, and doubtful ones where there are no others. Under overload that is everything: whoever starts queries
    at the last moment at which they are predicted to be in time is late with half of them.

    Under the drop rule `hopeless`, weights count in overload: see `overload.outweighed`. A query is hopeless when no
    lane is quick enough; one that is too slow for it leaves it to others.

    Raises InvalidValueError when there is no lane, `drop` is not a DropRule or `stretch` is not a share.
    """

    lanes: tuple[Share, ...]
    drop: DropRule = DropRule.HOPELESS
    preempt: bool = False
    stretch: Stretch = 0.1
    cautious: bool = False
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Sizes in cores of the lanes, each once."""

    name: ClassVar[str] = "list"
    grouped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.lanes:
            raise InvalidValueError(f"policy {self.name!r}", "lanes", self.lanes, "at least one partition")
        if not isinstance(self.drop, DropRule):
            raise InvalidValueError(f"policy {self.name!r}", "drop", self.drop, "a DropRule")
        if not 0 <= self.stretch <= 1:
            raise InvalidValueError(f"policy {self.name!r}", "stretch", self.stretch, "a share from 0 to 1")
        object.__setattr__(self, "sizes", tuple(dict.fromkeys(lane.size for lane in self.lanes)))

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares that launches may get: the lanes."""
        return self.lanes

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """Order of a waiting query; smallest first, unique."""
        raise TypeError(f"{type(self).__name__} has no order of its own")

    def batch_key(self, batch: BatchView, predictor: Predictor) -> Key:
        """Order of a paused batch among the candidates: that of its most urgent query."""
        if len(batch.queries) == 1:
            return self.queue_key(batch.queries[0], batch.tenant, predictor)
        return min([self.queue_key(query, batch.tenant, predictor) for query in batch.queries])

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """The smallest key that a query of this tenant could have if it arrived now."""
        raise TypeError(f"{type(self).__name__} has no order of its own")

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Fill the free lanes, most urgent candidate first."""
        candidates = Candidates(snapshot, self.batch_key)
        if snapshot.weights_differ and self.drop is _HOPELESS and differ_in_weight(snapshot):
            lane = self.lanes[0]
            jobs = waiting_jobs(snapshot, candidates.paused_keys, lane.size)
            candidates.hold_back(outweighed(jobs, len(self.lanes), snapshot.now_ns, busy_ns(snapshot)))
        starts: list[Start] = []
        drops: list[Drop] = []
        free = snapshot.free_mask
        size = 0
        for lane in self.lanes:
            mask = lane.mask
            if mask & free == mask:
                if size and lane.size != size:  # who does not fit into one may fit into another
                    candidates.bring_back()
                size = lane.size
                start = self._fill(candidates, lane, drops)
                if start is not None:
                    starts.append(start)
                    free &= ~mask
                elif len(self.sizes) == 1:
                    break
        return Decision(tuple(starts), tuple(drops), memory)

    def _fill(self, candidates: Candidates, lane: Share, drops: list[Drop]) -> Start | None:
        """Start the best candidate that is not hopeless; give up those before it that are.

        What is doubtful is put off, and taken when nothing else is left; what needs another lane is passed over.
        """
        snapshot, cores = candidates.snapshot, lane.size
        predictor, now = snapshot.predictor, snapshot.now_ns
        drop_hopeless = self.drop is _HOPELESS
        while len(candidates.put_off) < _MOST_DOUBTFUL and (best := candidates.best()) is not None:
            if isinstance(best, tuple):
                queue, at = best
                head, tenant = queue.queries[at], queue.tenant
                work = tenant.work(head.shape, head.items)
                needed = predictor.latency_ns(work, cores)
                if drop_hopeless and now + needed > head.deadline_ns:
                    left = head.deadline_ns - now
                    least = self._least_ns(predictor, work, needed)
                    if least > left:
                        drops.append(Drop(head.id, _hopeless(least, left)))
                        candidates.take(queue, (head,))
                    else:
                        candidates.pass_over(queue, at)
                    continue
                if self.cautious and now + predictor.sure_ns(tenant.name, needed) > head.deadline_ns:
                    candidates.pass_over(queue, at, put_off=True)
                    continue
                return self._start_batch(candidates, queue, at, lane, work, needed)
            tenant = best.tenant
            work = tenant.work(best.shape, best.items, best.next_unit)
            needed = predictor.latency_ns(work, cores)
            if drop_hopeless:
                left = max([query.deadline_ns for query in best.queries]) - now
                if needed > left:
                    least = self._least_ns(predictor, work, needed)
                    if least > left:
                        drops.extend([Drop(query.id, _hopeless(least, left)) for query in best.queries])
                        candidates.take_batch()
                    else:
                        candidates.pass_over_batch()
                    continue
            key = candidates.take_batch()
            work, latency = self._extent(snapshot, tenant, key, work, lane, needed)
            return Start(work, (), lane, latency, best.id)
        doubtful = candidates.next_put_off()
        if doubtful is None:
            return None
        queue, at = doubtful
        head, tenant = queue.queries[at], queue.tenant
        work = tenant.work(head.shape, head.items)
        return self._start_batch(candidates, queue, at, lane, work, predictor.latency_ns(work, cores))

    def _least_ns(self, predictor: Predictor, work: Work, needed: int) -> int:
        """Predicted latency in the quickest lane; `needed` in the one at hand."""
        if len(self.sizes) == 1:
            return needed
        return min([predictor.latency_ns(work, size) for size in self.sizes])

    def _start_batch(
        self, candidates: Candidates, queue: QueueView, at: int, lane: Share, work: Work, latency: int
    ) -> Start:
        """Start the batch that is headed by the query at a position, for which `work` and `latency` are of it alone."""
        snapshot, tenant = candidates.snapshot, queue.tenant
        queries: tuple[Query, ...] = (queue.queries[at],)
        if tenant.max_batch > queries[0].items and len(queue.queries) > at + 1:
            queries, latency = form_batch(
                *(snapshot, queue, at, candidates.taken, lane.size, latency),
                skip_hopeless=self.drop is _HOPELESS,
                cautious=self.cautious,
            )
            if len(queries) > 1:
                work = tenant.work(work.shape, sum([query.items for query in queries]))
        candidates.take(queue, queries)
        if self.preempt and len(tenant.cuts) > 2:
            work, latency = self._extent(snapshot, tenant, queue.keys[at], work, lane, latency)
        return Start(work, queries, lane, latency)

    def _extent(
        self, snapshot: Snapshot, tenant: Tenant, key: Key, work: Work, lane: Share, remaining_ns: int
    ) -> tuple[Work, int]:
        """How much of the work to run before the next choice, and the predicted latency of that.

        Every boundary costs a little, so the stretch is as long as no query that might arrive meanwhile would miss
        more than its share of slack by waiting for the boundary.
        """
        cuts, predictor = tenant.cuts, snapshot.predictor
        allowed = self._allowed_ns(snapshot, tenant, key, lane.size)
        if allowed is None or remaining_ns <= allowed:
            return work, remaining_ns
        low, high = bisect_right(cuts, work.start), len(cuts) - 1
        made = work.until(cuts[low])
        latency = predictor.latency_ns(made, lane.size)
        low += 1
        while allowed and low < high:
            middle = (low + high) // 2
            longer = work.until(cuts[middle])
            reach = predictor.latency_ns(longer, lane.size)
            if reach <= allowed:
                made, latency, low = longer, reach, middle + 1
            else:
                high = middle
        return made, latency

    def _allowed_ns(self, snapshot: Snapshot, chosen: Tenant, key: Key, cores: int) -> int | None:
        """Longest stretch that is fair to those who might arrive and go first; None when nobody could."""
        if self.stretch == 0:
            return 0
        allowed: int | None = None
        predictor, now = snapshot.predictor, snapshot.now_ns
        for name, queue in snapshot.queues.items():
            other = queue.tenant
            if name != chosen.name and self.arrival_key(other, now, predictor) < key:
                slack = other.slo_ns - predictor.latency_ns(other.work(0, 1), cores)
                share = max(0, int(slack * self.stretch))
                allowed = share if allowed is None else min(allowed, share)
        return allowed


def _hopeless(needed_ns: int, left_ns: int) -> str:
    return f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left_ns / 1e6:.1f} ms to the deadline"
