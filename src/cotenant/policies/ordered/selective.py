"""Policies that choose whom to serve when not all can be in time: each names what it makes the most of.

Queries are served by the earliest deadline. At every arrival, and whenever a lane is free, all that is inside is laid
on the lanes; where some of it would be late, what is worth least goes at once, so that its client hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from msgspec import UNSET

from cotenant.core.snapshot import AccountView, Decision, Drop, DropRule, Snapshot
from cotenant.policies.desk import Desk, hopeless
from cotenant.policies.ordered.jobs import AnyColumn, Column, Jobs, Waiting
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.ordered.reserve import FRESH_NS, Asked, Reserve
from cotenant.policies.ordered.selection import Note, Value, begin_ns, beside_reserve, select, standing_back
from cotenant.types import LossCause
from cotenant.work import Work

_NONE: Mapping[int, int] = {}
_BEHIND = 1 << 20
"""Added to the priority of what stands back: behind everything that does not."""
_FAR_NS = 1 << 50
"""Deadlines beyond this, days ahead, are no nearer: their sums stay whole numbers of 64 bits."""
_FADES = 1 - 1 / 64
"""What a tenant's attainment counts for once one of its queries goes."""


class _Memory(NamedTuple):
    """What is known from decisions before: it would be found again, but not as soon."""

    waiting: Mapping[str, Waiting]
    reserve: Reserve | None


class _Inside:
    """All that is inside, at one decision."""

    __slots__ = ("batches", "free_at", "jobs", "paused", "seen", "tenants")

    def __init__(self, desk: Desk, policy: Most, seen: Mapping[str, Waiting]) -> None:
        snapshot, now = desk.snapshot, desk.now_ns
        accounts = snapshot.accounts
        self.seen: dict[str, Waiting] = {}
        """What waits, by tenant: for the next decision, too."""
        self.tenants = list(snapshot.queues)
        """Names of tenants by their numbers."""
        blocks, ranks, size = list[Column](), set[int | None](), policy.sizes[0]
        latency_ns = desk.latency_ns if len(policy.sizes) == 1 else policy.quickest_ns(desk)
        for owner, (name, queue) in enumerate(snapshot.queues.items()):
            if queue.queries:
                known = seen.get(name)
                if known is None or known.edition is not queue.edition:
                    known = Waiting(queue, policy.dues(accounts.get(name)))
                self.seen[name] = known
                blocks.append(known.told(owner, [latency_ns(work, size) for work in known.works]))
                ranks.add(known.rank)
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        self.paused = len(begun)
        """Of the batches those in front."""
        ends = dict.fromkeys([lane.mask for lane in policy.lanes], now)
        for run in snapshot.running.values():
            launch = run.launch
            end = run.started_ns + launch.predicted_ns
            for mask, until in ends.items():
                if mask & launch.share.mask and until < end:
                    ends[mask] = end
            if not launch.last and run.batch.queries:
                begun.append((run.batch, launch.work.end))
        self.free_at = [end - now for end in ends.values()]
        """When each lane is predicted to be free, from now on."""
        self.batches = [batch for batch, _ in begun]
        """Those with queries in them: number -1 is the first of them."""
        rows: list[tuple[int, ...]] = []
        for batch, unit in begun:
            tenant, dues, queries = batch.tenant, policy.dues(accounts.get(batch.tenant.name)), batch.queries
            if tenant.name not in snapshot.queues and tenant.name not in self.tenants:
                self.tenants.append(tenant.name)
            owner = self.tenants.index(tenant.name)
            within = [dues[query.id] for query in queries if query.id in dues]
            rank, deadline = min([query.rank for query in queries]), max([query.deadline_ns for query in queries])
            work_ns = latency_ns(tenant.work(batch.shape, batch.items, unit), size)
            due = min([*within, deadline])
            rows.append((rank, deadline, -1 - len(rows), due, bool(within), len(queries), owner, work_ns))
            ranks.add(rank)
        blocks.append(np.array(rows, np.int64).reshape(-1, 8).T)
        every = np.concatenate(blocks, 1)
        times = every[1:4:2]
        times -= now
        np.minimum(times, _FAR_NS, out=times)
        is_one = len(ranks) == 1 and None not in ranks
        self.jobs = Jobs(every.take(every[1].argsort(kind="stable") if is_one else np.lexsort(every[1::-1]), 1))
        """All of them, in the policy's order."""

    def numbers_of(self, job: int) -> Sequence[int]:
        """The queries of a job, which has the number `job`."""
        return (job,) if job >= 0 else [query.id for query in self.batches[-1 - job].queries]


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
            known = memory if isinstance(memory, _Memory) else _Memory({}, None)
            inside, reserve = _Inside(desk, self, known.waiting), self.reserve(desk, known.reserve)
            memory = _Memory(inside.seen, reserve)
            self._give_up(desk, inside, reserve)
        if snapshot.free_mask:
            self._fill_lanes(desk, snapshot.free_mask)
        return Decision(tuple(desk.starts), tuple(desk.drops), memory)

    def value_of(self, snapshot: Snapshot, tenants: Sequence[str]) -> tuple[Value, Note]:
        """How jobs are valued, the least going first; and what is told of each that goes."""
        return (lambda jobs: (-jobs.work_ns / jobs.answers,)), _ignore

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """When queries of a tenant are due that are to be kept before others, by number."""
        return _NONE

    def reserve(self, desk: Desk, known: Reserve | None) -> Reserve | None:
        """Room that is kept for what is still to come, where what is beyond entitlements has to leave some. `known` is
        that of a decision before."""
        return None

    def quickest_ns(self, desk: Desk) -> Callable[[Work, int], int]:
        """Predicts work in the lane that is quickest for it, whatever the size asked for."""
        sizes, latency_ns = self.sizes, desk.latency_ns
        return lambda work, _: min([latency_ns(work, size) for size in sizes])

    def _give_up(self, desk: Desk, inside: _Inside, reserve: Reserve | None) -> None:
        """Give up what no lane could end in time any more, and what cannot be in time together."""
        jobs, free_at = inside.jobs, inside.free_at
        gone: dict[int, Drop] = {}
        begin, lanes = begin_ns(jobs.work_ns, free_at), len(free_at)
        is_easy = bool((begin <= (jobs.due_ns - jobs.work_ns) * lanes).all())
        if not desk.snapshot.free_mask and (is_easy or (begin <= (jobs.deadline_ns - jobs.work_ns) * lanes).all()):
            return  # nobody has to go, and nothing begins
        if not is_easy:
            end = jobs.work_ns + min(free_at)
            is_late = end > jobs.deadline_ns
            late = zip(
                jobs.number[is_late].tolist(), end[is_late].tolist(), jobs.deadline_ns[is_late].tolist(), strict=True
            )
            for number, needed, left in late:
                gone.update({query: Drop(query, hopeless(needed, left)) for query in inside.numbers_of(number)})
            if gone:
                jobs = jobs.at((~is_late).nonzero()[0])
        if is_easy and (reserve is None or jobs.is_entitled.all()):
            return
        value, note = self.value_of(desk.snapshot, inside.tenants)
        back = standing_back(jobs, free_at, value)
        if reserve is not None:
            beside_reserve(jobs, free_at, back, reserve.ahead_ns(jobs))
        held = set(jobs.number[back].tolist())
        if held:
            jobs.rank[back] += _BEHIND
            jobs = jobs.at(back.argsort(kind="stable"))
        names = inside.tenants
        for victim in select(jobs, free_at, value, note):
            whose, other = names[jobs.owner[victim.job]], names[jobs.owner[victim.for_job]]
            why = f"given up: {jobs.work_ns[victim.job] / 1e6:.1f} ms of work, so that a query of {other!r} is in time"
            cause = LossCause.OWN_RATE if other == whose else LossCause.NEIGHBOUR
            whom = UNSET if other == whose else other
            for query in inside.numbers_of(int(jobs.number[victim.job])):
                gone[query] = Drop(query, why, cause, whom)
        if gone:
            desk.give_up(gone)
        if desk.snapshot.free_mask:
            held |= _behind_the_due(jobs, inside.paused)
            for number in [number for number in held if number < 0]:
                held.remove(number)
                held.update(inside.numbers_of(number))
            held.difference_update(gone)
            if held:
                desk.hold_back(frozenset(held))


class Weighted(Most):
    """The largest weight of answers in time: gives up the query with the least weight for its work."""

    __slots__ = ()

    name: ClassVar[str] = "weighted"

    def value_of(self, snapshot: Snapshot, tenants: Sequence[str]) -> tuple[Value, Note]:
        """Weight for work."""
        queues = snapshot.queues
        weights = np.array([queues[name].tenant.weight if name in queues else 1.0 for name in tenants])
        return (lambda jobs: (weights[jobs.owner] * jobs.answers / jobs.work_ns,)), _ignore


class Fair(Most):
    """The largest smallest attainment: device time is dealt in proportion to what each tenant asks for, and beyond that
    a query of the tenant goes that has fared best of late; of one tenant, the one of the most work."""

    __slots__ = ()

    name: ClassVar[str] = "fair"

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's part of all that is asked for."""
        return _NONE if account is None else account.even_due_ns

    def value_of(self, snapshot: Snapshot, tenants: Sequence[str]) -> tuple[Value, Note]:
        """What is entitled comes last; then how badly the tenant has fared, and the work for an answer."""
        accounts = snapshot.accounts
        fared = np.array([accounts[name].attainment if name in accounts else 1.0 for name in tenants])

        def value(jobs: Jobs) -> Sequence[AnyColumn]:
            return jobs.is_entitled, self._evened(jobs, -fared[jobs.owner]), -jobs.work_ns / jobs.answers

        def note(owner: int) -> None:
            fared[owner] *= _FADES

        return value, note

    def _evened(self, jobs: Jobs, fared: AnyColumn) -> AnyColumn:
        return fared


class Shares(Fair):
    """To each its share, and then as many answers as there can be: what is beyond its tenant's share goes first, the
    most work before the others; where nothing is, a query of the tenant that has fared best."""

    __slots__ = ()

    name: ClassVar[str] = "shares"

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """Those within the tenant's share."""
        return _NONE if account is None else account.due_ns

    def reserve(self, desk: Desk, known: Reserve | None) -> Reserve | None:
        """What was asked for of late, within shares and beyond."""
        snapshot, lanes = desk.snapshot, len(self.lanes)
        if known is not None and snapshot.now_ns - known.made_ns < FRESH_NS:
            return known
        quickest_ns, asks = self.quickest_ns(desk), list[Asked]()
        for name, account in snapshot.accounts.items():
            if name in snapshot.queues:
                tenant, asked = snapshot.queues[name].tenant, account.asked
                work_ns = quickest_ns(tenant.work(0, 1), 0)
                asks.append(Asked(tenant.slo_ns, work_ns, min(asked, account.share * lanes), asked))
        return Reserve.of(asks, snapshot.now_ns)

    def _evened(self, jobs: Jobs, fared: AnyColumn) -> AnyColumn:
        evened: AnyColumn = fared * jobs.is_entitled
        return evened


def _behind_the_due(jobs: Jobs, paused: int) -> set[int]:
    """Numbers of jobs beyond entitlements that are to wait for one within that is due before their deadlines, and that
    waits or has paused."""
    within = ((jobs.is_entitled > 0) & (jobs.number >= -paused)).nonzero()[0]
    ranks, dues = jobs.rank[within].tolist(), jobs.due_ns[within].tolist()
    found: set[int] = set()
    for rank in dict.fromkeys(ranks):
        due = min([each for each, its_rank in zip(dues, ranks, strict=True) if its_rank == rank])
        late = (jobs.is_entitled == 0) & (jobs.deadline_ns >= due) & (jobs.rank == rank)
        found.update(jobs.number[late].tolist())
    return found


def _ignore(owner: int) -> None:
    pass
