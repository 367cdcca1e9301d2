"""One decision of a policy that selects: who is given up, and who waits for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import UNSET

from cotenant.core.snapshot import AccountView, Drop
from cotenant.policies.desk import Desk, hopeless
from cotenant.policies.ordered.jobs import DEADLINE, DUE, RANK, AnyColumn, Column, Jobs, Waiting
from cotenant.policies.ordered.reserve import FRESH_NS, Expected, Reserve
from cotenant.policies.ordered.selection import begin_ns, beside_reserve, select, standing_back
from cotenant.types import LossCause
from cotenant.work import Share, Work

_BEHIND = 1 << 20
"""Added to the priority of what stands back: behind everything that does not."""
_FAR_NS = 1 << 50
"""Deadlines beyond this, days ahead, are no nearer: their sums stay whole numbers of 64 bits."""
_FADES = 1 - 1 / 64
"""What a tenant's attainment counts for once one of its queries goes."""


class Selecting(Protocol):
    """What makes one such policy another than the next."""

    @property
    def lanes(self) -> tuple[Share, ...]:
        """Where it launches."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes of its lanes."""

    @property
    def reserves(self) -> bool:
        """Whether what is beyond entitlements leaves room for what is still to come."""

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """When queries of a tenant are due that are to be kept before others, by number."""

    def worth(self, jobs: Jobs, fared: AnyColumn, weights: AnyColumn) -> Sequence[AnyColumn]:
        """What jobs are worth: of two the one goes that is less in the first column in which they differ. `fared` are
        attainments of tenants, less for those who lose more in this decision, and `weights` theirs, by number."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known from decisions before: it would be found again, but not as soon."""

    waiting: Mapping[str, Waiting]
    reserve: Reserve | None


def give_up(policy: Selecting, desk: Desk, memory: object) -> Memory:
    """Give up what no lane could end in time any more, and what cannot be in time together; hold back who has to wait
    for others. The memory for the next decision."""
    known = memory if isinstance(memory, Memory) else Memory({}, None)
    needed_ns = partial(desk.quickest_ns, sizes=policy.sizes)
    inside = _Inside(desk, policy, known.waiting, needed_ns)
    reserve = _reserve(policy, desk, known.reserve, needed_ns) if policy.reserves else None
    _select(policy, desk, inside, reserve)
    return Memory(inside.seen, reserve)


def _reserve(policy: Selecting, desk: Desk, known: Reserve | None, needed_ns: Callable[[Work], int]) -> Reserve:
    """For what was asked for of late, within shares and beyond; `known` is that of a decision before."""
    snapshot, lanes, asks = desk.snapshot, len(policy.lanes), list[Expected]()
    if known is not None and snapshot.now_ns - known.made_ns < FRESH_NS:
        return known
    for name, account in snapshot.accounts.items():
        if name in snapshot.queues:
            tenant, asked = snapshot.queues[name].tenant, account.asked
            asks.append(Expected(tenant.slo_ns, needed_ns(tenant.work(0, 1)), min(asked, account.share * lanes), asked))
    return Reserve.of(asks, snapshot.now_ns)


def _select(policy: Selecting, desk: Desk, inside: _Inside, reserve: Reserve | None) -> None:
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
    snapshot, names = desk.snapshot, inside.tenants
    accounts, queues = snapshot.accounts, snapshot.queues
    fared = np.array([accounts[name].attainment if name in accounts else 1.0 for name in names])
    weights = np.array([queues[name].tenant.weight if name in queues else 1.0 for name in names])

    def value(jobs: Jobs) -> Sequence[AnyColumn]:
        return policy.worth(jobs, fared, weights)

    def note(owner: int) -> None:
        fared[owner] *= _FADES

    back = standing_back(jobs, free_at, value)
    if reserve is not None:
        beside_reserve(jobs, free_at, back, reserve.ahead_ns(jobs))
    held: list[int] = jobs.number[back].tolist()
    if held:
        jobs.rank[back] += _BEHIND
        jobs = jobs.at(back.argsort(kind="stable"))
    for victim in select(jobs, free_at, value, note):
        whose, other = names[jobs.owner[victim.job]], names[jobs.owner[victim.for_job]]
        why = f"given up: {jobs.work_ns[victim.job] / 1e6:.1f} ms of work, so that a query of {other!r} is in time"
        cause = LossCause.OWN_RATE if other == whose else LossCause.NEIGHBOUR
        whom = UNSET if other == whose else other
        for query in inside.numbers_of(int(jobs.number[victim.job])):
            gone[query] = Drop(query, why, cause, whom)
    if gone:
        desk.give_up(gone)
    if snapshot.free_mask:
        held += _behind_the_due(jobs, inside.paused)
        every = [query for number in held for query in inside.numbers_of(number) if query not in gone]
        if every:
            desk.hold_back(frozenset(every))


def _behind_the_due(jobs: Jobs, paused: int) -> list[int]:
    """Numbers of jobs beyond entitlements that are to wait for one within that is due before their deadlines, and that
    waits or has paused."""
    within = ((jobs.is_entitled > 0) & (jobs.number >= -paused)).nonzero()[0]
    ranks, dues = jobs.rank[within].tolist(), jobs.due_ns[within].tolist()
    found: list[int] = []
    for rank in dict.fromkeys(ranks):
        due = min([each for each, its_rank in zip(dues, ranks, strict=True) if its_rank == rank])
        late = (jobs.is_entitled == 0) & (jobs.deadline_ns >= due) & (jobs.rank == rank)
        found += jobs.number[late].tolist()
    return found


class _Inside:
    """All that is inside, at one decision."""

    __slots__ = ("batches", "free_at", "jobs", "paused", "seen", "tenants")

    def __init__(
        self, desk: Desk, policy: Selecting, seen: Mapping[str, Waiting], needed_ns: Callable[[Work], int]
    ) -> None:
        snapshot, now = desk.snapshot, desk.now_ns
        accounts, sure_ns = snapshot.accounts, snapshot.predictor.sure_ns

        def longer_ns(name: str, work_ns: int) -> int:
            """Time by which work within an entitlement is done early, so that it is in time when it runs longer."""
            return sure_ns(name, work_ns) - work_ns

        self.seen: dict[str, Waiting] = {}
        """What waits, by tenant: for the next decision, too."""
        self.tenants = list(snapshot.queues)
        """Names of tenants by their numbers."""
        blocks, ranks = list[Column](), set[int | None]()
        for owner, (name, queue) in enumerate(snapshot.queues.items()):
            if queue.queries:
                known, dues = seen.get(name), policy.dues(accounts.get(name))
                if known is None or known.edition is not queue.edition:
                    known = Waiting(queue, dues)
                self.seen[name] = known
                works = [needed_ns(work) for work in known.works]
                blocks.append(known.told(owner, [(work, longer_ns(name, work) if dues else 0) for work in works]))
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
            if tenant.name not in self.tenants:
                self.tenants.append(tenant.name)
            owner = self.tenants.index(tenant.name)
            within = [dues[query.id] for query in queries if query.id in dues]
            rank, deadline = min([query.rank for query in queries]), max([query.deadline_ns for query in queries])
            work_ns = needed_ns(tenant.work(batch.shape, batch.items, unit))
            due = min([*within, deadline - longer_ns(tenant.name, work_ns)]) if within else deadline
            rows.append((rank, deadline, -1 - len(rows), due, bool(within), len(queries), owner, work_ns))
            ranks.add(rank)
        blocks.append(np.array(rows, np.int64).reshape(-1, 8).T)
        every = np.concatenate(blocks, 1)
        times = every[DEADLINE : DUE + 1 : DUE - DEADLINE]
        times -= now
        np.minimum(times, _FAR_NS, out=times)
        is_one = len(ranks) == 1 and None not in ranks
        self.jobs = Jobs(
            every.take(
                every[DEADLINE].argsort(kind="stable") if is_one else np.lexsort((every[DEADLINE], every[RANK])), 1
            )
        )
        """All of them, in the policy's order."""

    def numbers_of(self, job: int) -> Sequence[int]:
        """The queries of a job, which has the number `job`."""
        return (job,) if job >= 0 else [query.id for query in self.batches[-1 - job].queries]
