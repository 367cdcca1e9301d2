"""The jobs that may join a group: paused batches, and batches of waiting queries."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from cotenant.core.admission import hopeless
from cotenant.core.predictor import GroupPredictor, Predictor
from cotenant.core.snapshot import BatchView, Drop, Snapshot
from cotenant.policies.decision_context import NEVER_NS
from cotenant.types import Query, Tenant

_LOOK_AHEAD = 12
"""Waiting queries of a tenant that one decision considers."""
_OTHERS = 2
"""Queries of other sizes than the head that may join a group in its place, at most."""


_new = tuple.__new__  # what GroupJob(...) does, in half the time


class GroupJob(NamedTuple):
    """A possible member of a group: units [start, end) of waiting queries, or of the paused batch `batch` (with no
    `queries`).

    - `remaining_ns`: latency alone on the whole device from unit `start` to the last.
    - `value_ns`: weight of the tenant times the least device time of its queries one by one, for these units.
    - `latest_ns`: latest end at which the rest can meet the earliest deadline that can be met; NEVER_NS if none can.
    - `next_start_ns`: latest start of the query behind it in its queue; NEVER_NS if there is none, or it is late
      anyway.
    """

    first: int
    """`first` of its candidate."""
    tenant: Tenant
    queries: tuple[Query, ...]
    batch: int | None
    items: int
    shape: int
    start: int
    end: int
    remaining_ns: int
    value_ns: float
    latest_ns: int
    next_start_ns: int


class Candidate(NamedTuple):
    """A paused batch, or a queue from its first query on that can be in time (at position `at`).

    If the policy sheds no query, it may be overdue, with a negative headroom. Ascending order is descending urgency; no
    two have the same first three fields.
    """

    rank: int
    headroom_ns: int
    first: int
    """Number of the first query, a unique key."""
    tenant: str
    source: Any
    at: int
    is_queue: bool
    remaining_ns: int
    """Latency of the paused batch or the first query, alone on the whole device."""


class GroupCandidates(NamedTuple):
    """The candidates of one decision."""

    candidates: list[Candidate]
    """The most urgent first."""
    hopeless: tuple[Drop, ...]
    """Queries that cannot meet their deadlines."""
    slack_ns: int
    """The least slack of all tenants: SLO less latency of one row on the whole device."""


def waiting_at(
    snapshot: Snapshot, begin_ns: int, cores: int, drop_hopeless: bool, predictor: GroupPredictor
) -> GroupCandidates:
    """All candidates for a group that starts at `begin_ns`, and the hopeless queries.

    A running batch that stops at a boundary is a candidate from there on. A queue starts at its first query that can be
    in time, or at its head if no query is shed.
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
        # The earliest deadline that can be met, else the latest.
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
    """The same queue from the next query on that can be in time, or is overdue as this one; None if there is none."""
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
    """The uncut jobs of a candidate: its largest batch, and if it leads the group its first query alone.

    A candidate that does not lead also offers queries of other sizes, which may fit better. `sizes` are the cores of
    the device and of its smallest share.
    """
    if candidate.is_queue:
        return _queued(candidate, leads, begin_ns, sizes, predictor)
    cores = sizes[0]
    source = candidate.source
    tenant, queries, units = source.tenant, source.queries, source.tenant.cuts[-1]
    remaining, start = candidate.remaining_ns, candidate.at
    whole = predictor.latency_ns(tenant.work(source.shape, source.items), cores)
    value, kind, each = 0.0, (0, -1), 0.0
    for query in queries:
        if kind != (query.items, query.shape):  # mostly the same for all
            kind = query.items, query.shape
            each = _value_ns(query, tenant, _alone_ns(query, tenant, cores, predictor), sizes, predictor)
        value += each
    value *= remaining / max(whole, 1)
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
        value_ns=value,
        latest_ns=begin_ns + remaining + headroom if headroom >= 0 else NEVER_NS,
        next_start_ns=NEVER_NS,
    )
    return (job,)


def _queued(
    candidate: Candidate, leads: bool, begin_ns: int, sizes: tuple[int, int], predictor: GroupPredictor
) -> tuple[GroupJob, ...]:
    """Jobs of a queue. The largest batch is one that is faster than its queries in turn."""
    _, headroom, first, name, queue, at, _, alone = candidate
    tenant, waiting = queue.tenant, queue.queries
    head = waiting[at]
    behind = waiting[at + 1 : at + _LOOK_AHEAD]
    value = _value_ns(head, tenant, alone, sizes, predictor)
    if not behind:
        return (_single(first, tenant, head, alone, value, begin_ns, NEVER_NS),)
    second_start = behind[0].deadline_ns - alone
    if not queue.are_alike or headroom < 0 or second_start < begin_ns:
        return _mixed(candidate, leads, value, begin_ns, sizes, predictor)
    # Queries are in order of deadlines: the first has the earliest.
    items, shape, deadline = head.items, head.shape, head.deadline_ns
    most = len(behind) + 1
    merged = predictor.merged_ns(name, shape, items, tenant.max_batch // items, sizes[0])
    count = min(bisect_right(merged, deadline - begin_ns), most)
    if count < 2:
        return (_single(first, tenant, head, alone, value, begin_ns, second_start),)
    next_start = NEVER_NS if count == most else behind[count - 1].deadline_ns - alone
    queries, rows, units = (head, *behind[: count - 1]), count * items, tenant.cuts[-1]
    latency = merged[count - 1]
    made = (first, tenant, queries, None, rows, shape, 0, units, latency, count * value, deadline, next_start)
    whole = _new(GroupJob, made)
    return (whole, _single(first, tenant, head, alone, value, begin_ns, second_start)) if leads else (whole,)


def _mixed(
    candidate: Candidate, leads: bool, value: float, begin_ns: int, sizes: tuple[int, int], predictor: Predictor
) -> tuple[GroupJob, ...]:
    """As `_queued`, for queries of several sizes, merge keys or priorities, or with hopeless ones.

    If the head is overdue, other overdue queries may join it, without a deadline. `DecisionContext.form_batch` is not
    used: this pass also finds queries that fit no batch of the head, and the start of the next batch.
    """
    _, headroom, number, _, queue, at, _, latency = candidate
    tenant, waiting = queue.tenant, queue.queries
    units, largest, cores = tenant.cuts[-1], tenant.max_batch, sizes[0]
    head = waiting[at]
    head_items, shape, key = head.items, head.shape, head.merge_key
    latency_ns = predictor.latency_ns
    first, items, whole_value = latency, head_items, value
    deadline = head.deadline_ns if headroom >= 0 else NEVER_NS
    chosen = [head]
    second_start = next_start = NEVER_NS
    is_merging = True
    others: list[tuple[Query, int]] = []
    for query in waiting[at + 1 : at + _LOOK_AHEAD]:
        is_alike = query.items == head_items and query.shape == shape
        if not is_merging:
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
        if is_merging:
            merged_items = items + query.items
            if merged_items <= largest and query.shape == shape and query.merge_key == key:
                together = latency_ns(tenant.work(shape, merged_items), cores)
                if deadline < limit:
                    limit = deadline
                if together <= latency + alone and begin_ns + together <= limit:
                    chosen.append(query)
                    items, latency, deadline = merged_items, together, limit
                    whole_value += value if is_alike else _value_ns(query, tenant, alone, sizes, predictor)
                    continue
            is_merging, next_start = False, start
    jobs: list[GroupJob] = []
    if len(chosen) > 1:
        queries = tuple(chosen)
        whole = (number, tenant, queries, None, items, shape, 0, units, latency, whole_value, deadline, next_start)
        jobs.append(_new(GroupJob, whole))
    if leads or not jobs:
        jobs.append(_single(number, tenant, head, first, value, begin_ns, second_start))
    if not leads:
        head_start = head.deadline_ns - first
        if head_start < begin_ns:
            head_start = NEVER_NS
        for query, alone in others:
            value = _value_ns(query, tenant, alone, sizes, predictor)
            jobs.append(_single(number, tenant, query, alone, value, begin_ns, head_start))
    return tuple(jobs)


def _single(
    first: int, tenant: Tenant, query: Query, alone: int, value: float, begin_ns: int, next_start: int
) -> GroupJob:
    rows, units, deadline = query.items, tenant.cuts[-1], query.deadline_ns
    latest = deadline if begin_ns + alone <= deadline else NEVER_NS
    made = (first, tenant, (query,), None, rows, query.shape, 0, units, alone, value, latest, next_start)
    return _new(GroupJob, made)


def _is_new_kind(query: Query, others: list[tuple[Query, int]]) -> bool:
    return all(query.items != other.items or query.shape != other.shape for other, _ in others)


def _alone_ns(query: Query, tenant: Tenant, cores: int, predictor: Predictor) -> int:
    return predictor.latency_ns(tenant.work(query.shape, query.items), cores)


def _value_ns(query: Query, tenant: Tenant, alone: int, sizes: tuple[int, int], predictor: Predictor) -> float:
    """Least device time of the query alone, on the whole device (`alone`) or the smallest share, times the tenant's
    weight."""
    whole, narrow = sizes
    if narrow == whole:
        return alone * tenant.weight
    on_share = _alone_ns(query, tenant, narrow, predictor) * narrow / whole
    return (alone if alone < on_share else on_share) * tenant.weight
