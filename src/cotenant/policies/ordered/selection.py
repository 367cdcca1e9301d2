"""Which of the queries inside can be in time together, and who is given up when not all can.

After the rule of Moore and Hodgson for the fewest late jobs (Moore, 1968): jobs are laid on the lanes in the policy's
order, and whenever one would be late, jobs up to it are taken out, the one that an objective values least first. On
one lane, with the most work as the least value, no other choice leaves more in time. With several lanes, or values that
differ in more than work, it is a heuristic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotenant.policies.ordered.jobs import AnyColumn, Column, Jobs

_FEW = 128
"""Jobs up to which they are laid on the lanes one by one; of more, which lane gets which hardly matters."""

Value = Callable[[Jobs], Sequence[AnyColumn]]
"""What jobs are worth: of two the one goes that is less in the first column in which they differ."""
Note = Callable[[int], None]
"""Is told the number of the tenant of each job that goes, before the next one is chosen."""


class Victim(NamedTuple):
    """The positions of a job that is given up, and of the one that would be late else."""

    job: int
    for_job: int


def begin_ns(work_ns: Column, free_at: Sequence[int]) -> Column:
    """When jobs would begin one after the other were the lanes one that is as fast as all of them; times the lanes.

    Each begins no later on lanes of which the one that is free first gets the next job.
    """
    begin = work_ns.cumsum()
    begin -= work_ns
    begin += sum(free_at)
    return begin


def select(jobs: Jobs, free_at: Sequence[int], value: Value, note: Note) -> list[Victim]:
    """Jobs to give up so that the others can be in time.

    `jobs` are in the policy's order, and each would be in time were it the first; `free_at` tells when each lane is
    predicted to be free. Of those up to a late one, and of its priority, the one of the least `value` goes, which of
    jobs of one tenant is the one of the most work for an answer; `note` is told of each that goes.
    """
    victims: list[Victim] = []
    latest = (jobs.deadline_ns - jobs.work_ns) * len(free_at)
    if (begin_ns(jobs.work_ns, free_at) <= latest).all():
        return victims
    left = np.arange(len(latest))
    while (late := _first_late(jobs, left, latest, free_at)) is not None:
        for_job = int(left[late])
        among = left[: late + 1]
        among = among[jobs.rank[among] == jobs.rank[for_job]]
        for column in value(jobs):
            worth = column[among]
            among = among[worth == worth.min()]
        gone = int(among[0])
        note(int(jobs.owner[gone]))
        victims.append(Victim(gone, for_job))
        left = left[left != gone]
    return victims


def standing_back(jobs: Jobs, free_at: Sequence[int], value: Value) -> NDArray[np.bool_]:
    """Jobs beyond entitlements that have to wait so that those within are done when they are due.

    The lanes count as one that is as fast as all of them. Where the jobs within would be behind even alone, all beyond
    before them wait. Nobody waits for a lower priority.
    """
    behind = begin_ns(jobs.work_ns, free_at) - (jobs.due_ns - jobs.work_ns) * len(free_at)
    urgent = ((behind > 0) & (jobs.is_entitled > 0)).nonzero()[0]
    beyond = (jobs.is_entitled == 0).nonzero()[0]
    back = np.zeros(len(behind), np.bool_)
    if not urgent.size or not beyond.size:
        return back
    by_value = np.lexsort([column[beyond] for column in reversed(value(jobs))])
    place = np.empty_like(by_value)
    place[by_value] = np.arange(len(by_value))
    positions, places, least_first = beyond.tolist(), place.tolist(), beyond[by_value].tolist()
    rank, work_ns = jobs.rank[urgent].tolist(), jobs.work_ns
    spared, pushed, of_rank = 0, 0, None
    candidates: list[int] = []
    for at, its_rank, missing in zip(urgent.tolist(), rank, behind[urgent].tolist(), strict=True):
        if its_rank != of_rank:
            candidates, of_rank = [], its_rank
            pushed = bisect_left(positions, int(jobs.rank.searchsorted(its_rank)))
        while pushed < len(positions) and positions[pushed] < at:
            heappush(candidates, places[pushed])
            pushed += 1
        while missing > spared and candidates:
            other = least_first[heappop(candidates)]
            back[other] = True
            spared += int(work_ns[other])
    return back


def beside_reserve(jobs: Jobs, free_at: Sequence[int], back: NDArray[np.bool_], ahead_ns: Column) -> None:
    """Put `back`, too, what is beyond entitlements and would be late once `ahead_ns` of work has come before it."""
    lanes, work_ns = len(free_at), jobs.work_ns
    late = begin_ns(np.where(back, 0, work_ns), free_at) + ahead_ns - (jobs.deadline_ns - work_ns) * lanes
    doubtful = ((late > 0) & (jobs.is_entitled == 0) & ~back).nonzero()[0]
    spared = 0
    for at, missing, work in zip(doubtful.tolist(), late[doubtful].tolist(), work_ns[doubtful].tolist(), strict=True):
        if missing > spared:
            back[at] = True
            spared += work


def _first_late(jobs: Jobs, left: NDArray[np.intp], latest: Column, free_at: Sequence[int]) -> int | None:
    """Where among those that are `left` the first one is that would be late; None if none is."""
    if left.size <= _FEW:
        return first_late(jobs.work_ns[left], jobs.deadline_ns[left], free_at)
    late = (begin_ns(jobs.work_ns[left], free_at) > latest[left]).nonzero()[0]
    return int(late[0]) if late.size else None


def first_late(work_ns: Column, deadline_ns: Column, free_at: Sequence[int]) -> int | None:
    """The position of the first job that is late when each goes to the lane that is free first; None if none is."""
    times = sorted(free_at)
    for at, (work, deadline) in enumerate(zip(work_ns.tolist(), deadline_ns.tolist(), strict=True)):
        end = times[0] + work
        if end > deadline:
            return at
        heapreplace(times, end)
    return None
