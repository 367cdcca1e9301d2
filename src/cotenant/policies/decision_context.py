"""The books of one decision: what waits, what is given away, how long work takes, and who is beyond help."""

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
"""A waiting query: its queue, and where it stands there."""
SlackShare = Annotated[float, Meta(ge=0, le=1)]
"""A share of the slack of a query that might arrive."""
NEVER_NS = 1 << 62
WORTH_MERGING = 0.7
"""Of its latency alone that a query may cost a batch which it joins. Up to there batches raise answers in time; from
0.85 on they cost some, since all of a batch wait for its last row (docs/decisions/0044-batches-that-pay.md)."""
LAUNCH_NS = 300_000
"""What a launch costs beside the model, which a query that joins saves: 220 to 300 us in the benchmark `fidelity`."""
MOST_AT_ONCE = 300
"""Queries that one decision gives up, about: each costs the engine 10 us, and all events wait for a decision."""
_HOPELESS = DropRule.HOPELESS
_NOBODY: frozenset[int] = frozenset()


def quickest_ns(latency_ns: Callable[[Work, int], int], work: Work, sizes: Sequence[int]) -> int:
    """Predicted latency of work in a share of that of these sizes which is quickest for it."""
    if len(sizes) == 1:
        return latency_ns(work, sizes[0])
    return min([latency_ns(work, size) for size in sizes])


def extent(
    latency_ns: Callable[[Work, int], int], tenant: Tenant, work: Work, size: int, needed_ns: int, allowed_ns: int
) -> tuple[Work, int]:
    """How much of the work to run, and its latency: all of it if that is allowed, else up to the last cut that it
    reaches in the time allowed, and to the first one at least."""
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

    Candidates are the heads of queues, and paused batches where `batch_key` gives them keys. What is passed over is no
    candidate until `reset`, but may join a batch; of that, what is `deferred` is given by `next_deferred` before.
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
        """Queries that have been given away, or given up."""
        self.deferred: list[QueuePosition] = []
        self.paused: list[tuple[Key, int, BatchView]] = []
        """Candidates with their keys and numbers, the best one last."""
        if batch_key is not None and snapshot.paused:
            predictor = snapshot.predictor
            self.paused = [(batch_key(batch, predictor), batch.id, batch) for batch in snapshot.paused]
            self.paused.sort(reverse=True)
        self._aside: list[tuple[Key, int, BatchView]] = []
        """Paused batches that are no candidates."""
        self._hopeless = 0
        """Queries that were given up since they are hopeless."""
        self.again_ns = 0
        """When to decide again: at once where this decision gave up as many as one may, else 0."""
        self._passed: set[int] = set()
        self._back = self._held = _NOBODY
        self._heads: dict[str, int] = {}
        """Positions of the heads that are not in front; the length of the queue when all of it is gone."""

    # --- candidates -----------------------------------------------------------------------------------------------

    def best(self) -> BatchView | QueuePosition | None:
        """The best paused batch or the best head, by the policy's keys; a paused batch wins a tie. None when there is
        none, or so many have been found hopeless that the next decision has to go on."""
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
        self._held = _NOBODY
        return self.best()

    def assign(self, start: Start) -> None:
        """Give away what a start launches: waiting queries, or the best paused batch."""
        queries: Sequence[Query] = start.queries or self.paused.pop()[2].queries
        self.taken.update([query.id for query in queries])
        if start.queries:
            self.head_at(self.snapshot.queues[start.work.tenant])

    def skip(self, best: BatchView | QueuePosition, *, deferred: bool = False) -> None:
        """Pass over what `best` gave; a query may be put off."""
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
        """The first query that was put off and has not been given away since; None when there is none."""
        while self.deferred:
            queue, at = self.deferred.pop(0)
            if queue.queries[at].id not in self.taken:
                return queue, at
        return None

    def defer(self, numbers: frozenset[int]) -> None:
        """The queries of these numbers are candidates only when there are no others."""
        self._back = self._held = numbers
        self._skip_only(set(numbers))

    def reset(self) -> None:
        """Make all that was passed over candidates again."""
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
        """The position of the head; the length of the queue when all of it is gone."""
        name = queue.tenant.name
        at = self._heads[name] = self._next(queue, self._heads.get(name, 0))
        return at

    def waiting(self, queue: QueueView) -> Iterator[tuple[int, Query]]:
        """The queries, with their positions, that have not been given away when their turn comes."""
        queries, taken = queue.queries, self.taken
        for at in range(self.head_at(queue), len(queries)):
            if (query := queries[at]).id not in taken:
                yield at, query

    def behind(self, queue: QueueView, at: int) -> Iterator[Query]:
        """Those behind the query at a position that may share a launch with it and have not been given away."""
        queries, taken, head = queue.queries, self.taken, queue.queries[at]
        for later in range(at + 1, len(queries)):
            query = queries[later]
            if query.merge_key == head.merge_key and query.shape == head.shape and query.id not in taken:
                yield query

    def _next(self, queue: QueueView, at: int) -> int:
        """The first position from this one on whose query is neither given away nor passed over."""
        waiting, taken, passed = queue.queries, self.taken, self._passed
        while at < len(waiting) and ((number := waiting[at].id) in taken or number in passed):
            at += 1
        return at

    # --- who is beyond help ---------------------------------------------------------------------------------------

    def drop(self, queries: Sequence[Query], reason: str) -> None:
        """Give queries up."""
        self.taken.update([query.id for query in queries])
        self.drops += [Drop(query.id, reason) for query in queries]

    def shed(self, drops: Mapping[int, Drop]) -> None:
        """Give up queries, by number, wherever they are."""
        self.taken.update(drops)
        self.drops += drops.values()
        self._skip_only(self._passed)

    def drop_hopeless(self, queries: Sequence[Query], work: Work, sizes: Sequence[int], left_ns: int) -> bool:
        """Give up the queries of work that a share of none of these sizes ends in the time left; whether it did."""
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
        """Choose the batch that is headed by the query at a position; give it and its predicted latency.

        A further query joins, in queue order, while the batch stays within `max_batch` rows, takes no more for it than
        the part WORTH_MERGING of its latency alone (and what a launch costs beside), and is predicted to end by the
        deadline of each member that could meet it if launched alone, and early enough for the head of every other queue
        and for every paused batch. Where what is hopeless is dropped, queries that could not be in time even alone stay
        out. While so many `lanes` beside this one are free, queries that would leave
        them without work stay out: waiting queries are spread over all lanes. `latency` is the predicted latency of the
        head alone. A `tail_aware` batch meets the deadline at its upper estimate.
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
            grown = items + query.items
            if grown > tenant.max_batch:
                break
            alone = first if query.items == head.items else latency_ns(tenant.work(head.shape, query.items), cores)
            in_time = now + alone <= query.deadline_ns
            if skips and not in_time:
                continue
            together = latency_ns(tenant.work(head.shape, grown), cores)
            if in_time:
                limit = min(limit, query.deadline_ns)
            takes = self.snapshot.predictor.upper_ns(tenant.name, together, tenant.slo_ns) if tail_aware else together
            if together > latency + WORTH_MERGING * alone + LAUNCH_NS or now + takes > limit:
                break
            chosen.append(query)
            items, latency = grown, together
        return tuple(chosen), latency

    def _most_together(self, lanes: int) -> int:
        """Queries of a batch at most, so that those that wait are enough for so many further lanes."""
        waiting = sum([len(queue.queries) for queue in self.snapshot.queues.values()]) - len(self.taken)
        return -(-(waiting + len(self.paused)) // (lanes + 1))

    def _latest_end_ns(self, chosen: str, cores: int) -> int:
        """When the partition is needed by the most urgent of those who wait and can still be in time."""
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
