"""Deferral by weight: under overload, list policies serve queries of less weight for their work after all others.

The algorithm is that of `jobs`, by the policy's keys, with weight over work as the value. The lanes count as one lane
of `lanes` times the speed; the last job of a prefix takes the time of one lane.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from cotenant.core.snapshot import BatchView, Snapshot
from cotenant.policies.decision_context import Key


class WeightedJob(NamedTuple):
    """Waiting work: its key, its time on one lane, deadline, weight, and queries."""

    key: Key
    work_ns: int
    deadline_ns: int
    weight: float
    queries: tuple[int, ...]


def deferred(jobs: list[WeightedJob], lanes: int, now_ns: int, busy_ns: int) -> frozenset[int]:
    """Queries to defer so that queries of larger weight can be in time. `busy_ns` is the sum over lanes of the
    predicted time until the lane is free."""
    begin_ns = now_ns + busy_ns / lanes
    kept: list[tuple[float, Key, WeightedJob]] = []
    out: set[int] = set()
    for job in sorted(jobs):
        heappush(kept, (job.weight / job.work_ns, job.key, job))
        share_ns = job.work_ns / lanes
        begin_ns += share_ns
        while begin_ns - share_ns + job.work_ns > job.deadline_ns:
            victim = heappop(kept)[2]
            begin_ns -= victim.work_ns / lanes
            out.update(victim.queries)
            if victim is job:
                break
    return frozenset(out)


def deferred_by_weight(
    snapshot: Snapshot, paused: list[tuple[Key, int, BatchView]], lanes: int, cores: int
) -> frozenset[int]:
    """Queries to defer among waiting queries and paused batches; none if all weights are equal.

    Queries that no lane of `cores` cores ends in time are ignored.
    """
    weights = {queue.tenant.weight for queue in snapshot.queues.values() if queue.queries}
    weights.update([batch.tenant.weight for batch in snapshot.paused])
    if len(weights) < 2:
        return frozenset()
    now, latency_ns, jobs = snapshot.now_ns, snapshot.predictor.latency_ns, list[WeightedJob]()
    for queue in snapshot.queues.values():
        tenant = queue.tenant
        for key, query in zip(queue.keys, queue.queries, strict=True):
            work_ns = latency_ns(tenant.work(query.shape, query.items), cores)
            jobs.append(WeightedJob(key, work_ns, query.deadline_ns, tenant.weight, (query.id,)))
    for key, _, batch in paused:
        work_ns = latency_ns(batch.tenant.work(batch.shape, batch.items, batch.next_unit), cores)
        numbers, deadline_ns = tuple([each.id for each in batch.queries]), min([q.deadline_ns for q in batch.queries])
        jobs.append(WeightedJob(key, work_ns, deadline_ns, batch.tenant.weight * len(numbers), numbers))
    busy_ns = sum([max(0, run.started_ns + run.launch.predicted_ns - now) for run in snapshot.running.values()])
    return deferred([job for job in jobs if now + job.work_ns <= job.deadline_ns], lanes, now, busy_ns)
