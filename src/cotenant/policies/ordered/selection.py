"""Which of the queries inside can be in time together, and who is given up when not all can.

After the rule of Moore and Hodgson for the fewest late jobs (Moore, 1968): jobs are laid on the lanes in the policy's
order, and whenever one would be late, jobs up to it are taken out, the one that an objective values least first. On
one lane, with the most work as the least value, no other choice leaves more in time. With several lanes, or values that
differ in more than work, it is a heuristic.

`Jobs` goes through them one by one, which is quicker for as few as are inside as a rule; `many_jobs` does the
same to many.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from cotenant.policies.ordered.jobs import BEHIND, DEADLINE, DUE, NUMBER, OWNER, RANK, WORK, Candidates, Job, Stakes
from cotenant.policies.ordered.reserve import MOST_WORK_NS, RANKED, Reserve

FEW = 128
"""Jobs up to which they are laid on the lanes one by one; of more, which lane gets which hardly matters."""

_SCANS = 3
"""Victims of one decision that are found by a scan of all jobs; further ones come from heaps."""


class Jobs:
    """Jobs of one decision, in the policy's order; see `jobs.Selection`. `free_at` tells when each lane is free."""

    __slots__ = ("_free_at", "_now_ns", "jobs")

    def __init__(self, jobs: list[Job], free_at: Sequence[int], now_ns: int) -> None:
        self.jobs, self._free_at, self._now_ns = jobs, free_at, now_ns

    def is_timely(self, *, due: bool) -> bool:
        """See Selection: each begins no later on the lanes, of which the one that is free first gets the next job."""
        begin, lanes = sum(self._free_at), len(self._free_at)
        limit, work = DUE if due else DEADLINE, WORK
        for job in self.jobs:
            work_ns = job[work]
            if begin > (job[limit] - work_ns) * lanes:
                return False
            begin += work_ns
        return True

    def hopeless(self) -> list[tuple[int, int, int]]:
        """See Selection."""
        now, free_at = self._now_ns, min(self._free_at)
        late = [each for each in self.jobs if free_at + each[WORK] > each[DEADLINE]]
        if late:
            self.jobs = [each for each in self.jobs if free_at + each[WORK] <= each[DEADLINE]]
        return [(each[NUMBER], free_at + each[WORK] - now, each[DEADLINE] - now) for each in late]

    def is_within(self) -> bool:
        """See Selection."""
        return all(entitled for _, _, _, _, entitled, _, _, _ in self.jobs)

    def stand_back(self, stakes: Stakes, reserve: Reserve | None) -> list[int]:
        """See Selection."""
        back = self._behind_alone(stakes)
        if reserve is not None:
            self._beside(stakes, reserve, back)
        if not back:
            return []
        kept, moved = list[Job](), list[Job]()
        for at, job in enumerate(self.jobs):
            if at in back:
                moved.append((job[RANK] + BEHIND, *job[DEADLINE:]))  # type: ignore[arg-type]
            else:
                kept.append(job)
        self.jobs = kept + moved
        return [job[NUMBER] for job in moved]

    def _behind_alone(self, stakes: Stakes) -> set[int]:
        """Positions of jobs beyond entitlements that have to wait so that those within are done when they are due.

        The lanes count as one that is as fast as all of them. Where the jobs within would be behind even alone, all
        beyond before them wait. Nobody waits for a lower priority.
        """
        begin, lanes = sum(self._free_at), len(self._free_at)
        back = set[int]()
        candidates = list[tuple[Sequence[float], int]]()
        pending = list[int]()
        loose, of_rank = 0, None
        for at, job in enumerate(self.jobs):
            rank, _, _, due_ns, entitled, _, _, work_ns = job
            if rank != of_rank:
                of_rank, candidates, pending, loose = rank, [], [], 0
            if not entitled:
                pending.append(at)
                loose += work_ns
            else:
                latest = (due_ns - work_ns) * lanes
                if begin > latest + loose:  # all of them are not enough: there is nothing to choose
                    back.update(pending, [other for _, other in candidates])
                    begin, candidates, pending, loose = begin - loose, [], [], 0
                elif begin > latest:
                    candidates += [(stakes.of(self.jobs[other]), other) for other in pending]
                    pending = []
                    heapify(candidates)
                    while begin > latest:
                        other = heappop(candidates)[1]
                        back.add(other)
                        begin -= self.jobs[other][WORK]
                        loose -= self.jobs[other][WORK]
            begin += work_ns
        return back

    def _beside(self, stakes: Stakes, reserve: Reserve, back: set[int]) -> None:
        """Put `back`, too, what is out of quota and would be late once what is to come has come before it.

        Jobs out of quota of lower priorities do not count: they are worth less, and go first where not all can stay.
        """
        begin, lanes, now, ranks = sum(self._free_at), len(self._free_at), self._now_ns, stakes.ranks
        loose, are_ranked, ahead_ns = dict[int, int](), len(set(ranks)) > 1, reserve.ahead_ns
        for at, (_, deadline_ns, _, _, entitled, _, owner, work_ns) in enumerate(self.jobs):
            if at in back:
                continue
            if not entitled:
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

    def select(self, stakes: Stakes, most: int) -> list[tuple[Job, Job]]:
        """See Selection. Of those up to a late one, and of its priority, the one of the least worth goes."""
        victims = list[tuple[Job, Job]]()
        if self.is_timely(due=False):
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
                        value = stakes.of(jobs[each])
                        if least is None or value < least:  # type: ignore[operator]
                            least, victim = value, each
                stakes.lost(jobs[victim][OWNER])
            else:
                candidates = candidates or Candidates(stakes, jobs.__getitem__)
                fresh = [each for each in range(added, at + 1) if jobs[each][RANK] == rank and each not in gone]
                candidates.add([(jobs[each][OWNER], stakes.place_of(jobs[each]), each) for each in fresh])
                added = at + 1
                victim = candidates.pop()
            victims.append((jobs[victim], jobs[at]))
            gone.add(victim)
            if victim == at:
                at += 1
            else:  # all behind it begin earlier: none of them is late that was not before
                times = sorted(self._free_at)
                for each in range(at):
                    if each not in gone:
                        heapreplace(times, times[0] + jobs[each][WORK])
        self.jobs = [job for each, job in enumerate(jobs) if each not in gone]
        return victims

    def behind_the_due(self, paused: int) -> list[int]:
        """See Selection: for such as are due before their deadlines, and wait or have paused."""
        first = dict[int, int]()
        for rank, _, number, due_ns, entitled, _, _, _ in self.jobs:
            if entitled and number >= -paused and due_ns < first.get(rank, due_ns + 1):
                first[rank] = due_ns
        return [
            number
            for rank, deadline_ns, number, _, entitled, _, _, _ in self.jobs
            if not entitled and rank in first and deadline_ns >= first[rank]
        ]
