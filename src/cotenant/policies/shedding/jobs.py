"""Selection of the jobs to drop: the algorithm of Moore and Hodgson for the fewest late jobs (Moore, 1968).

1. Schedule the jobs in the policy's order, each on the lane that is free first.
2. When a job would be late, remove the job of the least value among those up to it; repeat until it is in time.

On one lane, with the most work as the least value, the result is optimal. With several lanes or other values it is a
heuristic. `FewJobs` processes jobs one by one; `many_jobs.ManyJobs` does the same in columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Protocol, TypeVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import QueueView
from cotenant.policies.shedding.reserve import MOST_WORK_NS, RANKED, Reserve
from cotenant.work import Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Job = tuple[int, int, int, int, int, int, int, int]
"""Rank (smallest first); deadline; number of the query, or below zero that of a batch; virtual deadline (the deadline
where it is out of quota); 1 in quota, else 0; number of queries; number of the tenant; work in ns of a lane."""
RANK, DEADLINE, NUMBER, VIRTUAL_DEADLINE, IN_QUOTA, ANSWERS, OWNER, WORK = range(8)

DEFERRED = 1 << 20
"""Added to the rank of a deferred job: it comes after all that are not."""
FEW = 128
"""Most jobs that are assigned to single lanes; more jobs are scheduled as if the lanes were one."""
_SCANS = 3
"""Victims of one decision that a scan of all jobs finds; heaps find further ones."""
_FADES = 1 - 1 / 64
"""Factor of a tenant's attainment for each of its jobs that is removed."""
Number = TypeVar("Number", "float", "NDArray[np.float64]")


class Value(Protocol):
    """Value of a job, or of columns of jobs, as a sequence in lexicographic order: the least is removed first.

    The order of two jobs of one tenant must not depend on the tenant's attainment, if that is above zero.
    """

    def __call__(
        self, in_quota: Number, attainment: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """Value by the job's quota, work and answers, and by the attainment, weight and rank of its tenant."""


@dataclass(slots=True)
class SelectionValues:
    """Values of jobs in one decision, with attainments, weights and ranks of tenants by their numbers."""

    value: Value
    attainments: list[float]
    weights: Sequence[float]
    ranks: Sequence[int]

    def of(self, job: Job) -> Sequence[float]:
        """The value of a job."""
        _, _, _, _, in_quota, answers, owner, work_ns = job
        return self.value(in_quota, self.attainments[owner], self.weights[owner], self.ranks[owner], work_ns, answers)

    def within_tenant(self, job: Job) -> Sequence[float]:
        """The value of a job at attainment 1: orders the jobs of one tenant, whatever its attainment is."""
        _, _, _, _, in_quota, answers, owner, work_ns = job
        return self.value(in_quota, 1.0, self.weights[owner], self.ranks[owner], work_ns, answers)

    def lost(self, owner: int) -> None:
        """Lower the tenant's attainment for a removed job, which raises the value of its other jobs."""
        self.attainments[owner] *= _FADES


class Candidates:
    """Possible victims of one rank: a heap by value for each tenant, and a heap of the heads of these.

    A victim lowers the attainment of its tenant. That changes the values of the tenant's other jobs, but not their
    order: the tenant's heap remains valid. Outdated entries in the heap of heads are skipped (lazy removal).
    """

    __slots__ = ("_current", "_heads", "_job_at", "_own", "_values")

    def __init__(self, values: SelectionValues, job_at: Callable[[int], Job]) -> None:
        """Empty at first; `job_at` gives a job by its position."""
        self._values, self._job_at = values, job_at
        self._own: dict[int, list[tuple[Sequence[float] | int, int]]] = {}
        """Heaps of (place, position) by tenant."""
        self._heads: list[tuple[Sequence[float], int, int]] = []
        """Value, position and tenant."""
        self._current: dict[int, tuple[Sequence[float], int, int]] = {}
        """The valid entry of `_heads` by tenant."""

    def add(self, jobs: Iterable[tuple[int, Sequence[float] | int, int]]) -> None:
        """Add jobs as (tenant, place, position); places order the jobs of one tenant as `within_tenant` does."""
        own = self._own
        before: dict[int, tuple[Sequence[float] | int, int] | None] = {}
        for owner, place, at in jobs:
            heap = own.get(owner)
            if heap is None:
                heap = own[owner] = []
            before.setdefault(owner, heap[0] if heap else None)
            heappush(heap, (place, at))
        for owner, head in before.items():
            if own[owner][0] is not head:
                self._rank(owner)

    def pop(self) -> int:
        """Remove the job of the least value, the first one of equal jobs, and give its position. Its tenant's
        attainment fades. There must be a job."""
        while True:
            head = heappop(self._heads)
            owner = head[2]
            if self._current.get(owner) is head:
                heap = self._own[owner]
                heappop(heap)
                self._values.lost(owner)
                if heap:
                    self._rank(owner)
                else:
                    del self._current[owner]
                return head[1]

    def _rank(self, owner: int) -> None:
        """Enter the head of a tenant's heap with its present value."""
        at = self._own[owner][0][1]
        head = self._current[owner] = self._values.of(self._job_at(at)), at, owner
        heappush(self._heads, head)


class FewJobs:
    """Jobs of one decision, in the policy's order: a list, of which each job is looked at on its own.

    `free_at` has the times at which the lanes are free.
    """

    __slots__ = ("_free_at", "_now_ns", "jobs")

    def __init__(self, jobs: list[Job], free_at: Sequence[int], now_ns: int) -> None:
        self.jobs, self._free_at, self._now_ns = jobs, free_at, now_ns

    def are_timely(self, *, virtual: bool) -> bool:
        """Whether all jobs meet their deadlines, or virtual ones, on one lane with the speed of all lanes.

        Sufficient: on the real lanes each job begins no later.
        """
        begin, lanes = sum(self._free_at), len(self._free_at)
        limit, work = VIRTUAL_DEADLINE if virtual else DEADLINE, WORK
        for job in self.jobs:
            work_ns = job[work]
            if begin > (job[limit] - work_ns) * lanes:
                return False
            begin += work_ns
        return True

    def hopeless(self) -> list[tuple[int, int, int]]:
        """Remove jobs that would be late even if they were first. Returns for each its number, the time until its end
        and the time to its deadline."""
        now, free_at = self._now_ns, min(self._free_at)
        late = [each for each in self.jobs if free_at + each[WORK] > each[DEADLINE]]
        if late:
            self.jobs = [each for each in self.jobs if free_at + each[WORK] <= each[DEADLINE]]
        return [(each[NUMBER], free_at + each[WORK] - now, each[DEADLINE] - now) for each in late]

    def are_in_quota(self) -> bool:
        """Whether all are in quota."""
        return all(in_quota for _, _, _, _, in_quota, _, _, _ in self.jobs)

    def defer(self, values: SelectionValues, reserve: Reserve | None) -> list[int]:
        """Move jobs out of quota after all others if quotas or expected demand need their time; their numbers."""
        back = self._before_quotas(values)
        if reserve is not None:
            self._before_demand(values, reserve, back)
        if not back:
            return []
        kept, moved = list[Job](), list[Job]()
        for at, job in enumerate(self.jobs):
            if at in back:
                moved.append((job[RANK] + DEFERRED, *job[DEADLINE:]))  # type: ignore[arg-type]
            else:
                kept.append(job)
        self.jobs = kept + moved
        return [job[NUMBER] for job in moved]

    def _before_quotas(self, values: SelectionValues) -> set[int]:
        """Positions of jobs out of quota that jobs in quota need deferred to meet their virtual deadlines.

        The lanes count as one with the speed of all. If the jobs in quota would be late even alone, all jobs out of
        quota before them are deferred. No job is deferred for one of a lower priority.
        """
        begin, lanes = sum(self._free_at), len(self._free_at)
        back = set[int]()
        candidates = list[tuple[Sequence[float], int]]()
        pending = list[int]()
        loose, of_rank = 0, None
        for at, job in enumerate(self.jobs):
            rank, _, _, virtual_deadline_ns, in_quota, _, _, work_ns = job
            if rank != of_rank:
                of_rank, candidates, pending, loose = rank, [], [], 0
            if not in_quota:
                pending.append(at)
                loose += work_ns
            else:
                latest = (virtual_deadline_ns - work_ns) * lanes
                if begin > latest + loose:  # all of them are not enough: there is nothing to choose
                    back.update(pending, [other for _, other in candidates])
                    begin, candidates, pending, loose = begin - loose, [], [], 0
                elif begin > latest:
                    candidates += [(values.of(self.jobs[other]), other) for other in pending]
                    pending = []
                    heapify(candidates)
                    while begin > latest:
                        other = heappop(candidates)[1]
                        back.add(other)
                        begin -= self.jobs[other][WORK]
                        loose -= self.jobs[other][WORK]
            begin += work_ns
        return back

    def _before_demand(self, values: SelectionValues, reserve: Reserve, back: set[int]) -> None:
        """Also defer out-of-quota jobs that would miss their deadline after the expected higher-value demand.

        Adds their positions to `back`. Jobs out of quota of lower priority do not count: they have less value.
        """
        begin, lanes, now, ranks = sum(self._free_at), len(self._free_at), self._now_ns, values.ranks
        loose, are_ranked, ahead_ns = dict[int, int](), len(set(ranks)) > 1, reserve.ahead_ns
        for at, (_, deadline_ns, _, _, in_quota, _, owner, work_ns) in enumerate(self.jobs):
            if at in back:
                continue
            if not in_quota:
                missing = begin - (deadline_ns - work_ns) * lanes
                if are_ranked:
                    missing -= sum([work for other, work in loose.items() if other > ranks[owner]])
                cost = ranks[owner] << RANKED | (work_ns if work_ns < MOST_WORK_NS else MOST_WORK_NS)  # as cost_of
                if missing > 0 or missing + ahead_ns(deadline_ns - now, cost) > 0:
                    back.add(at)
                    continue
                if are_ranked:
                    loose[ranks[owner]] = loose.get(ranks[owner], 0) + work_ns
            begin += work_ns

    def select(self, values: SelectionValues, most: int) -> list[tuple[Job, Job]]:
        """Remove at most `most` victims so that the other jobs can be in time; returns each with the late job.

        The victim is the job of the least value among those of the late job's rank up to the late job.
        """
        victims = list[tuple[Job, Job]]()
        if self.are_timely(virtual=False):
            return victims
        jobs, gone = self.jobs, set[int]()
        times, at, added = sorted(self._free_at), 0, 0
        candidates, of_rank = None, None
        while at < len(jobs) and len(victims) < most:
            rank, deadline_ns, _, _, _, _, _, work_ns = jobs[at]
            end = times[0] + work_ns
            if end <= deadline_ns:
                heapreplace(times, end)
                at += 1
                continue
            if rank != of_rank:
                candidates, of_rank, added = None, rank, 0
            if len(victims) < _SCANS:
                victim, least = at, None
                for each in range(at + 1):
                    if each not in gone and jobs[each][RANK] == rank:
                        value = values.of(jobs[each])
                        if least is None or value < least:  # type: ignore[operator]
                            least, victim = value, each
                values.lost(jobs[victim][OWNER])
            else:
                candidates = candidates or Candidates(values, jobs.__getitem__)
                fresh = [each for each in range(added, at + 1) if jobs[each][RANK] == rank and each not in gone]
                candidates.add([(jobs[each][OWNER], values.within_tenant(jobs[each]), each) for each in fresh])
                added = at + 1
                victim = candidates.pop()
            victims.append((jobs[victim], jobs[at]))
            gone.add(victim)
            if victim == at:
                at += 1
            else:  # all later jobs begin earlier: no other job becomes late
                times = sorted(self._free_at)
                for each in range(at):
                    if each not in gone:
                        heapreplace(times, times[0] + jobs[each][WORK])
        self.jobs = [job for each, job in enumerate(jobs) if each not in gone]
        return victims

    def behind_quotas(self, paused: int) -> list[int]:
        """Numbers of jobs out of quota that start after jobs in quota.

        These have a deadline at or after the earliest virtual deadline of their rank, among waiting queries and the
        first `paused` batches.
        """
        first = dict[int, int]()
        for rank, _, number, virtual_deadline_ns, in_quota, _, _, _ in self.jobs:
            if in_quota and number >= -paused and virtual_deadline_ns < first.get(rank, virtual_deadline_ns + 1):
                first[rank] = virtual_deadline_ns
        return [
            number
            for rank, deadline_ns, number, _, in_quota, _, _, _ in self.jobs
            if not in_quota and rank in first and deadline_ns >= first[rank]
        ]


class ShortQueue:
    """The queries of a short queue at one edition, as a list of jobs.

    `rank` is the rank of all queries, None if they differ. `tell` makes `jobs` for a `predictor` and the tenant's
    number `owner`; before, `predictor` is None. `rows` caches the jobs as columns.
    """

    __slots__ = ("_virtual_deadlines", "edition", "jobs", "owner", "predictor", "rank", "rows")

    def __init__(self, queue: QueueView, virtual_deadlines: Mapping[int, int]) -> None:
        """Of a non-empty queue with keys of the form (rank, deadline, ..., number). `virtual_deadlines` has those of
        queries in quota, by number."""
        self.edition = queue.edition
        self.rank: int | None = queue.keys[0][0]
        if not queue.are_alike and any(key[0] != self.rank for key in queue.keys):
            self.rank = None
        self.jobs: list[Job] = []
        self.rows: NDArray[np.int64] | None = None
        known = virtual_deadlines
        self._virtual_deadlines = [known.get(query.id) for query in queue.queries] if known else None
        self.predictor: Predictor | None = None
        self.owner = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShortQueue) and self.edition is other.edition

    __hash__ = None  # type: ignore[assignment]

    def tell(self, queue: QueueView, owner: int, predictor: Predictor, needed_ns: Callable[[Work], int]) -> None:
        """Make the jobs of this edition's queue, for the tenant's number and the present predictions of work."""
        self.predictor, self.owner, self.rows = predictor, owner, None
        tenant, virtual_deadlines = queue.tenant, self._virtual_deadlines
        name = tenant.name
        found: dict[tuple[int, int], tuple[int, int]] = {}
        jobs = self.jobs = []
        for at, (query, key) in enumerate(zip(queue.queries, queue.keys, strict=True)):
            kind = query.shape, query.items
            known = found.get(kind)
            if known is None:
                work_ns = needed_ns(tenant.work(*kind))
                longer_ns = predictor.upper_ns(name, work_ns, tenant.slo_ns) - work_ns if virtual_deadlines else 0
                known = found[kind] = work_ns, longer_ns
            deadline, virtual_ns = key[1], None if virtual_deadlines is None else virtual_deadlines[at]
            in_quota = virtual_ns is not None
            if virtual_ns is not None:  # earlier by the margin, so that it is in time at the upper estimate
                virtual_ns = min(virtual_ns, deadline - known[1])
            virtual_ns = deadline if virtual_ns is None else virtual_ns
            jobs.append((key[0], deadline, key[2], virtual_ns, in_quota, 1, owner, known[0]))
