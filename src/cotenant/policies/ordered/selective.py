"""Policies that choose whom to serve when not all can be in time: each names what it makes the most of.

Queries are served by the earliest deadline. At every arrival, and whenever a lane is free, all that is inside is laid
on the lanes; where some of it would be late, what is worth least goes at once, so that its client hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import ClassVar

from msgspec import UNSET

from cotenant.core.snapshot import AccountView, Decision, Drop, DropRule, Snapshot
from cotenant.policies.desk import Desk, hopeless
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.ordered.selection import Job, Note, Value, select, standing_back
from cotenant.types import LossCause
from cotenant.work import Work

_NONE: Mapping[int, int] = {}
_BEHIND = 1 << 20
"""Added to the priority of what stands back: behind everything that does not."""


@dataclass(frozen=True, slots=True)
class Most(ListPolicy):
    """As many answers in time as there can be: gives up the query that needs the most work."""

    preempt: bool = True

    name: ClassVar[str] = "most"

    @property
    def selects(self) -> bool:
        """See Policy: a client hears at once that its query is given up."""
        return self.drop is DropRule.HOPELESS

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Give up what cannot be in time together, then fill the free lanes with the earliest deadlines."""
        desk = Desk(snapshot, self.drop, self.batch_key)
        if desk.drops_hopeless:
            self._give_up(desk)
        if snapshot.free_mask:
            self._fill_lanes(desk, snapshot.free_mask)
        return Decision(tuple(desk.starts), tuple(desk.drops), memory)

    def value_of(self, snapshot: Snapshot) -> tuple[Value, Note]:
        """How a job is valued, the least going first; and what is told of each that goes."""
        return (lambda job: (-job.work_ns / len(job.queries),)), _ignore

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """When queries of a tenant are due that are to be kept before others, by number."""
        return _NONE

    def _give_up(self, desk: Desk) -> None:
        """Give up what no lane could end in time any more, and what cannot be in time together."""
        begun, free_at = self._begun(desk)
        if self._is_easy(desk, begun, sum(free_at)):
            return
        jobs = sorted([*self._queued(desk), *begun])
        now, first = desk.now_ns, min(free_at)
        gone: dict[int, Drop] = {}
        able: list[Job] = []
        for job in jobs:
            if first + job.work_ns <= job.deadline_ns:
                able.append(job)
            else:
                why = hopeless(first - now + job.work_ns, job.deadline_ns - now)
                gone.update({number: Drop(number, why) for number in job.queries})
        value, note = self.value_of(desk.snapshot)
        back = standing_back(able, free_at, value)
        if back:
            able = [job for job in able if job.queries not in back] + [
                job._replace(rank=job.rank + _BEHIND) for job in able if job.queries in back
            ]
        for job, other in select(able, free_at, value, note):
            why = f"given up: {job.work_ns / 1e6:.1f} ms of work, so that a query of {other.tenant!r} can be in time"
            cause = LossCause.OWN_RATE if other.tenant == job.tenant else LossCause.NEIGHBOUR
            whom = UNSET if other.tenant == job.tenant else other.tenant
            gone.update({number: Drop(number, why, cause, whom) for number in job.queries})
        if gone:
            desk.give_up(gone)
        if back:
            desk.hold_back(frozenset([number for numbers in back for number in numbers if number not in gone]))

    def _is_easy(self, desk: Desk, begun: Sequence[Job], busy_ns: int) -> bool:
        """Whether all will be done when due were the lanes one fast one: as a rule, and seen sooner than by jobs."""
        accounts, lanes = desk.snapshot.accounts, len(self.lanes)
        laid = [(job.key, job.due_ns - job.work_ns, job.work_ns) for job in begun]
        for name, queue in desk.snapshot.queues.items():
            if not queue.queries:
                continue
            if not queue.are_alike:
                return False
            head = queue.queries[0]
            work, dues = self._work_ns(desk, queue.tenant.work(head.shape, head.items)), self.dues(accounts.get(name))
            if dues:
                laid += [(key, dues.get(key[2], key[1]) - work, work) for key in queue.keys]
            else:
                laid += [(key, key[1] - work, work) for key in queue.keys]
        laid.sort()
        starts = accumulate([work for _, _, work in laid], initial=busy_ns)
        return min(map(sub, [latest * lanes for _, latest, _ in laid], starts), default=0) >= 0

    def _queued(self, desk: Desk) -> list[Job]:
        """What waits and may be given up."""
        snapshot = desk.snapshot
        accounts, jobs = snapshot.accounts, list[Job]()
        for name, queue in snapshot.queues.items():
            if not queue.queries:
                continue
            tenant, known = queue.tenant, dict[tuple[int, int], int]()
            weight, dues = tenant.weight, self.dues(accounts.get(name))
            for key, query in zip(queue.keys, queue.queries, strict=True):
                at = (query.shape, query.items)
                work = known.get(at)
                if work is None:
                    work = known[at] = self._work_ns(desk, tenant.work(*at))
                number, deadline = query.id, query.deadline_ns
                due = dues.get(number)
                jobs.append(
                    Job(key, work, deadline, deadline, query.rank, name, weight, (number,), False)
                    if due is None
                    else Job(key, work, deadline, due, query.rank, name, weight, (number,), True)
                )
        return jobs

    def _begun(self, desk: Desk) -> tuple[list[Job], list[int]]:
        """What is left of batches that have begun, and when each lane will be free."""
        snapshot, now = desk.snapshot, desk.now_ns
        accounts, jobs = snapshot.accounts, list[Job]()
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        free_at = dict.fromkeys([lane.mask for lane in self.lanes], now)
        for run in snapshot.running.values():
            launch = run.launch
            end = max(now, run.started_ns + launch.predicted_ns)
            for mask in free_at:
                if mask & launch.share.mask:
                    free_at[mask] = max(free_at[mask], end)
            if not launch.last and run.batch.queries:
                begun.append((run.batch, launch.work.end))
        for batch, unit in begun:
            tenant, queries = batch.tenant, batch.queries
            dues = self.dues(accounts.get(tenant.name))
            numbers = tuple([query.id for query in queries])
            deadline = max([query.deadline_ns for query in queries])
            due = min([dues.get(number, deadline) for number in numbers])
            jobs.append(
                Job(
                    self.batch_key(batch, snapshot.predictor),
                    self._work_ns(desk, tenant.work(batch.shape, batch.items, unit)),
                    deadline,
                    due,
                    min([query.rank for query in queries]),
                    tenant.name,
                    tenant.weight * len(numbers),
                    numbers,
                    any(number in dues for number in numbers),
                )
            )
        return jobs, list(free_at.values())

    def _work_ns(self, desk: Desk, work: Work) -> int:
        """Predicted time of work in the lane that is quickest for it."""
        if len(self.sizes) == 1:
            return desk.latency_ns(work, self.sizes[0])
        return min([desk.latency_ns(work, size) for size in self.sizes])


class Weighted(Most):
    """The largest weight of answers in time: gives up the query with the least weight for its work."""

    __slots__ = ()

    name: ClassVar[str] = "weighted"

    def value_of(self, snapshot: Snapshot) -> tuple[Value, Note]:
        """Weight for work."""
        return (lambda job: (job.weight / job.work_ns,)), _ignore


class Shares(Most):
    """To each its share, and then as many answers as there can be: what is beyond its tenant's share goes first."""

    __slots__ = ()

    name: ClassVar[str] = "shares"

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's share."""
        return _NONE if account is None else account.due_ns

    def value_of(self, snapshot: Snapshot) -> tuple[Value, Note]:
        """As `most` among what is beyond shares; where nothing is, of the tenant that has fared best."""
        fared = {name: account.attainment for name, account in snapshot.accounts.items()}

        def value(job: Job) -> tuple[float, ...]:
            work = -job.work_ns / len(job.queries)
            return (1.0, -fared.get(job.tenant, 1.0), work) if job.is_entitled else (0.0, work)

        return value, _noting(fared)


class Fair(Most):
    """The largest smallest attainment: device time is dealt in proportion to what each tenant asks for, and beyond that
    a query of the tenant goes that has fared best of late."""

    __slots__ = ()

    name: ClassVar[str] = "fair"

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's part of all that is asked for."""
        return _NONE if account is None else account.even_due_ns

    def value_of(self, snapshot: Snapshot) -> tuple[Value, Note]:
        """How badly the tenant has fared; of one tenant, the most work goes first."""
        fared = {name: account.attainment for name, account in snapshot.accounts.items()}

        def value(job: Job) -> tuple[float, ...]:
            return (float(job.is_entitled), -fared.get(job.tenant, 1.0), -job.work_ns / len(job.queries))

        return value, _noting(fared)


def _ignore(job: Job) -> None:
    pass


def _noting(fared: dict[str, float]) -> Note:
    def note(job: Job) -> None:
        fared[job.tenant] = fared.get(job.tenant, 1.0) * (1 - 1 / 64)

    return note
