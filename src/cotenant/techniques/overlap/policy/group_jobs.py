"""What may join a group: paused batches, and the batches that waiting queries of a tenant can make."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from cotenant.core.admission import hopeless
from cotenant.core.predictor import GroupPredictor, Predictor
from cotenant.core.snapshot import BatchView, Drop, Snapshot
from cotenant.policies.decision_context import NEVER_NS
from cotenant.types import Query, Tenant

_LOOK_AHEAD = 12
"""Waiting queries of a tenant that one decision looks at, to merge them or to find one that suits a group better."""
_OTHERS = 2
"""Queries of other sizes than the head that may join a group in its place."""


_new = tuple.__new__  # what GroupJob(...) does, in half the time


class GroupJob(NamedTuple):
    """A launch that could be a member of a group: units [start, end) of a batch of queries that wait, or of batch
    `batch` if it has begun (then `queries` is empty).

    `remaining_ns` is its latency alone on the whole device from unit `start` to the last. `worth_ns` is what it gets
    done: what its queries cost one by one where that is cheapest, on the whole device or on a share of it while others
    have the rest, times the weight of the tenant. It has to end by `latest_ns`, so that what remains of it can be in
    time for the earliest deadline of its queries that can be met; NEVER_NS if none can. The query behind it in its
    queue has to start by `next_start_ns`; NEVER_NS if there is none, or it is too late for it anyway.
    """

    first: int
    """Of the candidate."""
    tenant: Tenant
    queries: tuple[Query, ...]
    batch: int | None
    items: int
    shape: int
    start: int
    end: int
    remaining_ns: int
    worth_ns: float
    latest_ns: int
    next_start_ns: int


class Candidate(NamedTuple):
    """A paused batch, or a queue from a query on that can still be in time (at position `at`).

    Where nobody is given up it may be overdue: then its headroom is negative. In ascending order the most urgent comes
    first; no two have the same first three fields.
    """

    rank: int
    headroom_ns: int
    first: int
    """Number of the first query: no other candidate has the same."""
    tenant: str
    source: Any
    at: int
    is_queue: bool
    remaining_ns: int
    """Of the paused batch, or of the first query, alone on the whole device."""


class GroupCandidates(NamedTuple):
    """What waits, as a decision sees it."""

    candidates: list[Candidate]
    """Most urgent first."""
    hopeless: tuple[Drop, ...]
    """Queries beyond help."""
    slack_ns: int
    """The least slack of a tenant, whether he waits or not: SLO less latency of one row on the whole device."""


def waiting_at(
    snapshot: Snapshot, begin_ns: int, cores: int, drop_hopeless: bool, predictor: GroupPredictor
) -> GroupCandidates:
    """All candidates for a group that starts at `begin_ns`, and the queries beyond help.

    Batches that run now and will stop at a boundary are candidates from that boundary on; a queue is one from its first
    query on that can be in time, or from its first query on where nobody is given up.
    """
    latency_ns = predictor.latency_ns
    drops: list[Drop] = []
    found: list[Candidate] = []
    paused: list[tuple[BatchView, int]] = [(batch, batch.next_unit) for batch in snapshot.paused]
    running = snapshot.running.values()
    paused += [(run.batch, run.launch.work.end) for run in running if run.batch.queries and not run.launch.last]
    for batch, start in paused:
        tenant, queries = batch.tenant, batch.queries
        remaining = latency_ns(tenant.work(batch.shape, batch.items, start), cores)
        end = begin_ns + remaining
        # Of the deadlines the earliest that can be met, else the latest.
        meetable, latest = NEVER_NS, 0
        for query in queries:
            deadline = query.deadline_ns
            if end <= deadline < meetable:
                meetable = deadline
            if deadline > latest:
                latest = deadline
        if meetable == NEVER_NS:
            if drop_hopeless:
                drops += [Drop(each.id, hopeless(remaining, each.deadline_ns - begin_ns)) for each in queries]
                continue
            meetable = latest
        found.append(Candidate(tenant.rank, meetable - end, queries[0].id, tenant.name, batch, start, False, remaining))
    singles = predictor.singles_ns(cores)
    slack = NEVER_NS
    for name, queue in snapshot.queues.items():
        one = singles[name]
        spare = queue.tenant.slo_ns - one
        if spare < slack:
            slack = spare
        for at, head in enumerate(queue.queries):
            if head.items == 1 and not head.shape:
                needed = one
            else:
                needed = latency_ns(queue.tenant.work(head.shape, head.items), cores)
            headroom = head.deadline_ns - begin_ns - needed
            if headroom >= 0 or not drop_hopeless:
                found.append(_new(Candidate, (queue.tenant.rank, headroom, head.id, name, queue, at, True, needed)))
                break
            drops.append(Drop(head.id, hopeless(needed, headroom + needed)))
    found.sort()
    return GroupCandidates(found, tuple(drops), slack if snapshot.queues else 0)


def next_of(candidate: Candidate, begin_ns: int, cores: int, predictor: Predictor) -> Candidate | None:
    """The same queue from the next query on that can be in time, or is overdue as this one is; None if none is."""
    _, before, _, name, queue, at, _, remaining = candidate
    waiting, tenant, are_alike = queue.queries, queue.tenant, queue.are_alike
    for behind in range(at + 1, len(waiting)):
        query = waiting[behind]
        needed = remaining if are_alike else predictor.latency_ns(tenant.work(query.shape, query.items), cores)
        headroom = query.deadline_ns - begin_ns - needed
        if headroom >= 0 or before < 0:
            return _new(Candidate, (tenant.rank, headroom, query.id, name, queue, behind, True, needed))
    return None


def jobs_of(
    candidate: Candidate, leads: bool, begin_ns: int, sizes: tuple[int, int], predictor: GroupPredictor
) -> tuple[GroupJob, ...]:
    """The ways in which a candidate can join, whole: the largest batch, and the first query alone if it leads a group.

    If it does not, there are queries of other sizes besides, which may suit the leader better. `sizes` are those of the
    device and of its smallest share.
    """
    if candidate.is_queue:
        return _queued(candidate, leads, begin_ns, sizes, predictor)
    cores = sizes[0]
    source = candidate.source
    tenant, queries, units = source.tenant, source.queries, source.tenant.cuts[-1]
    remaining, start = candidate.remaining_ns, candidate.at
    whole = predictor.latency_ns(tenant.work(source.shape, source.items), cores)
    worth, kind, each = 0.0, (0, -1), 0.0
    for query in queries:
        if kind != (query.items, query.shape):  # as a rule they are alike
            kind = query.items, query.shape
            each = _worth(query, tenant, _alone_ns(query, tenant, cores, predictor), sizes, predictor)
        worth += each
    worth *= remaining / max(whole, 1)
    headroom = candidate.headroom_ns
    job = GroupJob(
        first=candidate.first,
        tenant=tenant,
        queries=(),
        batch=source.id,
        items=source.items,
        shape=source.shape,
        start=start,
        end=units,
        remaining_ns=remaining,
        worth_ns=worth,
        latest_ns=begin_ns + remaining + headroom if headroom >= 0 else NEVER_NS,
        next_start_ns=NEVER_NS,
    )
    return (job,)


def _queued(
    candidate: Candidate, leads: bool, begin_ns: int, sizes: tuple[int, int], predictor: GroupPredictor
) -> tuple[GroupJob, ...]:
    """The largest batch is one that is better than running its queries in turn."""
    _, headroom, first, name, queue, at, _, alone = candidate
    tenant, waiting = queue.tenant, queue.queries
    head = waiting[at]
    behind = waiting[at + 1 : at + _LOOK_AHEAD]
    worth = _worth(head, tenant, alone, sizes, predictor)
    if not behind:
        return (_single(first, tenant, head, alone, worth, begin_ns, NEVER_NS),)
    second_start = behind[0].deadline_ns - alone
    if not queue.are_alike or headroom < 0 or second_start < begin_ns:
        return _mixed(candidate, leads, worth, begin_ns, sizes, predictor)
    # They stand in the order of their deadlines: the first one's is the least.
    items, shape, deadline = head.items, head.shape, head.deadline_ns
    most = len(behind) + 1
    merged = predictor.merged_ns(name, shape, items, tenant.max_batch // items, sizes[0])
    count = min(bisect_right(merged, deadline - begin_ns), most)
    if count < 2:
        return (_single(first, tenant, head, alone, worth, begin_ns, second_start),)
    next_start = NEVER_NS if count == most else behind[count - 1].deadline_ns - alone
    queries, rows, units = (head, *behind[: count - 1]), count * items, tenant.cuts[-1]
    latency = merged[count - 1]
    made = (first, tenant, queries, None, rows, shape, 0, units, latency, count * worth, deadline, next_start)
    whole = _new(GroupJob, made)
    return (whole, _single(first, tenant, head, alone, worth, begin_ns, second_start)) if leads else (whole,)


def _mixed(
    candidate: Candidate, leads: bool, worth: float, begin_ns: int, sizes: tuple[int, int], predictor: Predictor
) -> tuple[GroupJob, ...]:
    """As `_queued`, for queries of several sizes, keys or ranks, or some that nothing can help any more.

    Behind a head that is overdue those that are, too, join like others; they have no deadline left to miss. Not
    `Desk.form_batch`: the same pass finds the queries that no batch of the head takes, and when the next one begins.
    """
    _, headroom, number, _, queue, at, _, latency = candidate
    tenant, waiting = queue.tenant, queue.queries
    units, largest, cores = tenant.cuts[-1], tenant.max_batch, sizes[0]
    head = waiting[at]
    head_items, shape, key = head.items, head.shape, head.merge_key
    latency_ns = predictor.latency_ns
    first, items, whole_worth = latency, head_items, worth
    deadline = head.deadline_ns if headroom >= 0 else NEVER_NS
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
        alone = first if is_alike else latency_ns(tenant.work(query.shape, query.items), cores)
        limit = query.deadline_ns
        start = limit - alone
        if start < begin_ns:
            if headroom >= 0:
                continue
            limit = start = NEVER_NS
        if second_start == NEVER_NS:
            second_start = start
        if not is_alike and len(others) < _OTHERS and query.rank == head.rank and _is_new_kind(query, others):
            others.append((query, alone))
        if is_growing:
            grown = items + query.items
            if grown <= largest and query.shape == shape and query.merge_key == key:
                together = latency_ns(tenant.work(shape, grown), cores)
                if deadline < limit:
                    limit = deadline
                if together <= latency + alone and begin_ns + together <= limit:
                    chosen.append(query)
                    items, latency, deadline = grown, together, limit
                    whole_worth += worth if is_alike else _worth(query, tenant, alone, sizes, predictor)
                    continue
            is_growing, next_start = False, start
    jobs: list[GroupJob] = []
    if len(chosen) > 1:
        queries = tuple(chosen)
        whole = (number, tenant, queries, None, items, shape, 0, units, latency, whole_worth, deadline, next_start)
        jobs.append(_new(GroupJob, whole))
    if leads or not jobs:
        jobs.append(_single(number, tenant, head, first, worth, begin_ns, second_start))
    if not leads:
        head_start = head.deadline_ns - first
        if head_start < begin_ns:
            head_start = NEVER_NS
        for query, alone in others:
            worth = _worth(query, tenant, alone, sizes, predictor)
            jobs.append(_single(number, tenant, query, alone, worth, begin_ns, head_start))
    return tuple(jobs)


def _single(
    first: int, tenant: Tenant, query: Query, alone: int, worth: float, begin_ns: int, next_start: int
) -> GroupJob:
    rows, units, deadline = query.items, tenant.cuts[-1], query.deadline_ns
    latest = deadline if begin_ns + alone <= deadline else NEVER_NS
    made = (first, tenant, (query,), None, rows, query.shape, 0, units, alone, worth, latest, next_start)
    return _new(GroupJob, made)


def _is_new_kind(query: Query, others: list[tuple[Query, int]]) -> bool:
    return all(query.items != other.items or query.shape != other.shape for other, _ in others)


def _alone_ns(query: Query, tenant: Tenant, cores: int, predictor: Predictor) -> int:
    return predictor.latency_ns(tenant.work(query.shape, query.items), cores)


def _worth(query: Query, tenant: Tenant, alone: int, sizes: tuple[int, int], predictor: Predictor) -> float:
    """Device time that the query costs alone, at its cheapest, times the weight of its tenant.

    That is on the whole device (`alone`) or on the smallest share.
    """
    whole, narrow = sizes
    if narrow == whole:
        return alone * tenant.weight
    on_share = _alone_ns(query, tenant, narrow, predictor) * narrow / whole
    return (alone if alone < on_share else on_share) * tenant.weight
