"""What may join a group: paused batches, and the batches that waiting queries of a tenant can make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cotenant.core.snapshot import BatchView, Drop, QueueView, Snapshot
from cotenant.predict.protocol import Predictor
from cotenant.types import Query, Tenant

NEVER_NS = 1 << 62
_LOOK_AHEAD = 12
"""Waiting queries of a tenant that one decision looks at, to merge them or to find one that suits a group better."""
_OTHERS = 2
"""Queries of other sizes than the head that may join a group in its place."""


_new = tuple.__new__  # what Job(...) does, in half the time


class Job(NamedTuple):
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


class Candidate(NamedTuple):
    """A paused batch, or a queue from its first query on that can still be in time (at position `at`).

    In ascending order the most urgent comes first; no two have the same first three fields.
    """

    rank: int
    headroom_ns: int
    first: int
    """Number of the first query."""
    tenant: str
    source: Any
    at: int
    is_queue: bool
    remaining_ns: int
    """Of the paused batch, or of the first query, alone on the whole device."""


class Waiting(NamedTuple):
    """What waits, as a decision sees it."""

    candidates: list[Candidate]
    """Most urgent first."""
    hopeless: tuple[Drop, ...]
    """Queries beyond help."""
    slack_ns: int
    """The least slack of a tenant, whether he waits or not: SLO less latency of one row on the whole device."""


def waiting_at(snapshot: Snapshot, begin_ns: int, cores: int, drop_hopeless: bool, heads: int) -> Waiting:
    """All candidates for a group that starts at `begin_ns`, and the queries beyond help.

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
        found.append(Candidate(rank, headroom, batch.queries[0].id, name, batch, start, False, remaining))
    slack = NEVER_NS
    for name, queue in snapshot.queues.items():
        tenant = queue.tenant
        units = tenant.cuts[-1]
        one = latency_ns(name, 0, 1, 0, units, cores)
        if tenant.slo_ns - one < slack:
            slack = tenant.slo_ns - one
        left = heads
        for at, head in enumerate(queue.queries):
            is_one = head.items == 1 and not head.shape
            needed = one if is_one else latency_ns(name, head.shape, head.items, 0, units, cores)
            headroom = head.deadline_ns - begin_ns - needed
            if headroom < 0 and drop_hopeless:
                drops.append(_hopeless(needed, begin_ns, head))
                continue
            found.append(_new(Candidate, (head.rank, headroom, head.id, name, queue, at, True, needed)))
            left -= 1
            if not left:
                break
    found.sort()
    return Waiting(found, tuple(drops), slack if snapshot.queues else 0)


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
    worths = [
        _worth(query, tenant, _alone_ns(query, tenant, cores, predictor), (cores, narrow), predictor)
        for query in queries
    ]
    worth = sum(worths) * remaining / max(whole, 1)
    deadline = _meetable(queries, begin_ns + remaining)
    return (Job(tenant, (), source.id, source.items, source.shape, start, remaining, worth, deadline, NEVER_NS),)


def _queued(
    queue: QueueView, at: int, latency: int, begin_ns: int, sizes: tuple[int, int], predictor: Predictor
) -> tuple[Job, ...]:
    """The head alone, the largest batch that is better than running its queries in turn, and queries of other sizes."""
    tenant, waiting = queue.tenant, queue.queries
    name, units, largest, cores = tenant.name, tenant.cuts[-1], tenant.max_batch, sizes[0]
    head = waiting[at]
    worth = _worth(head, tenant, latency, sizes, predictor)
    head_items, shape, key = head.items, head.shape, head.merge_key
    latency_ns = predictor.latency_ns
    first, items, deadline, whole_worth = latency, head_items, head.deadline_ns, worth
    chosen = [head]
    second_start = next_start = NEVER_NS
    is_growing = True
    others: list[tuple[Query, int]] = []
    for query in waiting[at + 1 : at + _LOOK_AHEAD]:
        is_alike = query.items == head_items and query.shape == shape
        if not is_growing:
            if is_alike:
                continue
            if len(others) == _OTHERS:
                break
        alone = first if is_alike else latency_ns(name, query.shape, query.items, 0, units, cores)
        limit = query.deadline_ns
        start = limit - alone
        if start < begin_ns:
            continue
        if second_start == NEVER_NS:
            second_start = start
        if not is_alike and len(others) < _OTHERS and query.rank == head.rank and _is_new_kind(query, others):
            others.append((query, alone))
        if is_growing:
            grown = items + query.items
            if grown <= largest and query.shape == shape and query.merge_key == key:
                together = latency_ns(name, shape, grown, 0, units, cores)
                if deadline < limit:
                    limit = deadline
                if together <= latency + alone and begin_ns + together <= limit:
                    chosen.append(query)
                    items, latency, deadline = grown, together, limit
                    whole_worth += worth if is_alike else _worth(query, tenant, alone, sizes, predictor)
                    continue
            is_growing, next_start = False, start
    jobs = [_single(tenant, head, first, worth, second_start)]
    if len(chosen) > 1:
        whole = (tenant, tuple(chosen), None, items, shape, 0, latency, whole_worth, deadline, next_start)
        jobs.append(_new(Job, whole))
    if others:
        head_start = head.deadline_ns - first
        jobs += [
            _single(tenant, query, alone, _worth(query, tenant, alone, sizes, predictor), head_start)
            for query, alone in others
        ]
    return tuple(jobs)


def _single(tenant: Tenant, query: Query, alone: int, worth: float, next_start: int) -> Job:
    return _new(
        Job,
        (tenant, (query,), None, query.items, query.shape, 0, alone, worth, query.deadline_ns, next_start),
    )


def _is_new_kind(query: Query, others: list[tuple[Query, int]]) -> bool:
    return all(query.items != other.items or query.shape != other.shape for other, _ in others)


def _alone_ns(query: Query, tenant: Tenant, cores: int, predictor: Predictor) -> int:
    return predictor.latency_ns(tenant.name, query.shape, query.items, 0, tenant.cuts[-1], cores)


def _worth(query: Query, tenant: Tenant, alone: int, sizes: tuple[int, int], predictor: Predictor) -> float:
    """Device time that the query costs alone, at its cheapest: on the whole device (`alone`) or the smallest share."""
    whole, narrow = sizes
    if narrow == whole:
        return float(alone)
    return min(float(alone), _alone_ns(query, tenant, narrow, predictor) * narrow / whole)


def _meetable(queries: Sequence[Query], end_ns: int) -> int:
    """The earliest deadline that is not before `end_ns`, else the latest one."""
    if len(queries) == 1:
        return queries[0].deadline_ns
    possible = [query.deadline_ns for query in queries if query.deadline_ns >= end_ns]
    return min(possible) if possible else max([query.deadline_ns for query in queries])


def _hopeless(needed_ns: int, begin_ns: int, query: Query) -> Drop:
    left_ns = query.deadline_ns - begin_ns
    return Drop(query.id, f"hopeless: {needed_ns / 1e6:.1f} ms of work left, {left_ns / 1e6:.1f} ms to the deadline")
