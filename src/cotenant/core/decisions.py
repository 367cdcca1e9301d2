"""Whether a decision can be carried out: all of it is looked at before any of it is booked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from cotenant.core.lifecycle import BatchState, QueryState
from cotenant.core.queues import Batch, Live, TenantQueue, are_mergeable
from cotenant.core.snapshot import Decision, Start

_QUEUED, _PAUSED = QueryState.QUEUED, BatchState.PAUSED


def fault_of(
    decision: Decision,
    live: Mapping[int, Live],
    batches: Mapping[int, Batch],
    served: Mapping[str, TenantQueue],
    free_mask: int,
) -> str | None:
    """What a policy does wrong in this decision, as the rest of a sentence; None when nothing is."""
    gone: set[int] = set()
    for drop in decision.drops:
        if drop.query not in live or drop.query in gone:
            return f"drops query {drop.query}, which is not live"
        gone.add(drop.query)
    resumed: tuple[int, ...] = ()
    for start in decision.starts:
        work, mask, number = start.work, start.share.mask, start.batch
        if mask & free_mask != mask:
            return f"launches on cores {start.share.cores}, not all free"
        free_mask &= ~mask
        if number is None:
            fault = _new_batch_fault(start, live, served, gone)
            if fault is not None:
                return fault
            tenant, head = served[work.tenant].tenant, start.queries[0]
            rows, begin, shape = sum([query.items for query in start.queries]), 0, head.shape
        else:
            batch = batches.get(number)
            if batch is None or batch.state is not _PAUSED or number in resumed:
                return f"resumes batch {number}, which is not paused"
            if gone and all(query.id in gone for query in batch.queries):
                return f"resumes batch {number}, of which it drops every query"
            resumed += (number,)
            tenant = batch.tenant
            rows, begin, shape = batch.items, batch.next_unit, batch.shape
        if work.tenant != tenant.name or work.items != rows or work.start != begin or work.shape != shape:
            return f"starts {work}, expected {rows} rows of {tenant.name!r} at shape {shape} from unit {begin} on"
        end, cuts = work.end, tenant.cuts
        if end <= work.start or (end != cuts[-1] and (end > cuts[-1] or cuts[bisect_left(cuts, end)] != end)):
            return f"ends a segment of {tenant.name!r} at unit {end}"
    return None


def _new_batch_fault(
    start: Start, live: Mapping[int, Live], served: Mapping[str, TenantQueue], gone: set[int]
) -> str | None:
    """As `fault_of`, of one new batch. Its queries are gone then."""
    queue, queries = served.get(start.work.tenant), start.queries
    if queue is None or not queries:
        return "starts an empty batch, or one of nobody"
    if len(queries) > 1 and not are_mergeable(queue.tenant, queries):
        text = f"differ in shape or key, or have more than {queue.tenant.max_batch} rows"
        return f"merges queries of {start.work.tenant!r} that {text}"
    for query in queries:
        known = live.get(query.id)
        if known is None or known.state is not _QUEUED or query.id in gone or query.tenant != start.work.tenant:
            return f"launches query {query.id}, which is not waiting"
        gone.add(query.id)
    return None
