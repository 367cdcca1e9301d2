"""Dynamic batching bounded by headroom: how many waiting queries of a tenant to launch together."""

from __future__ import annotations

from collections.abc import Collection

from cotenant.core.snapshot import QueueView, Snapshot
from cotenant.types import Query


def form_batch(
    snapshot: Snapshot,
    queue: QueueView,
    head_at: int,
    taken: Collection[int],
    cores: int,
    latency: int,
    *,
    skip_hopeless: bool,
    cautious: bool = False,
) -> tuple[tuple[Query, ...], int]:
    """Choose the batch that is headed by the query at position `head_at`; give it and its predicted latency.

    A further query joins, in queue order, while the batch stays within `max_batch` rows and is predicted to end no
    later than it would take to run its queries in turn, by the deadline of each member that could meet it if launched
    alone, and early enough for the head of every other queue and for every paused batch. `taken` are queries promised
    to another launch; `latency` is the predicted latency of the head alone. With `skip_hopeless`, queries that
    could not be in time even alone stay out; a `cautious` batch is sure to end by then.
    """
    tenant, predictor, now = queue.tenant, snapshot.predictor, snapshot.now_ns
    name = tenant.name
    head = queue.queries[head_at]
    chosen, items, serial, first = [head], head.items, latency, latency
    limit = _latest_end_ns(snapshot, name, cores)
    if now + latency <= head.deadline_ns:
        limit = min(limit, head.deadline_ns)
    for at in range(head_at + 1, len(queue.queries)):
        query = queue.queries[at]
        if query.merge_key != head.merge_key or query.shape != head.shape or query.id in taken:
            continue
        grown = items + query.items
        if grown > tenant.max_batch:
            break
        alone = (
            first if query.items == head.items else predictor.latency_ns(tenant.work(head.shape, query.items), cores)
        )
        in_time = now + alone <= query.deadline_ns
        if skip_hopeless and not in_time:
            continue
        together = predictor.latency_ns(tenant.work(head.shape, grown), cores)
        if in_time:
            limit = min(limit, query.deadline_ns)
        end_ns = now + (predictor.sure_ns(name, together) if cautious else together)
        if together > serial + alone or end_ns > limit:
            break
        chosen.append(query)
        items, latency, serial = grown, together, serial + alone
    return tuple(chosen), latency


_NEVER = 1 << 62


def _latest_end_ns(snapshot: Snapshot, chosen: str, cores: int) -> int:
    """When the partition is needed by the most urgent of those who wait and can still be in time."""
    predictor, now = snapshot.predictor, snapshot.now_ns
    latest = _NEVER
    for name, queue in snapshot.queues.items():
        if name != chosen and queue.queries:
            head = queue.queries[0]
            needed = predictor.latency_ns(queue.tenant.work(head.shape, head.items), cores)
            begin = head.deadline_ns - needed
            if now <= begin < latest:
                latest = begin
    for batch in snapshot.paused:
        needed = predictor.latency_ns(batch.tenant.work(batch.shape, batch.items, batch.next_unit), cores)
        begin = min([query.deadline_ns for query in batch.queries]) - needed
        if now <= begin < latest:
            latest = begin
    return latest
