"""State of one decision: candidates, assigned queries, batches, and dropped queries."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from cotenant.core.admission import hopeless
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, Drop, DropRule, QueueView, Snapshot, Start
from cotenant.types import Query, Tenant
from cotenant.work import Work

Key = tuple[int, ...]
QueuePosition = tuple[QueueView, int]
"""A waiting query: its queue and its position there."""
SlackShare = Annotated[float, Meta(ge=0, le=1)]
"""Share of the slack of a possible later arrival, from 0 to 1."""
NEVER_NS = 1 << 62
MOST_MERGE_COST = 0.7
"""Time that a query may add to a batch, relative to its latency alone (docs/decisions/0044-batches-that-pay.md)."""
LAUNCH_NS = 300_000
"""Overhead of a launch in ns, which a query that joins a batch saves; measured by the benchmark `fidelity`."""
MOST_AT_ONCE = 300
"""Queries that one decision drops at most, approximately: bounds the time of a decision."""
_HOPELESS = DropRule.HOPELESS
_NO_QUERIES: frozenset[int] = frozenset()


def quickest_ns(latency_ns: Callable[[Work, int], int], work: Work, sizes: Sequence[int]) -> int:
    """Shortest predicted latency of work over shares of these sizes."""
    if len(sizes) == 1:
        return latency_ns(work, sizes[0])
    return min([latency_ns(work, size) for size in sizes])


def extent(
    latency_ns: Callable[[Work, int], int], tenant: Tenant, work: Work, size: int, needed_ns: int, allowed_ns: int
) -> tuple[Work, int]:
    """The longest prefix of the work that takes at most `allowed_ns`, and its latency; by binary search over cuts. At
    least up to the first cut."""
    if needed_ns <= allowed_ns:
        return work, needed_ns
    cuts = tenant.cuts
    low, high = bisect_right(cuts, work.start), len(cuts) - 1
    made = work.until(cuts[low])
    latency = latency_ns(made, size)
    low += 1
    while allowed_ns and low < high:
        middle = (low + high) // 2
        longer = work.until(cuts[middle])
        reach = latency_ns(longer, size)
        if reach <= allowed_ns:
            made, latency, low = longer, reach, middle + 1
        else:
            high = middle
    return made, latency


class DecisionContext:
    """Local state of one call of `decide`. Never outlives the call.

    Candidates are the heads of queues, and paused batches if `batch_key` is given. Skipped candidates are none until
    `reset`, but their queries may join a batch. `next_deferred` returns skipped queries that were marked `deferred`.
    """

    def __init__(
        self, snapshot: Snapshot, drop: DropRule, batch_key: Callable[[BatchView, Predictor], Key] | None = None
    ) -> None:
        self.snapshot = snapshot
        self.now_ns = snapshot.now_ns
        self.latency_ns = snapshot.predictor.latency_ns
        self.drops_hopeless = drop is _HOPELESS
        self.starts: list[Start] = []
        self.drops: list[Drop] = []
        self.taken: set[int] = set()
        """Numbers of queries that were assigned or dropped."""
        self.deferred: list[QueuePosition] = []
        self.paused: list[tuple[Key, int, BatchView]] = []
        """Paused batches that are candidates, as (key, number, batch), the best one last."""
        if batch_key is not None and snapshot.paused:
            predictor = snapshot.predictor
            self.paused = [(batch_key(batch, predictor), batch.id, batch) for batch in snapshot.paused]
            self.paused.sort(reverse=True)
        self._aside: list[tuple[Key, int, BatchView]] = []
        """Paused batches that are skipped."""
        self._hopeless = 0
        """Number of queries dropped as hopeless."""
        self.again_ns = 0
        """Time of the next decision: at once if this one dropped MOST_AT_ONCE queries, else 0."""
        self._passed: set[int] = set()
        self._back = self._held = _NO_QUERIES
        self._heads: dict[str, int] = {}
        """Positions of heads that are not at the front; the queue's length if no candidate is left."""

    # --- candidates -----------------------------------------------------------------------------------------------

    def best(self) -> BatchView | QueuePosition | None:
        """The candidate with the smallest key; a paused batch wins a tie. None without candidates, or after
        MOST_AT_ONCE hopeless queries: then the next decision continues."""
        if self.again_ns:
            return None
        heads = self._heads
        best_key: Key | None = None
        best_queue: QueueView | None = None
        position = at = 0
        for name, queue in self.snapshot.queues.items():
            keys = queue.keys
            if heads and (at := heads.get(name, 0)) == len(keys):
                continue
            if keys and (best_key is None or keys[at] < best_key):
                best_key, best_queue, position = keys[at], queue, at
        if self.paused and (best_key is None or self.paused[-1][0] <= best_key):
            return self.paused[-1][2]
        if best_queue is not None:
            return best_queue, position
        if not self._held:
            return None
        self._skip_only(self._passed - self._held)
        self._held = _NO_QUERIES
        return self.best()

    def assign(self, start: Start) -> None:
        """Assign a start's waiting queries, or the best paused batch: they are no candidates any more."""
        queries: Sequence[Query] = start.queries or self.paused.pop()[2].queries
        self.taken.update([query.id for query in queries])
        if start.queries:
            self.head_at(self.snapshot.queues[start.work.tenant])

    def skip(self, best: BatchView | QueuePosition, *, deferred: bool = False) -> None:
        """Skip the candidate that `best` returned; a `deferred` query comes back by `next_deferred`."""
        if not isinstance(best, tuple):
            self._passed.update([query.id for query in best.queries])
            self._aside.append(self.paused.pop())
            return
        queue, at = best
        self._passed.add(queue.queries[at].id)
        self.head_at(queue)
        if deferred:
            self.deferred.append(best)

    def next_deferred(self) -> QueuePosition | None:
        """The first deferred query that is not assigned; None when there is none."""
        while self.deferred:
            queue, at = self.deferred.pop(0)
            if queue.queries[at].id not in self.taken:
                return queue, at
        return None

    def defer(self, numbers: frozenset[int]) -> None:
        """Make the queries of these numbers candidates only after all others."""
        self._back = self._held = numbers
        self._skip_only(set(numbers))

    def reset(self) -> None:
        """Make all skipped candidates candidates again."""
        if self._passed:
            self.deferred.clear()
            self._held = self._back
            self._skip_only(set(self._back))

    def _skip_only(self, numbers: set[int]) -> None:
        self._passed, gone, heads = numbers, numbers | self.taken, dict[str, int]()
        for name, queue in self.snapshot.queues.items():
            if queue.queries and queue.queries[0].id in gone:
                heads[name] = self._next(queue, 1)
        self._heads = heads
        every = sorted([*self.paused, *self._aside], reverse=True)
        self._aside = [entry for entry in every if all(query.id in gone for query in entry[2].queries)]
        self.paused = [entry for entry in every if entry not in self._aside]

    # --- queues ---------------------------------------------------------------------------------------------------

    def head_at(self, queue: QueueView) -> int:
        """The position of the queue's head; the queue's length if no candidate is left."""
        name = queue.tenant.name
        at = self._heads[name] = self._next(queue, self._heads.get(name, 0))
        return at

    def waiting(self, queue: QueueView) -> Iterator[tuple[int, Query]]:
        """Positions and queries that are not assigned at the time of the iteration."""
        queries, taken = queue.queries, self.taken
        for at in range(self.head_at(queue), len(queries)):
            if (query := queries[at]).id not in taken:
                yield at, query

    def behind(self, queue: QueueView, at: int) -> Iterator[Query]:
        """Unassigned queries after a position that may merge with the query there."""
        queries, taken, head = queue.queries, self.taken, queue.queries[at]
        for later in range(at + 1, len(queries)):
            query = queries[later]
            if query.merge_key == head.merge_key and query.shape == head.shape and query.id not in taken:
                yield query

    def _next(self, queue: QueueView, at: int) -> int:
        """The first position, from `at` on, of a query that is neither assigned nor skipped."""
        waiting, taken, passed = queue.queries, self.taken, self._passed
        while at < len(waiting) and ((number := waiting[at].id) in taken or number in passed):
            at += 1
        return at

    # --- drops ----------------------------------------------------------------------------------------------------

    def drop(self, queries: Sequence[Query], reason: str) -> None:
        """Drop queries."""
        self.taken.update([query.id for query in queries])
        self.drops += [Drop(query.id, reason) for query in queries]

    def shed(self, drops: Mapping[int, Drop]) -> None:
        """Drop queries by number, waiting or in paused batches."""
        self.taken.update(drops)
        self.drops += drops.values()
        self._skip_only(self._passed)

    def drop_hopeless(self, queries: Sequence[Query], work: Work, sizes: Sequence[int], left_ns: int) -> bool:
        """Drop the queries of work that no share of these sizes ends in `left_ns`. Whether it dropped them."""
        needed = quickest_ns(self.latency_ns, work, sizes)
        if needed > left_ns:
            self.drop(queries, hopeless(needed, left_ns))
            self._hopeless += len(queries)
            if self._hopeless >= MOST_AT_ONCE:
                self.again_ns = self.now_ns + 1
        return needed > left_ns

    # --- what to launch -------------------------------------------------------------------------------------------

    def form_batch(
        self, queue: QueueView, at: int, cores: int, latency: int, *, tail_aware: bool = False, lanes: int = 0
    ) -> tuple[tuple[Query, ...], int]:
        """Choose the batch that starts with the query at a position; returns it with its predicted latency.

        Go through the later queries in queue order. A query joins if:

        1. it has the same shape and merge key, and the batch stays within `max_batch` rows;
        2. it is in time alone, if hopeless queries are dropped;
        3. it adds at most MOST_MERGE_COST of its latency alone, plus LAUNCH_NS;
        4. the batch ends by the deadline of each member that is in time alone, and early enough for other queue heads
           and paused batches. A `tail_aware` batch is checked at the upper estimate.

        Stop at the first query that fails 3 or 4, or when the other waiting queries are just enough for the `lanes`
        further free lanes. `latency` is the predicted latency of the first query alone.
        """
        tenant, now, latency_ns = queue.tenant, self.now_ns, self.latency_ns
        skips, taken = self.drops_hopeless, self.taken
        head = queue.queries[at]
        chosen, items, first = [head], head.items, latency
        most = self._most_together(lanes) if lanes else len(queue.queries)
        limit = self._latest_end_ns(tenant.name, cores)
        if now + latency <= head.deadline_ns:
            limit = min(limit, head.deadline_ns)
        for later in range(at + 1, len(queue.queries)):
            if len(chosen) >= most:
                break
            query = queue.queries[later]
            if query.merge_key != head.merge_key or query.shape != head.shape or query.id in taken:
                continue
            rows = items + query.items
            if rows > tenant.max_batch:
                break
            alone = first if query.items == head.items else latency_ns(tenant.work(head.shape, query.items), cores)
            in_time = now + alone <= query.deadline_ns
            if skips and not in_time:
                continue
            together = latency_ns(tenant.work(head.shape, rows), cores)
            if in_time:
                limit = min(limit, query.deadline_ns)
            takes = self.snapshot.predictor.upper_ns(tenant.name, together, tenant.slo_ns) if tail_aware else together
            if together > latency + MOST_MERGE_COST * alone + LAUNCH_NS or now + takes > limit:
                break
            chosen.append(query)
            items, latency = rows, together
        return tuple(chosen), latency

    def _most_together(self, lanes: int) -> int:
        """Most queries of a batch, so that the waiting queries suffice for `lanes` further lanes."""
        waiting = sum([len(queue.queries) for queue in self.snapshot.queues.values()]) - len(self.taken)
        return -(-(waiting + len(self.paused)) // (lanes + 1))

    def _latest_end_ns(self, chosen: str, cores: int) -> int:
        """Latest end of a launch, so that the most urgent other queue head or paused batch can still be in time."""
        now, latency_ns, latest = self.now_ns, self.latency_ns, NEVER_NS
        for name, queue in self.snapshot.queues.items():
            if name != chosen and queue.queries:
                head = queue.queries[0]
                begin = head.deadline_ns - latency_ns(queue.tenant.work(head.shape, head.items), cores)
                if now <= begin < latest:
                    latest = begin
        for batch in self.snapshot.paused:
            needed = latency_ns(batch.tenant.work(batch.shape, batch.items, batch.next_unit), cores)
            begin = min([query.deadline_ns for query in batch.queries]) - needed
            if now <= begin < latest:
                latest = begin
        return latest
