"""Which of the queries inside can be in time together, and who is given up when not all can.

After the rule of Moore and Hodgson for the fewest late jobs (Moore, 1968): jobs are laid on the lanes in the policy's
order, and whenever one would be late, jobs up to it are taken out, the one that an objective values least first. On
one lane, with the most work as the least value, no other choice leaves more in time. With several lanes, or values that
differ in more than work, it is a heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from cotenant.policies.desk import Key

_FEW = 128
"""Jobs up to which they are laid on the lanes one by one; of more, which lane gets which hardly matters."""


class Job(NamedTuple):
    """Work inside: its place in the policy's order, what it takes of a lane, and whose it is.

    `rank` is its priority. `due_ns` is its deadline, or when it is due within an entitlement, which it `is_entitled`
    to then.
    """

    key: Key
    work_ns: int
    deadline_ns: int
    due_ns: int
    rank: int
    tenant: str
    weight: float
    queries: tuple[int, ...]
    is_entitled: bool


class Victim(NamedTuple):
    """A job that is given up, and the one that would be late else."""

    job: Job
    for_job: Job


Value = Callable[[Job], tuple[float, ...]]
Note = Callable[[Job], None]


def select(jobs: Sequence[Job], free_at: Sequence[int], value: Value, note: Note) -> list[Victim]:
    """Jobs to give up so that the others can be in time.

    `jobs` are in the policy's order, and each would be in time were it the first; `free_at` tells when each lane is
    predicted to be free. Of those up to a late one, and of its priority, the one of the least `value` goes, which of
    jobs of one tenant is the one of the most work for an answer; `note` is told of each that goes.
    """
    return _one_by_one(list(jobs), free_at, value, note) if len(jobs) <= _FEW else _at_once(jobs, free_at, value, note)


def standing_back(jobs: Sequence[Job], free_at: Sequence[int], value: Value) -> frozenset[tuple[int, ...]]:
    """The queries of jobs beyond entitlements that have to wait so that those within are done when they are due.

    The lanes count as one that is as fast as all of them. Where the jobs within would be behind even alone, all beyond
    before them wait.
    """
    lanes, begin, rank = len(free_at), sum(free_at), -1
    beyond: list[tuple[tuple[float, ...], int, Job]] = []
    back: list[tuple[int, ...]] = []
    for at, job in enumerate(jobs):
        if job.rank != rank:  # nobody waits for a lower priority
            beyond, rank = [], job.rank
        work = job.work_ns
        if job.is_entitled:
            latest = (job.due_ns - work) * lanes
            while begin > latest and beyond:
                other = heappop(beyond)[2]
                begin -= other.work_ns
                back.append(other.queries)
        else:
            heappush(beyond, (value(job), at, job))
        begin += work
    return frozenset(back)


def _one_by_one(kept: list[Job], free_at: Sequence[int], value: Value, note: Note) -> list[Victim]:
    """Each job goes to the lane that is free first; after each that goes all are laid out anew."""
    victims: list[Victim] = []
    while (late := first_late(kept, free_at)) is not None:
        job = kept[late]
        among = [(value(each), at) for at, each in enumerate(kept[: late + 1]) if each.rank == job.rank]
        victim = kept.pop(min(among)[1])
        note(victim)
        victims.append(Victim(victim, job))
    return victims


def _at_once(jobs: Sequence[Job], free_at: Sequence[int], value: Value, note: Note) -> list[Victim]:
    """In one pass: the lanes count as one that is as fast as all of them, but that each job ends at single speed."""
    lanes, begin, rank = len(free_at), sum(free_at), -1
    heaps: dict[tuple[str, bool], list[tuple[float, int, Job]]] = {}
    victims: list[Victim] = []
    for at, job in enumerate(jobs):
        if job.rank != rank:  # of the priority before it nobody goes for this one
            heaps, rank = {}, job.rank
        heap = heaps.setdefault((job.tenant, job.is_entitled), [])
        heappush(heap, (-job.work_ns / len(job.queries), at, job))
        begin += job.work_ns
        while begin - job.work_ns > (job.deadline_ns - job.work_ns) * lanes:
            least = min([each for each in heaps.values() if each], key=lambda each: value(each[0][2]))
            victim = heappop(least)[2]
            begin -= victim.work_ns
            note(victim)
            victims.append(Victim(victim, job))
            if victim is job:
                break
    return victims


def first_late(jobs: Sequence[Job], free_at: Sequence[int]) -> int | None:
    """The position of the first job that is late when each goes to the lane that is free first; None if none is."""
    times = sorted(free_at)
    for at, job in enumerate(jobs):
        start = times[0]
        if start + job.work_ns > job.deadline_ns:
            return at
        heapreplace(times, start + job.work_ns)
    return None
