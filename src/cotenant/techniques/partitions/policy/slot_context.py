"""Decision context of rounds: forms launches of one batch, alone in their share."""

from __future__ import annotations

from cotenant.core.snapshot import BatchView, DropRule, QueueView, Snapshot, Start
from cotenant.policies.decision_context import NEVER_NS, DecisionContext, extent
from cotenant.types import Tenant
from cotenant.work import Share, Work


class SlotContext(DecisionContext):
    """Decision context of `duty_cycle`: queries taken in this decision, paused batches, and batches for a slot."""

    def __init__(self, snapshot: Snapshot, drop: DropRule) -> None:
        super().__init__(snapshot, drop)
        self._stopped = {batch.id: batch for batch in snapshot.paused}

    def needed(self, work: Work, share: Share) -> int:
        """Predicted latency in ns without co-runners."""
        return self.latency_ns(work, share.size)

    def whole_rows(self, queue: QueueView, at: int, most: int) -> int:
        """Rows of the full batch that begins with the head, if more rows wait than it takes; 0 if all fit into it."""
        rows = queue.queries[at].items
        for query in self.behind(queue, at):
            if rows + query.items > most:
                return rows
            rows += query.items
        return 0

    def start_batch(self, queue: QueueView, at: int, most: int, share: Share, spare: int, allowed: int) -> Start:
        """Launch the query at a position, with the queries behind it that join without making the head late.

        The batch takes at most `spare` ns, apart from its head; a launch longer than `allowed` ns ends at a cut. The
        slot is reserved, so rows join whether or not they save time, unlike in `form_batch`. Rows leave the batch again
        if its head would be late.
        """
        tenant, head, now = queue.tenant, queue.queries[at], self.now_ns
        chosen, rows, limit = [head], head.items, NEVER_NS
        needed = self.needed(tenant.work(head.shape, rows), share)
        for query in self.behind(queue, at) if rows < most else ():
            if rows + query.items > most:
                break
            longer = self.needed(tenant.work(head.shape, rows + query.items), share)
            if self.drops_hopeless and now + longer > query.deadline_ns:
                continue  # becomes a head later, or is hopeless
            if now + longer > limit or longer > spare:
                break
            chosen.append(query)
            rows, needed = rows + query.items, longer
            limit = min(limit, query.deadline_ns) if self.drops_hopeless else limit
        while len(chosen) > 1 and self.drops_hopeless and now + needed > head.deadline_ns:
            rows -= chosen.pop().items
            needed = self.needed(tenant.work(head.shape, rows), share)
        self.taken.update([query.id for query in chosen])
        work, needed = extent(self.latency_ns, tenant, tenant.work(head.shape, rows), share.size, needed, allowed)
        return Start(work, tuple(chosen), share, needed)

    def paused_of(self, tenant: str) -> BatchView | None:
        """The paused batch of a tenant, if it was not resumed in this decision."""
        if not self._stopped:
            return None
        return next((batch for batch in self._stopped.values() if batch.tenant.name == tenant), None)

    def resume(self, batch: BatchView, share: Share, sizes: tuple[int, ...], allowed: int) -> Start | None:
        """Resume a batch, up to a cut if it takes longer than `allowed` ns; None if it was hopeless in shares of all
        these sizes and is dropped."""
        del self._stopped[batch.id]
        tenant: Tenant = batch.tenant
        work = tenant.work(batch.shape, batch.items, batch.next_unit)
        needed = self.needed(work, share)
        left = max([query.deadline_ns for query in batch.queries]) - self.now_ns
        if self.drops_hopeless and needed > left and self.drop_hopeless(batch.queries, work, sizes, left):
            return None
        work, needed = extent(self.latency_ns, tenant, work, share.size, needed, allowed)
        return Start(work, (), share, needed, batch.id)
