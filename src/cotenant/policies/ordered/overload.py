"""Whom to make wait under overload, where tenants differ in weight.

After the rule of Moore and Hodgson for the fewest late jobs (Moore, 1968): jobs are laid end to end in the policy's
order, and whenever one would be late, jobs are taken out, those with the least weight per work first. What is left can
be in time and should weigh as much as possible. For jobs of equal length that is the optimum; in general a heuristic.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from cotenant.core.snapshot import BatchView, QueueView, Snapshot
from cotenant.policies.desk import Key


class WeightedJob(NamedTuple):
    """Work that waits: its place in the policy's order, what it needs of one partition, and whose it is."""

    key: Key
    work_ns: int
    deadline_ns: int
    weight: float
    queries: tuple[int, ...]


def outweighed(jobs: list[WeightedJob], lanes: int, now_ns: int, busy_ns: int) -> frozenset[int]:
    """Queries that have to stand back so that those of larger weight can be in time.

    `busy_ns` is the predicted time for which the `lanes` partitions together are taken already. Jobs are spread over
    them as if they were one that is `lanes` times as fast, except that each job ends at single speed.
    """
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


def differ_in_weight(snapshot: Snapshot) -> bool:
    """Whether tenants that wait now have different weights; where they have not, nobody stands back for another."""
    weights = {queue.tenant.weight for queue in snapshot.queues.values() if queue.queries}
    weights.update([batch.tenant.weight for batch in snapshot.paused])
    return len(weights) > 1


def waiting_jobs(snapshot: Snapshot, paused: list[tuple[Key, int, BatchView]], cores: int) -> list[WeightedJob]:
    """Waiting queries, and the paused batches of the desk, as jobs; without those that cannot be in time anyway."""
    predictor = snapshot.predictor
    jobs = [job for queue in snapshot.queues.values() for job in _queued(snapshot, queue, cores)]
    for key, _, batch in paused:
        tenant = batch.tenant
        work = predictor.latency_ns(tenant.work(batch.shape, batch.items, batch.next_unit), cores)
        numbers = tuple([query.id for query in batch.queries])
        deadline = min([query.deadline_ns for query in batch.queries])
        jobs.append(WeightedJob(key, work, deadline, tenant.weight * len(numbers), numbers))
    return [job for job in jobs if snapshot.now_ns + job.work_ns <= job.deadline_ns]


def busy_ns(snapshot: Snapshot) -> int:
    """Predicted time that the launches under way still take, all together."""
    now = snapshot.now_ns
    return sum([max(0, run.started_ns + run.launch.predicted_ns - now) for run in snapshot.running.values()])


def _queued(snapshot: Snapshot, queue: QueueView, cores: int) -> list[WeightedJob]:
    tenant, latency_ns = queue.tenant, snapshot.predictor.latency_ns
    return [
        WeightedJob(
            key,
            latency_ns(tenant.work(query.shape, query.items), cores),
            query.deadline_ns,
            tenant.weight,
            (query.id,),
        )
        for key, query in zip(queue.keys, queue.queries, strict=True)
    ]
