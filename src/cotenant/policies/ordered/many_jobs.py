"""The same as `selection` does, for so many jobs that going through them one by one takes longer: in columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from cotenant.policies.ordered.jobs import (
    ANSWERS,
    BEHIND,
    DEADLINE,
    DUE,
    ENTITLED,
    NUMBER,
    OWNER,
    RANK,
    WORK,
    Job,
    Stakes,
    Waiting,
)
from cotenant.policies.ordered.reserve import Reserve
from cotenant.policies.ordered.selection import FEW, first_late

Column = NDArray[np.int64]
Values = NDArray[np.float64]

_FAR_NS = 1 << 50
"""Times beyond this, days ahead, are no later: their sums stay whole numbers of 64 bits."""


class ManyJobs:
    """Jobs of one decision; see `jobs.Selection`. `rows` has a column for each job, in the policy's order."""

    __slots__ = ("_free_at", "_now_ns", "rows")

    def __init__(self, rows: Column, free_at: Sequence[int], now_ns: int) -> None:
        self.rows, self._now_ns = rows, now_ns
        self._free_at = [each - now_ns for each in free_at]
        for row in (DEADLINE, DUE):
            rows[row] -= now_ns
            np.minimum(rows[row], _FAR_NS, out=rows[row])

    @classmethod
    def of(cls, waiting: Collection[Waiting], batches: Sequence[Job], free_at: Sequence[int], now_ns: int) -> ManyJobs:
        """Of all that waits and has begun."""
        known = {each.rank for each in waiting} | {job[RANK] for job in batches}
        blocks = [np.array(batches, np.int64).reshape(-1, WORK + 1).T]
        for each in waiting:
            rows = each.rows
            if rows is None:
                rows = each.rows = np.array(each.jobs, np.int64).T
            blocks.append(rows)
        every = np.concatenate(blocks, 1)
        is_one = len(known) == 1 and None not in known
        order = every[DEADLINE].argsort(kind="stable") if is_one else np.lexsort((every[DEADLINE], every[RANK]))
        return cls(every.take(order, 1), free_at, now_ns)

    def _begin_ns(self, work_ns: Column) -> Column:
        """When jobs would begin one after the other were the lanes one that is as fast as all of them; times the lanes.

        Each begins no later on lanes of which the one that is free first gets the next job.
        """
        begin = work_ns.cumsum()
        begin -= work_ns
        begin += sum(self._free_at)
        return begin

    def _latest(self, row: int) -> Column:
        """When they would have to begin, times the lanes, to be done by the times of a row."""
        latest: Column = (self.rows[row] - self.rows[WORK]) * len(self._free_at)
        return latest

    def is_timely(self, *, due: bool) -> bool:
        """See Selection."""
        return bool((self._begin_ns(self.rows[WORK]) <= self._latest(DUE if due else DEADLINE)).all())

    def hopeless(self) -> list[tuple[int, int, int]]:
        """See Selection."""
        rows = self.rows
        end = rows[WORK] + min(self._free_at)
        is_late = end > rows[DEADLINE]
        late = [each[is_late].tolist() for each in (rows[NUMBER], end, rows[DEADLINE])]
        if late[0]:
            self.rows = rows.take((~is_late).nonzero()[0], 1)
        return list(zip(*late, strict=True))

    def is_within(self) -> bool:
        """See Selection."""
        return bool(self.rows[ENTITLED].all())

    def stand_back(self, stakes: Stakes, reserve: Reserve | None) -> list[int]:
        """See Selection."""
        back = self._behind_alone(stakes)
        if reserve is not None:
            self._beside(reserve, back)
        held: list[int] = self.rows[NUMBER, back].tolist()
        if held:
            self.rows[RANK, back] += BEHIND
            self.rows = self.rows.take(back.argsort(kind="stable"), 1)
        return held

    def _values(self, stakes: Stakes) -> Sequence[Values]:
        rows = self.rows
        fared, weight = np.array(stakes.fared)[rows[OWNER]], np.array(stakes.weights)[rows[OWNER]]
        return stakes.worth(rows[ENTITLED] * 1.0, fared, weight, rows[WORK] * 1.0, rows[ANSWERS] * 1.0)

    def _behind_alone(self, stakes: Stakes) -> NDArray[np.bool_]:
        rows = self.rows
        work_ns = rows[WORK]
        behind = self._begin_ns(work_ns) - self._latest(DUE)
        urgent = ((behind > 0) & (rows[ENTITLED] > 0)).nonzero()[0]
        beyond = (rows[ENTITLED] == 0).nonzero()[0]
        back = np.zeros(len(behind), np.bool_)
        if not urgent.size or not beyond.size:
            return back
        by_value = np.lexsort([column[beyond] for column in reversed(self._values(stakes))])
        place = np.empty_like(by_value)
        place[by_value] = np.arange(len(by_value))
        positions, places, least_first = beyond.tolist(), place.tolist(), beyond[by_value].tolist()
        spared, pushed, of_rank = 0, 0, None
        candidates: list[int] = []
        ranks = rows[RANK, urgent].tolist()
        for at, rank, missing in zip(urgent.tolist(), ranks, behind[urgent].tolist(), strict=True):
            if rank != of_rank:
                candidates, of_rank = [], rank
                pushed = bisect_left(positions, int(rows[RANK].searchsorted(rank)))
            while pushed < len(positions) and positions[pushed] < at:
                heappush(candidates, places[pushed])
                pushed += 1
            while missing > spared and candidates:
                other = least_first[heappop(candidates)]
                back[other] = True
                spared += int(work_ns[other])
        return back

    def _beside(self, reserve: Reserve, back: NDArray[np.bool_]) -> None:
        rows = self.rows
        work_ns = rows[WORK]
        at = np.searchsorted(reserve.work_ns, work_ns), np.searchsorted(reserve.slo_ns, rows[DEADLINE])
        ahead = rows[DEADLINE] * np.array(reserve.busy)[at] - np.array(reserve.begun_ns)[at]
        late = self._begin_ns(np.where(back, 0, work_ns)) + ahead - self._latest(DEADLINE)
        doubtful = ((late > 0) & (rows[ENTITLED] == 0) & ~back).nonzero()[0]
        spared = 0
        for at, missing, work in zip(
            doubtful.tolist(), late[doubtful].tolist(), work_ns[doubtful].tolist(), strict=True
        ):
            if missing > spared:
                back[at] = True
                spared += work

    def select(self, stakes: Stakes) -> list[tuple[Job, Job]]:
        """See Selection. Where more than FEW are left, they are laid on the lanes as if these were one."""
        victims = list[tuple[Job, Job]]()
        latest = self._latest(DEADLINE)
        if (self._begin_ns(self.rows[WORK]) <= latest).all():
            return victims
        left = np.arange(len(latest))
        while (late := self._first_late(left, latest)) is not None:
            for_job = int(left[late])
            among = left[: late + 1]
            among = among[self.rows[RANK, among] == self.rows[RANK, for_job]]
            for column in self._values(stakes):
                values = column[among]
                among = among[values == values.min()]
            gone = int(among[0])
            stakes.lost(int(self.rows[OWNER, gone]))
            victims.append((self._job(gone), self._job(for_job)))
            left = left[left != gone]
        self.rows = self.rows.take(left, 1)
        return victims

    def _job(self, at: int) -> Job:
        rank, deadline_ns, number, due_ns, *others = self.rows[:, at].tolist()
        job: Job = (rank, deadline_ns + self._now_ns, number, due_ns + self._now_ns, *others)
        return job

    def _first_late(self, left: NDArray[np.intp], latest: Column) -> int | None:
        """Where among those that are `left` the first one is that would be late; None if none is."""
        if left.size <= FEW:
            rows = self.rows.take(left, 1)
            return first_late(zip(*rows.tolist(), strict=True), self._free_at)
        late = (self._begin_ns(self.rows[WORK, left]) > latest[left]).nonzero()[0]
        return int(late[0]) if late.size else None

    def behind_the_due(self, paused: int) -> list[int]:
        """See Selection."""
        rows = self.rows
        within = ((rows[ENTITLED] > 0) & (rows[NUMBER] >= -paused)).nonzero()[0]
        ranks, dues = rows[RANK, within].tolist(), rows[DUE, within].tolist()
        found: list[int] = []
        for rank in dict.fromkeys(ranks):
            due = min([each for each, its_rank in zip(dues, ranks, strict=True) if its_rank == rank])
            late = (rows[ENTITLED] == 0) & (rows[DEADLINE] >= due) & (rows[RANK] == rank)
            found += rows[NUMBER, late].tolist()
        return found
