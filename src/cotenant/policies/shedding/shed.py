"""One shedding decision: which queries are dropped, and which are deferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from cotenant.core.admission import hopeless
from cotenant.core.snapshot import AccountView, Drop, QueueView, Running, Snapshot
from cotenant.policies.decision_context import MOST_AT_ONCE, DecisionContext, quickest_ns
from cotenant.policies.shedding.jobs import FEW, NUMBER, OWNER, WORK, FewJobs, Job, SelectionValues, ShortQueue, Value
from cotenant.policies.shedding.reserve import FRESH_NS, ExpectedDemand, Reserve
from cotenant.types import UNSET_RANK, LossCause, Tenant
from cotenant.work import Share, Work

if TYPE_CHECKING:
    from cotenant.policies.shedding.many_jobs import LongQueue, ManyJobs

_SHORT = 32
"""Queries of a queue up to which a list is as quick to make as columns."""


class SheddingPolicy(Protocol):
    """What differs between policies that shed queries."""

    @property
    def lanes(self) -> tuple[Share, ...]:
        """Shares that it launches in."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes of its lanes."""

    @property
    def reserves(self) -> bool:
        """Whether queries out of quota leave room for expected demand."""

    def rank_of(self, tenant: Tenant) -> int:
        """Order of a tenant's queries before all deadlines, smallest first."""

    def virtual_deadlines(self, account: AccountView | None) -> Mapping[int, int]:
        """Virtual deadlines of the queries of a tenant that are in quota, by number."""

    def attainment(self, account: AccountView) -> float:
        """Attainment of a tenant, where that counts in the value of its queries."""

    @property
    def value(self) -> Value:
        """Value of a job; the least is dropped first."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Caches of earlier decisions: queues as jobs, by tenant, and the reserve."""

    queues: Mapping[str, ShortQueue | LongQueue]
    reserve: Reserve | None


_NOTHING = Memory({}, None)


def shed(policy: SheddingPolicy, context: DecisionContext, memory: object, *, is_idle: bool) -> Memory:
    """Drop queries that no lane ends in time any more, and those that cannot all be in time together; where a lane
    `is_idle`, also defer queries. The memory for the next decision."""
    known = memory if isinstance(memory, Memory) else _NOTHING
    needed_ns = partial(quickest_ns, context.latency_ns, sizes=policy.sizes)
    live = _LiveJobs(context, policy, known.queues, needed_ns)
    reserve = _reserve(policy, context.snapshot, known.reserve)
    _select(policy, context, live, reserve, is_idle=is_idle)
    return Memory(live.queues, reserve)


def all_fit(policy: SheddingPolicy, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
    """Whether nothing is dropped where a free lane ends the only candidate, this work, by its deadline: with what
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


def remembered(policy: SheddingPolicy, snapshot: Snapshot, memory: object) -> object:
    """The memory for the next decision after one that had no choice."""
    known = memory if isinstance(memory, Memory) else _NOTHING
    reserve = _reserve(policy, snapshot, known.reserve)
    return memory if reserve is known.reserve and known is memory and not known.queues else Memory({}, reserve)


def _leaving_rests(snapshot: Snapshot) -> Sequence[Running]:
    """The launches under way that leave units of their batch to be run, for queries that wait for it."""
    return [run for run in snapshot.running.values() if not run.launch.last and run.batch.queries]


def _free_at(policy: SheddingPolicy, snapshot: Snapshot) -> Sequence[int]:
    """When each lane is predicted to be free."""
    ends = dict.fromkeys([lane.mask for lane in policy.lanes], snapshot.now_ns)
    for run in snapshot.running.values():
        launch = run.launch
        end = run.started_ns + launch.predicted_ns
        for mask, until in ends.items():
            if mask & launch.share.mask and until < end:
                ends[mask] = end
    return tuple(ends.values())


def _reserve(policy: SheddingPolicy, snapshot: Snapshot, known: Reserve | None) -> Reserve | None:
    """For the demand of late, in quota and out of it, where the policy reserves; `known` is that of an earlier
    decision."""
    if not policy.reserves or (known is not None and snapshot.now_ns - known.made_ns < FRESH_NS):
        return known
    demands = list[ExpectedDemand]()
    for name, account in snapshot.accounts.items():
        if name in snapshot.queues:
            tenant, lanes = snapshot.queues[name].tenant, account.asked
            work_ns = quickest_ns(snapshot.predictor.latency_ns, tenant.work(0, 1), policy.sizes)
            demands.append(ExpectedDemand(tenant.slo_ns, work_ns, min(lanes, account.quota), lanes, tenant.rank))
    return Reserve.of(demands, snapshot.now_ns)


def _select(
    policy: SheddingPolicy, context: DecisionContext, live: _LiveJobs, reserve: Reserve | None, *, is_idle: bool
) -> None:
    jobs, snapshot = live.jobs, context.snapshot
    gone: dict[int, Drop] = {}
    is_easy = jobs.are_timely(virtual=True)
    if not is_idle and (is_easy or jobs.are_timely(virtual=False)):
        return  # nothing has to go, and nothing begins
    if is_easy and (reserve is None or jobs.are_in_quota()):
        return
    late = [] if is_easy else jobs.hopeless()
    for number, needed_ns, left_ns in late[:MOST_AT_ONCE]:
        why = hopeless(needed_ns, left_ns)
        gone.update({query: Drop(query, why) for query in live.numbers_of(number)})
    names, accounts, queues = live.tenants, snapshot.accounts, snapshot.queues
    attainments = [policy.attainment(accounts[name]) if name in accounts else 1.0 for name in names]
    tenants, others = [queue.tenant for queue in queues.values()], len(names) - len(queues)
    weights = [each.weight for each in tenants] + [1.0] * others
    ranks = [each.rank for each in tenants] + [UNSET_RANK] * others
    values = SelectionValues(policy.value, attainments, weights, ranks)
    deferred = [number for number, _, _ in late[MOST_AT_ONCE:]] + jobs.defer(values, reserve)
    for victim, for_job in jobs.select(values, max(1, MOST_AT_ONCE - len(late))):
        owner, other = names[victim[OWNER]], names[for_job[OWNER]]
        why = f"given up: {victim[WORK] / 1e6:.1f} ms of work, so that a query of {other!r} is in time"
        cause = LossCause.OWN_RATE if other == owner else LossCause.NEIGHBOUR
        culprit = UNSET if other == owner else other
        for query in live.numbers_of(victim[NUMBER]):
            gone[query] = Drop(query, why, cause, culprit)
    if gone:
        context.shed(gone)
    if is_idle:
        deferred += jobs.behind_quotas(live.paused)
        every = [query for number in deferred for query in live.numbers_of(number) if query not in gone]
        if every:
            context.defer(frozenset(every))


class _LiveJobs:
    """All live work at one decision, as jobs.

    `tenants` has the names of tenants by their numbers: those of all queues, in their order, and then of others.
    `batches` are those that have begun: job -1 is the first of them; the first `paused` have paused. `queues` are the
    queues that are not empty, for the next decision, too.
    """

    __slots__ = ("batches", "jobs", "paused", "queues", "tenants")

    def __init__(
        self,
        context: DecisionContext,
        policy: SheddingPolicy,
        known_queues: Mapping[str, ShortQueue | LongQueue],
        needed_ns: Callable[[Work], int],
    ) -> None:
        snapshot = context.snapshot
        accounts, predictor = snapshot.accounts, snapshot.predictor
        self.tenants = list(snapshot.queues)
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        begun += [(run.batch, run.launch.work.end) for run in _leaving_rests(snapshot)]
        self.paused = len(snapshot.paused)
        self.batches = [batch for batch, _ in begun]
        rows = list[Job]()
        owners = {name: owner for owner, name in enumerate(self.tenants)} if begun else {}
        for batch, unit in begun:
            tenant, queries = batch.tenant, batch.queries
            virtual = policy.virtual_deadlines(accounts.get(tenant.name))
            owner = owners.setdefault(tenant.name, len(owners))
            if owner == len(self.tenants):
                self.tenants.append(tenant.name)
            in_quota = [virtual[query.id] for query in queries if query.id in virtual]
            rank, deadline = policy.rank_of(tenant), max([query.deadline_ns for query in queries])
            work_ns = needed_ns(tenant.work(batch.shape, batch.items, unit))
            longer_ns = predictor.upper_ns(tenant.name, work_ns, tenant.slo_ns) - work_ns if in_quota else 0
            virtual_ns = min([*in_quota, deadline - longer_ns])
            rows.append((rank, deadline, -1 - len(rows), virtual_ns, int(bool(in_quota)), len(queries), owner, work_ns))
        free_at = _free_at(policy, snapshot)
        self.queues: dict[str, ShortQueue | LongQueue] = {}
        waiting = [each for each in enumerate(snapshot.queues.items()) if each[1][1].queries]
        count = len(rows) + sum([len(queue.queries) for _, (_, queue) in waiting])
        is_few = count <= FEW
        short = FEW if is_few else _SHORT
        for owner, (name, queue) in waiting:
            known = known_queues.get(name)
            if known is None or known.edition is not queue.edition or (is_few and not known.jobs):
                virtual = policy.virtual_deadlines(accounts.get(name))
                known = ShortQueue(queue, virtual) if len(queue.queries) <= short else _long(queue, virtual, known)
            if known.predictor is not predictor or known.owner != owner:
                known.tell(queue, owner, predictor, needed_ns)
            self.queues[name] = known
        every = self.queues.values()
        self.jobs: FewJobs | ManyJobs
        if is_few:
            self.jobs = FewJobs(sorted(chain(rows, *[each.jobs for each in every])), free_at, snapshot.now_ns)
        else:
            from cotenant.policies.shedding.many_jobs import ManyJobs  # numpy: few need none

            self.jobs = ManyJobs.of(every, rows, free_at, snapshot.now_ns)

    def numbers_of(self, job: int) -> Sequence[int]:
        """The queries of a job, which has the number `job`."""
        return (job,) if job >= 0 else [query.id for query in self.batches[-1 - job].queries]


def _long(queue: QueueView, virtual: Mapping[int, int], known: ShortQueue | LongQueue | None) -> LongQueue:
    """Jobs of a long queue at its present edition; `known` has those of an edition before."""
    from cotenant.policies.shedding.many_jobs import LongQueue

    return LongQueue(queue, virtual, known if isinstance(known, LongQueue) else None)
