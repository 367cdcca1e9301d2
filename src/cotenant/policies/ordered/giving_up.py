"""One decision of a policy that selects: who is given up, and who waits for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from cotenant.core.admission import hopeless
from cotenant.core.snapshot import AccountView, Drop, QueueView, Running, Snapshot
from cotenant.policies.desk import MOST_AT_ONCE, Desk, quickest_ns
from cotenant.policies.ordered.jobs import NUMBER, OWNER, WORK, Job, Number, Selection, Stakes, Waiting
from cotenant.policies.ordered.reserve import FRESH_NS, Expected, Reserve
from cotenant.policies.ordered.selection import FEW, Jobs
from cotenant.types import UNSET_RANK, LossCause, Tenant
from cotenant.work import Share, Work

if TYPE_CHECKING:
    from cotenant.policies.ordered.many_jobs import LongQueue


_SHORT = 32
"""Queries of a queue up to which a list is as quick to make as columns."""


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

    def rank_of(self, tenant: Tenant) -> int:
        """See BasePolicy."""

    def dues(self, account: AccountView | None) -> Mapping[int, int]:
        """When queries of a tenant are due that are to be kept before others, by number."""

    def fared(self, account: AccountView) -> float:
        """How well a tenant has fared, where that counts in the worth of its queries."""

    def worth(
        self, entitled: Number, fared: Number, weight: Number, rank: Number, work_ns: Number, answers: Number
    ) -> Sequence[Number]:
        """See jobs.Worth."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known from decisions before: it would be found again, but not as soon."""

    waiting: Mapping[str, Waiting | LongQueue]
    reserve: Reserve | None


_NOTHING = Memory({}, None)


def give_up(policy: Selecting, desk: Desk, memory: object, *, is_idle: bool) -> Memory:
    """Give up what no lane could end in time any more, and what cannot be in time together; where a lane `is_idle`,
    hold back who has to wait for others. The memory for the next decision."""
    known = memory if isinstance(memory, Memory) else _NOTHING
    needed_ns = partial(quickest_ns, desk.latency_ns, sizes=policy.sizes)
    inside = _Inside(desk, policy, known.waiting, needed_ns)
    reserve = _reserve(policy, desk.snapshot, known.reserve)
    _select(policy, desk, inside, reserve, is_idle=is_idle)
    return Memory(inside.seen, reserve)


def all_fit(policy: Selecting, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
    """Whether nothing has to go where a free lane ends the only candidate, this work, by its deadline: with what
    launches under way leave of their batches each job is in time even as the last one, so in any order."""
    rests = _leaving_rests(snapshot)
    if not rests:
        return True
    latency_ns, free_at = snapshot.predictor.latency_ns, _free_at(policy, snapshot)
    jobs = [(quickest_ns(latency_ns, work, policy.sizes), deadline_ns)]
    for run in rests:
        batch = run.batch
        rest = batch.tenant.work(batch.shape, batch.items, run.launch.work.end)
        jobs.append((quickest_ns(latency_ns, rest, policy.sizes), max([each.deadline_ns for each in batch.queries])))
    end_ns, lanes = sum(free_at) + sum([work_ns for work_ns, _ in jobs]), len(free_at)
    return all(end_ns - work_ns <= (latest_ns - work_ns) * lanes for work_ns, latest_ns in jobs)


def _leaving_rests(snapshot: Snapshot) -> Sequence[Running]:
    """The launches under way that leave units of their batch to be run, for queries that wait for it."""
    return [run for run in snapshot.running.values() if not run.launch.last and run.batch.queries]


def _free_at(policy: Selecting, snapshot: Snapshot) -> Sequence[int]:
    """When each lane is predicted to be free."""
    ends = dict.fromkeys([lane.mask for lane in policy.lanes], snapshot.now_ns)
    for run in snapshot.running.values():
        launch = run.launch
        end = run.started_ns + launch.predicted_ns
        for mask, until in ends.items():
            if mask & launch.share.mask and until < end:
                ends[mask] = end
    return tuple(ends.values())


def remembered(policy: Selecting, snapshot: Snapshot, memory: object) -> object:
    """The memory for the next decision after one without a choice."""
    known = memory if isinstance(memory, Memory) else _NOTHING
    reserve = _reserve(policy, snapshot, known.reserve)
    return memory if reserve is known.reserve and known is memory and not known.waiting else Memory({}, reserve)


def _reserve(policy: Selecting, snapshot: Snapshot, known: Reserve | None) -> Reserve | None:
    """For what was asked for of late, within shares and beyond, where the policy reserves; `known` is that of a
    decision before."""
    if not policy.reserves or (known is not None and snapshot.now_ns - known.made_ns < FRESH_NS):
        return known
    asks = list[Expected]()
    for name, account in snapshot.accounts.items():
        if name in snapshot.queues:
            tenant, asked = snapshot.queues[name].tenant, account.asked
            work_ns = quickest_ns(snapshot.predictor.latency_ns, tenant.work(0, 1), policy.sizes)
            asks.append(Expected(tenant.slo_ns, work_ns, min(asked, account.quota), asked, tenant.rank))
    return Reserve.of(asks, snapshot.now_ns)


def _select(policy: Selecting, desk: Desk, inside: _Inside, reserve: Reserve | None, *, is_idle: bool) -> None:
    jobs, snapshot = inside.jobs, desk.snapshot
    gone: dict[int, Drop] = {}
    is_easy = jobs.is_timely(due=True)
    if not is_idle and (is_easy or jobs.is_timely(due=False)):
        return  # nobody has to go, and nothing begins
    if is_easy and (reserve is None or jobs.is_within()):
        return
    late = [] if is_easy else jobs.hopeless()
    for number, needed_ns, left_ns in late[:MOST_AT_ONCE]:
        why = hopeless(needed_ns, left_ns)
        gone.update({query: Drop(query, why) for query in inside.numbers_of(number)})
    names, accounts, queues = inside.tenants, snapshot.accounts, snapshot.queues
    fared = [policy.fared(accounts[name]) if name in accounts else 1.0 for name in names]
    tenants, others = [queue.tenant for queue in queues.values()], len(names) - len(queues)
    weights = [each.weight for each in tenants] + [1.0] * others
    ranks = [each.rank for each in tenants] + [UNSET_RANK] * others
    stakes = Stakes(policy.worth, fared, weights, ranks)
    held = [number for number, _, _ in late[MOST_AT_ONCE:]] + jobs.stand_back(stakes, reserve)
    for victim, for_job in jobs.select(stakes, max(1, MOST_AT_ONCE - len(late))):
        whose, other = names[victim[OWNER]], names[for_job[OWNER]]
        why = f"given up: {victim[WORK] / 1e6:.1f} ms of work, so that a query of {other!r} is in time"
        cause = LossCause.OWN_RATE if other == whose else LossCause.NEIGHBOUR
        whom = UNSET if other == whose else other
        for query in inside.numbers_of(victim[NUMBER]):
            gone[query] = Drop(query, why, cause, whom)
    if gone:
        desk.give_up(gone)
    if is_idle:
        held += jobs.behind_the_due(inside.paused)
        every = [query for number in held for query in inside.numbers_of(number) if query not in gone]
        if every:
            desk.hold_back(frozenset(every))


class _Inside:
    """All that is inside, at one decision."""

    __slots__ = ("batches", "jobs", "paused", "seen", "tenants")

    def __init__(
        self,
        desk: Desk,
        policy: Selecting,
        seen: Mapping[str, Waiting | LongQueue],
        needed_ns: Callable[[Work], int],
    ) -> None:
        snapshot, now = desk.snapshot, desk.now_ns
        accounts, predictor = snapshot.accounts, snapshot.predictor
        self.tenants = list(snapshot.queues)
        """Names of tenants by their numbers: those of all queues, in their order, and then of others."""
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        begun += [(run.batch, run.launch.work.end) for run in _leaving_rests(snapshot)]
        self.paused = len(snapshot.paused)
        """Of the batches those in front."""
        self.batches = [batch for batch, _ in begun]
        """Those with queries in them: number -1 is the first of them."""
        rows = list[Job]()
        owners = {name: owner for owner, name in enumerate(self.tenants)} if begun else {}
        for batch, unit in begun:
            tenant, dues, queries = batch.tenant, policy.dues(accounts.get(batch.tenant.name)), batch.queries
            owner = owners.setdefault(tenant.name, len(owners))
            if owner == len(self.tenants):
                self.tenants.append(tenant.name)
            within = [dues[query.id] for query in queries if query.id in dues]
            rank, deadline = policy.rank_of(tenant), max([query.deadline_ns for query in queries])
            work_ns = needed_ns(tenant.work(batch.shape, batch.items, unit))
            longer_ns = predictor.sure_ns(tenant.name, work_ns, tenant.slo_ns) - work_ns if within else 0
            due = min([*within, deadline - longer_ns])
            rows.append((rank, deadline, -1 - len(rows), due, int(bool(within)), len(queries), owner, work_ns))
        free_at = _free_at(policy, snapshot)

        self.seen: dict[str, Waiting | LongQueue] = {}
        """What waits, by tenant: for the next decision, too."""
        waiting = [each for each in enumerate(snapshot.queues.items()) if each[1][1].queries]
        count = len(rows) + sum([len(queue.queries) for _, (_, queue) in waiting])
        is_few = count <= FEW
        short = FEW if is_few else _SHORT
        for owner, (name, queue) in waiting:
            known = seen.get(name)
            if known is None or known.edition is not queue.edition or (is_few and not known.jobs):
                dues = policy.dues(accounts.get(name))
                known = Waiting(queue, dues) if len(queue.queries) <= short else _long(queue, dues, known)
            if known.predictor is not predictor or known.owner != owner:
                known.tell(queue, owner, predictor, needed_ns)
            self.seen[name] = known
        every = self.seen.values()
        self.jobs: Selection
        """All of them."""
        if is_few:
            self.jobs = Jobs(sorted(chain(rows, *[each.jobs for each in every])), free_at, now)
        else:
            from cotenant.policies.ordered.many_jobs import ManyJobs  # numpy: few need none

            self.jobs = ManyJobs.of(every, rows, free_at, now)

    def numbers_of(self, job: int) -> Sequence[int]:
        """The queries of a job, which has the number `job`."""
        return (job,) if job >= 0 else [query.id for query in self.batches[-1 - job].queries]


def _long(queue: QueueView, dues: Mapping[int, int], known: Waiting | LongQueue | None) -> LongQueue:
    """Jobs of a long queue at its present edition; `known` has those of an edition before."""
    from cotenant.policies.ordered.many_jobs import LongQueue

    return LongQueue(queue, dues, known if isinstance(known, LongQueue) else None)
