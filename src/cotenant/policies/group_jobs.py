"""What may join a group: paused batches, and the batches that waiting queries of a tenant can make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.core.snapshot import BatchView, Drop, QueueView, Snapshot
from cotenant.frozen import quick_init
from cotenant.predict.protocol import Predictor
from cotenant.types import Query, Tenant

NEVER_NS = 1 << 62
_LOOK_AHEAD = 12
"""Waiting queries of a tenant that one decision looks at, to merge them or to find one that suits a group better."""
_OTHERS = 2
"""Queries of other sizes than the head that may join a group in its place."""


@quick_init
@dataclass(frozen=True, slots=True)
class Job:
    """A batch that could run next: `batch` is its number if it has begun, else None.

    `remaining_ns` is its latency alone on the whole device from unit `start` on. `worth_ns` is what its queries cost
    one by one where that is cheapest: on the whole device, or on a share of it while others have the rest. It has to
    end by `deadline_ns`: the earliest deadline of its queries that can be met. The query behind it in its queue has to
    start by `next_start_ns`.
    """

    tenant: Tenant
    queries: tuple[Query, ...]
    batch: int | None
    items: int
    shape: int
    start: int
    remaining_ns: int
    worth_ns: float
    deadline_ns: int
    next_start_ns: int


@quick_init
@dataclass(frozen=True, slots=True)
class Candidate:
    """A paused batch, or a queue from its first query on that can still be in time (at position `at`)."""

    urgency: tuple[int, int, int]
    """(priority, headroom in ns, number of the first query): least first."""
    tenant: str
    source: Any
    at: int
    is_queue: bool
    remaining_ns: int
    """Of the paused batch, or of the first query, alone on the whole device."""


def candidates_of(
    snapshot: Snapshot, begin_ns: int, cores: int, drop_hopeless: bool, heads: int
) -> tuple[list[Candidate], tuple[Drop, ...]]:
    """All candidates for a group that starts at `begin_ns`, most urgent first, and the queries beyond help.

    Batches that run now and will stop at a boundary are candidates from that boundary on. Each of the first `heads`
    queries of a queue that can be in time makes it a candidate.
    """
    latency_ns = snapshot.predictor.latency_ns
    drops: list[Drop] = []
    found: list[Candidate] = []
    paused: list[tuple[BatchView, int]] = [(batch, batch.next_unit) for batch in snapshot.paused]
    paused += [
        (run.batch, run.launch.end) for run in snapshot.running.values() if run.batch.queries and not run.launch.last
    ]
    for batch, start in paused:
        name = batch.tenant.name
        remaining = latency_ns(name, batch.shape, batch.items, start, batch.tenant.cuts[-1], cores)
        if drop_hopeless and begin_ns + remaining > max([query.deadline_ns for query in batch.queries]):
            drops += [_hopeless(remaining, begin_ns, query) for query in batch.queries]
            continue
        rank = min([query.rank for query in batch.queries])
        headroom = _meetable(batch.queries, begin_ns + remaining) - begin_ns - remaining
        found.append(Candidate((rank, headroom, batch.queries[0].id), name, batch, start, False, remaining))
    for name, queue in snapshot.queues.items():
        units = queue.tenant.cuts[-1]
        left = heads
        for at, head in enumerate(queue.queries):
            needed = latency_ns(name, head.shape, head.items, 0, units, cores)
            headroom = head.deadline_ns - begin_ns - needed
            if headroom < 0 and drop_hopeless:
                drops.append(_hopeless(needed, begin_ns, head))
                continue
            found.append(Candidate((head.rank, headroom, head.id), name, queue, at, True, needed))
            left -= 1
            if not left:
                break
    found.sort(key=_urgency)
    return found, tuple(drops)


def jobs_of(candidate: Candidate, begin_ns: int, cores: int, narrow: int, predictor: Predictor) -> tuple[Job, ...]:
    """The ways in which a candidate can join: the smallest batch first, then the largest, then others.

    `cores` is the size of the device, `narrow` that of its smallest share.
    """
    source = candidate.source
    if candidate.is_queue:
        return _queued(source, candidate.at, candidate.remaining_ns, begin_ns, (cores, narrow), predictor)
    tenant, queries = source.tenant, source.queries
    remaining, start = candidate.remaining_ns, candidate.at
    whole = predictor.latency_ns(tenant.name, source.shape, source.items, 0, tenant.cuts[-1], cores)
    worth = sum([_worth(query, tenant, (cores, narrow), predictor) for query in queries]) * remaining / max(whole, 1)
    deadline = _meetable(queries, begin_ns + remaining)
    return (Job(tenant, (), source.id, source.items, source.shape, start, remaining, worth, deadline, NEVER_NS),)


def _queued(
    queue: QueueView, at: int, latency: int, begin_ns: int, sizes: tuple[int, int], predictor: Predictor
) -> tuple[Job, ...]:
    """The head alone, the largest batch that is better than running its queries in turn, and queries of other sizes."""
    tenant, waiting = queue.tenant, queue.queries
    name, units, largest, cores = tenant.name, tenant.cuts[-1], tenant.max_batch, sizes[0]
    head = waiting[at]
    worth = _worth(head, tenant, sizes, predictor)
    if at + 1 == len(waiting):
        return (_single(tenant, head, latency, worth, NEVER_NS),)
    latency_ns = predictor.latency_ns
    first, chosen, items, deadline, whole_worth = latency, [head], head.items, head.deadline_ns, worth
    second_start = next_start = NEVER_NS
    is_growing = True
    others: list[tuple[Query, int]] = []
    for query in waiting[at + 1 : at + _LOOK_AHEAD]:
        is_alike = query.items == head.items and query.shape == head.shape
        alone = first if is_alike else latency_ns(name, query.shape, query.items, 0, units, cores)
        start = query.deadline_ns - alone
        if start < begin_ns:
            continue
        if second_start == NEVER_NS:
            second_start = start
        if not is_alike and len(others) < _OTHERS and query.rank == head.rank and _is_new_kind(query, others):
            others.append((query, alone))
        if is_growing:
            grown = items + query.items
            if grown <= largest and query.shape == head.shape and query.merge_key == head.merge_key:
                together = latency_ns(name, head.shape, grown, 0, units, cores)
                limit = min(deadline, query.deadline_ns)
                if together <= latency + alone and begin_ns + together <= limit:
                    chosen.append(query)
                    items, latency, deadline = grown, together, limit
                    whole_worth += worth if is_alike else _worth(query, tenant, sizes, predictor)
                    continue
            is_growing, next_start = False, start
        elif len(others) == _OTHERS:
            break
    jobs = [_single(tenant, head, first, worth, second_start)]
    if len(chosen) > 1:
        jobs.append(Job(tenant, tuple(chosen), None, items, head.shape, 0, latency, whole_worth, deadline, next_start))
    head_start = head.deadline_ns - first
    jobs += [
        _single(tenant, query, alone, _worth(query, tenant, sizes, predictor), head_start) for query, alone in others
    ]
    return tuple(jobs)


def _single(tenant: Tenant, query: Query, alone: int, worth: float, next_start: int) -> Job:
    return Job(tenant, (query,), None, query.items, query.shape, 0, alone, worth, query.deadline_ns, next_start)


def _is_new_kind(query: Query, others: list[tuple[Query, int]]) -> bool:
    return all(query.items != other.items or query.shape != other.shape for other, _ in others)


def _urgency(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.urgency


def _worth(query: Query, tenant: Tenant, sizes: tuple[int, int], predictor: Predictor) -> float:
    """Device time that the query costs alone, at its cheapest: on the whole device or on the smallest share."""
    whole, narrow = sizes
    units = tenant.cuts[-1]
    wide = predictor.latency_ns(tenant.name, query.shape, query.items, 0, units, whole)
    if narrow == whole:
        return float(wide)
    slim = predictor.latency_ns(tenant.name, query.shape, query.items, 0, units, narrow)
    return min(float(wide), slim * narrow / whole)


def _meetable(queries: Sequence[Query], end_ns: int) -> int:
    """The earliest deadline that is not before `end_ns`, else the latest one."""
    if len(queries) == 1:
        return queries[0].deadline_ns
    possible = [query.deadline_ns for query in queries if query.deadline_ns >= end_ns]
    return min(possible) if possible else max([query.deadline_ns for query in queries])


def _hopeless(needed_ns: int, begin_ns: int, query: Query) -> Drop:
    left_ns = query.deadline_ns - begin_ns
    return Drop(query.id, f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left_ns / 1e6:.1f} ms to the deadline")
