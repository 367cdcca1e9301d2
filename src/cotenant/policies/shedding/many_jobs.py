"""Jobs of one shedding decision as numpy columns: faster than single jobs where there are many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import QueueView
from cotenant.policies.shedding.jobs import (
    ANSWERS,
    DEADLINE,
    DEFERRED,
    FEW,
    IN_QUOTA,
    NUMBER,
    OWNER,
    RANK,
    VIRTUAL_DEADLINE,
    WORK,
    Candidates,
    FewJobs,
    Job,
    SelectionValues,
    ShortQueue,
)
from cotenant.policies.shedding.reserve import MOST_WORK_NS, RANKED, Reserve
from cotenant.work import Work

Column = NDArray[np.int64]
Values = NDArray[np.float64]

_FAR_NS = 1 << 50
"""Upper bound of times: sums stay within 64 bits."""
_NOT_IN_QUOTA = -(1 << 62)
"""Virtual deadline of a query that is out of quota."""
_KIND = VIRTUAL_DEADLINE + 1
"""Row of `LongQueue` with the number of the query's shape and rows."""
_MOST_EDITS = 32
"""Most differences between two editions of a queue for which columns are reused."""
_SCANS = 8
"""Victims of one decision that a scan of all jobs finds; heaps find further ones."""


class ManyJobs:
    """Jobs of one decision, with the methods of `FewJobs`. `rows` has a column for each job, in the policy's order."""

    __slots__ = ("_free_at", "_now_ns", "rows")

    def __init__(self, rows: Column, free_at: Sequence[int], now_ns: int) -> None:
        self.rows, self._now_ns = rows, now_ns
        self._free_at = [each - now_ns for each in free_at]
        for row in (DEADLINE, VIRTUAL_DEADLINE):
            rows[row] -= now_ns
            np.minimum(rows[row], _FAR_NS, out=rows[row])

    @classmethod
    def of(
        cls, waiting: Collection[ShortQueue | LongQueue], batches: Sequence[Job], free_at: Sequence[int], now_ns: int
    ) -> ManyJobs:
        """The jobs of queues and begun batches."""
        known = {each.rank for each in waiting} | {job[RANK] for job in batches}
        blocks = [np.array(batches, np.int64).reshape(-1, WORK + 1).T]
        for each in waiting:
            if each.rows is None:
                each.rows = np.array(each.jobs, np.int64).T
            blocks.append(each.rows)
        every = np.concatenate(blocks, 1)
        is_one = len(known) == 1 and None not in known
        order = every[DEADLINE].argsort(kind="stable") if is_one else np.lexsort((every[DEADLINE], every[RANK]))
        return cls(every.take(order, 1), free_at, now_ns)

    def _begin_ns(self, work_ns: Column) -> Column:
        """Begin times of the jobs in sequence on one lane with the speed of all lanes, multiplied by the lanes.

        On the real lanes each job begins no later.
        """
        begin = work_ns.cumsum()
        begin -= work_ns
        begin += sum(self._free_at)
        return begin

    def _latest(self, row: int) -> Column:
        """Latest begin times to end by the times of a row, multiplied by the lanes."""
        latest: Column = (self.rows[row] - self.rows[WORK]) * len(self._free_at)
        return latest

    def are_timely(self, *, virtual: bool) -> bool:
        """Whether all jobs meet their deadlines, or virtual ones, on one lane with the speed of all lanes."""
        return bool((self._begin_ns(self.rows[WORK]) <= self._latest(VIRTUAL_DEADLINE if virtual else DEADLINE)).all())

    def hopeless(self) -> list[tuple[int, int, int]]:
        """Remove jobs that would be late even if first: number, time until the end, time to the deadline."""
        rows = self.rows
        end = rows[WORK] + min(self._free_at)
        is_late = end > rows[DEADLINE]
        late = [each[is_late].tolist() for each in (rows[NUMBER], end, rows[DEADLINE])]
        if late[0]:
            self.rows = rows.take((~is_late).nonzero()[0], 1)
        return list(zip(*late, strict=True))

    def are_in_quota(self) -> bool:
        """Whether all are in quota."""
        return bool(self.rows[IN_QUOTA].all())

    def defer(self, values: SelectionValues, reserve: Reserve | None) -> list[int]:
        """Move jobs out of quota after all others if quotas or expected demand need their time; their numbers."""
        back = self._before_quotas(values)
        if reserve is not None:
            self._before_demand(values, reserve, back)
        held: list[int] = self.rows[NUMBER, back].tolist()
        if held:
            self.rows[RANK, back] += DEFERRED
            self.rows = self.rows.take(back.argsort(kind="stable"), 1)
        return held

    def _values(self, values: SelectionValues, attainments: Sequence[float]) -> Sequence[Values]:
        """Values of jobs at these attainments of tenants."""
        rows = self.rows
        owner = rows[OWNER]
        attainment, weight, rank = [np.array(each)[owner] for each in (attainments, values.weights, values.ranks)]
        return values.value(rows[IN_QUOTA] * 1.0, attainment, weight, rank, rows[WORK] * 1.0, rows[ANSWERS] * 1.0)

    def _before_quotas(self, values: SelectionValues) -> NDArray[np.bool_]:
        rows = self.rows
        work_ns = rows[WORK]
        behind = self._begin_ns(work_ns) - self._latest(VIRTUAL_DEADLINE)
        urgent = ((behind > 0) & (rows[IN_QUOTA] > 0)).nonzero()[0]
        loose = (rows[IN_QUOTA] == 0).nonzero()[0]
        back = np.zeros(len(behind), np.bool_)
        if not urgent.size or not loose.size:
            return back
        by_value = np.lexsort([column[loose] for column in reversed(self._values(values, values.attainments))])
        place = np.empty_like(by_value)
        place[by_value] = np.arange(len(by_value))
        positions, places, least_first = loose.tolist(), place.tolist(), loose[by_value].tolist()
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

    def _before_demand(self, values: SelectionValues, reserve: Reserve, back: NDArray[np.bool_]) -> None:
        rows, out = self.rows, self.rows[IN_QUOTA] == 0
        ranks = np.array(values.ranks, np.int64)[rows[OWNER]]
        for rank in np.unique(ranks[out & ~back]).tolist():
            late = self._begin_ns(np.where(back | (out & (ranks > rank)), 0, rows[WORK])) - self._latest(DEADLINE)
            loose = (out & ~back & (ranks == rank)).nonzero()[0]
            works = rows[WORK, loose]
            costs = (rank << RANKED) | np.minimum(works, MOST_WORK_NS)
            missing = late[loose] + ahead_ns(reserve, rows[DEADLINE, loose], costs)
            is_doubtful = missing > 0
            doubtful, spared = loose[is_doubtful], 0
            for at, each, work in zip(
                doubtful.tolist(), missing[is_doubtful].tolist(), works[is_doubtful].tolist(), strict=True
            ):
                if each > spared:
                    back[at] = True
                    spared += work

    def select(self, values: SelectionValues, most: int) -> list[tuple[Job, Job]]:
        """Remove at most `most` victims; returns each with the late job. More than FEW jobs count lanes as one."""
        victims = list[tuple[Job, Job]]()
        late = self._begin_ns(self.rows[WORK]) - self._latest(DEADLINE)
        found = (late > 0).nonzero()[0]
        if not found.size:
            return victims
        left = np.ones(late.size, np.bool_)
        room = late.size - FEW
        if room > 0:
            for victim, at in self._least(values, found, late, left, min(most, room)):
                victims.append((self._job(victim), self._job(at)))
            self.rows = self.rows.take(left.nonzero()[0], 1)
        if len(victims) >= room:
            few = FewJobs(list(zip(*self.rows.tolist(), strict=True)), self._free_at, 0)
            further = few.select(values, most - len(victims))
            victims += [(self._timed(gone), self._timed(for_job)) for gone, for_job in further]
            self.rows = np.array(few.jobs, np.int64).reshape(-1, WORK + 1).T
        return victims

    def _least(
        self, values: SelectionValues, found: NDArray[np.intp], late: Column, left: NDArray[np.bool_], most: int
    ) -> Iterator[tuple[int, int]]:
        """Positions of at most `most` victims, each with the position of its late job.

        `found` are the positions of late jobs; `late` has the lateness of each job, multiplied by the lanes. One sweep
        suffices: a victim is at or before the late job, so later jobs only begin earlier. Removes victims from `left`.
        """
        rows, spared, gone = self.rows, 0, set[int]()
        start, added, of_rank = 0, 0, None
        candidates: Candidates | None = None
        owners, places = list[int](), list[int]()
        for at, missing in zip(found.tolist(), late[found].tolist(), strict=True):
            if missing <= spared:
                continue
            rank = int(rows[RANK, at])
            if rank != of_rank:
                of_rank, start, candidates = rank, int(rows[RANK].searchsorted(rank)), None
            while missing > spared and at not in gone:
                if len(gone) < _SCANS:
                    victim = self._scan(values, start + left[start : at + 1].nonzero()[0])
                else:
                    if not places:
                        place = np.lexsort([*reversed(self._values(values, [1.0] * len(values.attainments)))]).argsort()
                        owners, places = rows[OWNER].tolist(), place.tolist()
                    if candidates is None:
                        candidates, added = Candidates(values, self._job), start
                    if added <= at:
                        fresh = range(added, at + 1)
                        candidates.add([(owners[each], places[each], each) for each in fresh if each not in gone])
                        added = at + 1
                    victim = candidates.pop()
                left[victim] = False
                gone.add(victim)
                spared += int(rows[WORK, victim])
                yield victim, at
                if len(gone) == most:
                    return

    def _scan(self, values: SelectionValues, among: NDArray[np.intp]) -> int:
        """The result of `Candidates.pop` among these positions; for few victims a scan is faster than heaps."""
        for column in self._values(values, values.attainments):
            found = column[among]
            among = among[found == found.min()]
        values.lost(int(self.rows[OWNER, among[0]]))
        return int(among[0])

    def _job(self, at: int) -> Job:
        return self._timed(self.rows[:, at].tolist())

    def _timed(self, job: Sequence[int]) -> Job:
        """A job with absolute times."""
        rank, deadline_ns, number, virtual_ns, *others = job
        made: Job = (rank, deadline_ns + self._now_ns, number, virtual_ns + self._now_ns, *others)  # type: ignore[assignment]
        return made

    def behind_quotas(self, paused: int) -> list[int]:
        """Numbers of jobs out of quota that start after jobs in quota, as in `FewJobs`."""
        rows = self.rows
        in_quota = ((rows[IN_QUOTA] > 0) & (rows[NUMBER] >= -paused)).nonzero()[0]
        ranks, virtual_deadlines, found, first = rows[RANK, in_quota], rows[VIRTUAL_DEADLINE, in_quota], list[int](), 0
        while first < in_quota.size:  # ranks ascend: each has a span of its own
            rank = ranks[first]
            until = int(ranks.searchsorted(rank, "right"))
            span = slice(rows[RANK].searchsorted(rank), rows[RANK].searchsorted(rank, "right"))
            late = (rows[IN_QUOTA, span] == 0) & (rows[DEADLINE, span] >= virtual_deadlines[first:until].min())
            found += rows[NUMBER, span][late].tolist()
            first = until
        return found


def ahead_ns(reserve: Reserve, left_ns: Column, costs: Column) -> Values:
    """Results of `Reserve.ahead_ns` for many jobs."""
    if not reserve.columns:
        sums = (reserve.in_quota, reserve.in_quota_ns, reserve.out_of_quota, reserve.out_of_quota_ns)
        reserve.columns.extend(np.array(each) for each in (reserve.slo_ns, reserve.costs, reserve.keys, *sums))
    slos, of_costs, keys, in_quota, in_quota_ns, out_of_quota, out_of_quota_ns = reserve.columns
    count, rank = slos.searchsorted(left_ns), of_costs.searchsorted(costs)
    level = np.arange(len(slos).bit_length())[:, None]
    block = (count >> level) - 1
    is_whole = (block & 1) == 0
    until = keys.searchsorted((level * reserve.width + block) * reserve.width + rank)
    first = np.where(is_whole, level * len(slos) + (block << level), until)
    lanes = in_quota[count] + (out_of_quota[until] - out_of_quota[first]).sum(0)
    lane_ns = in_quota_ns[count] + (out_of_quota_ns[until] - out_of_quota_ns[first]).sum(0)
    found: Values = left_ns * lanes - lane_ns
    return found


class LongQueue:
    """The queries of a long queue at one of its editions, as jobs in columns: `rows` [8, jobs], in the queue's order.

    `rank` is the priority of all queries, None where they differ. Columns of another edition are reused: the keys of
    both tell which queries came and went. A key is the same object as long as its query waits, so that lists of keys
    compare at the speed of memory.
    """

    __slots__ = ("_keys", "_kinds", "_raw", "_virtual_deadlines", "edition", "owner", "predictor", "rank", "rows")

    jobs: ClassVar[Sequence[Job]] = ()

    def __init__(self, queue: QueueView, virtual: Mapping[int, int], known: LongQueue | None = None) -> None:
        """Of a queue with keys of the form (rank, deadline, ..., number); `virtual` has virtual deadlines by number.
        `known` is the same queue at an earlier edition; its columns are reused if it had the same object `virtual`."""
        self.edition, self._virtual_deadlines = queue.edition, virtual
        self._keys = list(queue.keys)
        if queue.has_ranks:
            self._keys = [(query.rank, *key) for query, key in zip(queue.queries, queue.keys, strict=True)]
        self._kinds: dict[tuple[int, int], int] = {} if known is None else known._kinds
        """Numbers of shapes and rows."""
        edits = None if known is None or known._virtual_deadlines is not virtual else _edits(known._keys, self._keys)
        if known is None or edits is None:
            self._raw = self._made(queue, virtual, 0, len(self._keys))
        else:
            blocks, done = list[Column](), 0
            for first, until, begin, end in edits:
                blocks += [known._raw[:, done:first], self._made(queue, virtual, begin, end)]
                done = until
            self._raw = np.concatenate([*blocks, known._raw[:, done:]], 1)
        ranks = self._raw[RANK]
        self.rank: int | None = int(ranks[0]) if (ranks == ranks[0]).all() else None
        self.rows: Column = self._raw
        """The jobs as `tell` made them last."""
        self.predictor: Predictor | None = None
        self.owner = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LongQueue) and self.edition is other.edition

    __hash__ = None  # type: ignore[assignment]

    def tell(self, queue: QueueView, owner: int, predictor: Predictor, needed_ns: Callable[[Work], int]) -> None:
        """Make the rows, as `ShortQueue.tell` makes jobs."""
        self.predictor, self.owner = predictor, owner
        tenant, raw = queue.tenant, self._raw
        work_ns = [needed_ns(tenant.work(*kind)) for kind in self._kinds]
        rows = self.rows = np.empty((WORK + 1, raw.shape[1]), np.int64)
        rows[: VIRTUAL_DEADLINE + 1] = raw[: VIRTUAL_DEADLINE + 1]
        rows[WORK] = work_ns[0] if len(work_ns) == 1 else np.array(work_ns).take(raw[_KIND])
        rows[ANSWERS], rows[OWNER] = 1, owner
        are_in_quota = rows[IN_QUOTA] = raw[VIRTUAL_DEADLINE] != _NOT_IN_QUOTA
        if are_in_quota.any():  # earlier by the margin, so that they are in time at the upper estimate
            longer_ns = [predictor.upper_ns(tenant.name, each, tenant.slo_ns) - each for each in work_ns]
            latest = raw[DEADLINE] - np.array(longer_ns).take(raw[_KIND])
            rows[VIRTUAL_DEADLINE] = np.where(are_in_quota, np.minimum(raw[VIRTUAL_DEADLINE], latest), raw[DEADLINE])
        else:
            rows[VIRTUAL_DEADLINE] = raw[DEADLINE]

    def _made(self, queue: QueueView, virtual: Mapping[int, int], begin: int, end: int) -> Column:
        """Columns of the queries from one position to another: rank, deadline, number, virtual deadline, kind."""
        queries, kinds = queue.queries[begin:end], self._kinds
        made = np.empty((_KIND + 1, end - begin), np.int64)
        if queries:
            made[: NUMBER + 1] = np.array(queue.keys[begin:end], np.int64).T[: NUMBER + 1]
            made[VIRTUAL_DEADLINE] = (
                [virtual.get(query.id, _NOT_IN_QUOTA) for query in queries] if virtual else _NOT_IN_QUOTA
            )
            made[_KIND] = [kinds.setdefault((query.shape, query.items), len(kinds)) for query in queries]
        return made


def _edits(old: Sequence[object], new: Sequence[object]) -> list[tuple[int, int, int, int]] | None:
    """Differences of two lists of ascending keys: tuples (first, until, begin, end), where `old[first:until]` became
    `new[begin:end]`. None where there are more than _MOST_EDITS."""
    made = list[tuple[int, int, int, int]]()
    first = begin = 0
    while len(made) <= _MOST_EDITS:
        alike = _alike(old, first, new, begin)
        first, begin = first + alike, begin + alike
        if first == len(old) and begin == len(new):
            return made
        until, end = first, begin
        while until < len(old) and (end == len(new) or old[until] < new[end]):  # type: ignore[operator]
            until += 1
        while end < len(new) and (until == len(old) or new[end] < old[until]):  # type: ignore[operator]
            end += 1
        made.append((first, until, begin, end))
        first, begin = until, end
    return None


def _alike(old: Sequence[object], first: int, new: Sequence[object], begin: int) -> int:
    """Number of equal keys from these positions on. Galloping search: runs double until they differ, then halve."""
    most, alike, length = min(len(old) - first, len(new) - begin), 0, 1
    is_longer = True
    while alike < most and length:
        length = min(length, most - alike)
        at, other = first + alike, begin + alike
        if old[at : at + length] == new[other : other + length]:
            alike += length
            length = 2 * length if is_longer else length // 2
        else:
            is_longer, length = False, length // 2
    return alike
