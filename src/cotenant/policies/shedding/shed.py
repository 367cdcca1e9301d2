"""One load-shedding decision: the queries to drop and the queries to defer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET

from cotenant.core.admission import hopeless
from cotenant.core.snapshot import Drop, FairQueueView, QueueView, Running, Snapshot
from cotenant.policies.decision_context import MOST_AT_ONCE, DecisionContext, quickest_ns
from cotenant.policies.shedding.jobs import FEW, NUMBER, OWNER, WORK, FewJobs, Job, SelectionValues, ShortQueue, Value
from cotenant.policies.shedding.reserve import FRESH_NS, ExpectedDemand, Reserve
from cotenant.types import UNSET_RANK, LossCause, Tenant
from cotenant.work import Share, Work

if TYPE_CHECKING:
    from cotenant.policies.shedding.many_jobs import LongQueue, ManyJobs

_SHORT = 32
"""Length of a queue up to which a list is as fast as columns."""


class SheddingPolicy(Protocol):
    """The members in which load-shedding policies differ."""

    @property
    def lanes(self) -> tuple[Share, ...]:
        """Shares of its launches."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes of its lanes."""

    @property
    def reserves(self) -> bool:
        """Whether queries out of quota are deferred for expected demand."""

    def rank_of(self, tenant: Tenant) -> int:
        """Priority of a tenant, which goes before deadlines; smallest first."""

    def virtual_deadlines(self, queue: FairQueueView | None) -> Mapping[int, int]:
        """Virtual deadlines of the queries of a tenant that are in quota, by number."""

    def attainment(self, queue: FairQueueView) -> float:
        """Attainment of a tenant, for the value of its queries."""

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
    """Drop and defer queries of a decision; returns the memory for the next one.

    1. If all jobs meet their virtual deadlines: stop, unless the reserve may defer jobs.
    2. Drop hopeless queries: no lane ends them in time.
    3. Defer jobs out of quota that jobs in quota or expected demand need deferred (`FewJobs.defer`).
    4. Drop jobs of the least value until all others can be in time (`FewJobs.select`).
    5. If a lane `is_idle`, start jobs out of quota only after jobs in quota with an earlier virtual deadline.
    """
    known = memory if isinstance(memory, Memory) else _NOTHING
    needed_ns = partial(quickest_ns, context.latency_ns, sizes=policy.sizes)
    live = _LiveJobs(context, policy, known.queues, needed_ns)
    reserve = _reserve(policy, context.snapshot, known.reserve)
    _select(policy, context, live, reserve, is_idle=is_idle)
    return Memory(live.queues, reserve)


def all_fit(policy: SheddingPolicy, snapshot: Snapshot, work: Work, deadline_ns: int) -> bool:
    """Whether the only candidate, this work, and the remaining units of running batches are in time in any order. Each
    job is then in time even as the last one, so no query is dropped."""
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
    """The memory for the next decision, after a decision by the fast path."""
    known = memory if isinstance(memory, Memory) else _NOTHING
    reserve = _reserve(policy, snapshot, known.reserve)
    return memory if reserve is known.reserve and known is memory and not known.queues else Memory({}, reserve)


def _leaving_rests(snapshot: Snapshot) -> Sequence[Running]:
    """The running launches that are not the last ones of their batches, of batches with live queries."""
    return [run for run in snapshot.running.values() if not run.launch.last and run.batch.queries]


def _free_at(policy: SheddingPolicy, snapshot: Snapshot) -> Sequence[int]:
    """Predicted time in ns at which each lane is free."""
    ends = dict.fromkeys([lane.mask for lane in policy.lanes], snapshot.now_ns)
    for run in snapshot.running.values():
        launch = run.launch
        end = run.started_ns + launch.predicted_ns
        for mask, until in ends.items():
            if mask & launch.share.mask and until < end:
                ends[mask] = end
    return tuple(ends.values())


def _reserve(policy: SheddingPolicy, snapshot: Snapshot, known: Reserve | None) -> Reserve | None:
    """The reserve for recent demand in and out of quota, if the policy reserves; `known` if that is fresh enough."""
    if not policy.reserves or (known is not None and snapshot.now_ns - known.made_ns < FRESH_NS):
        return known
    demands = list[ExpectedDemand]()
    for name, queue in snapshot.fair_queues.items():
        if name in snapshot.queues:
            tenant, lanes = snapshot.queues[name].tenant, queue.demand
            work_ns = quickest_ns(snapshot.predictor.latency_ns, tenant.work(0, 1), policy.sizes)
            demands.append(ExpectedDemand(tenant.slo_ns, work_ns, min(lanes, queue.quota), lanes, tenant.rank))
    return Reserve.of(demands, snapshot.now_ns)


def _select(
    policy: SheddingPolicy, context: DecisionContext, live: _LiveJobs, reserve: Reserve | None, *, is_idle: bool
) -> None:
    jobs, snapshot = live.jobs, context.snapshot
    gone: dict[int, Drop] = {}
    is_easy = jobs.are_timely(virtual=True)
    if not is_idle and (is_easy or jobs.are_timely(virtual=False)):
        return  # no query has to be dropped, and no lane is free
    if is_easy and (reserve is None or jobs.are_in_quota()):
        return
    late = [] if is_easy else jobs.hopeless()
    for number, needed_ns, left_ns in late[:MOST_AT_ONCE]:
        why = hopeless(needed_ns, left_ns)
        gone.update({query: Drop(query, why) for query in live.numbers_of(number)})
    names, fair_queues, queues = live.tenants, snapshot.fair_queues, snapshot.queues
    attainments = [policy.attainment(fair_queues[name]) if name in fair_queues else 1.0 for name in names]
    tenants, others = [queue.tenant for queue in queues.values()], len(names) - len(queues)
    weights = [each.weight for each in tenants] + [1.0] * others
    ranks = [each.rank for each in tenants] + [UNSET_RANK] * others
    values = SelectionValues(policy.value, attainments, weights, ranks)
    deferred = [number for number, _, _ in late[MOST_AT_ONCE:]] + jobs.defer(values, reserve)
    for victim, for_job in jobs.select(values, max(1, MOST_AT_ONCE - len(late))):
        owner, other = names[victim[OWNER]], names[for_job[OWNER]]
        why = f"shed: {victim[WORK] / 1e6:.1f} ms of work, so that a query of {other!r} is in time"
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

    `tenants` has names by tenant number: those of all queues in order, then others. `batches` are the begun batches:
    job -1 is the first of them; the first `paused` ones are paused. `queues` caches the non-empty queues for the next
    decision.
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
        fair_queues, predictor = snapshot.fair_queues, snapshot.predictor
        self.tenants = list(snapshot.queues)
        begun = [(batch, batch.next_unit) for batch in snapshot.paused]
        begun += [(run.batch, run.launch.work.end) for run in _leaving_rests(snapshot)]
        self.paused = len(snapshot.paused)
        self.batches = [batch for batch, _ in begun]
        rows = list[Job]()
        owners = {name: owner for owner, name in enumerate(self.tenants)} if begun else {}
        for batch, unit in begun:
            tenant, queries = batch.tenant, batch.queries
            virtual = policy.virtual_deadlines(fair_queues.get(tenant.name))
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
                virtual = policy.virtual_deadlines(fair_queues.get(name))
                known = ShortQueue(queue, virtual) if len(queue.queries) <= short else _long(queue, virtual, known)
            if known.predictor is not predictor or known.owner != owner:
                known.tell(queue, owner, predictor, needed_ns)
            self.queues[name] = known
        every = self.queues.values()
        self.jobs: FewJobs | ManyJobs
        if is_few:
            self.jobs = FewJobs(sorted(chain(rows, *[each.jobs for each in every])), free_at, snapshot.now_ns)
        else:
            from cotenant.policies.shedding.many_jobs import ManyJobs  # numpy, which few jobs do not need

            self.jobs = ManyJobs.of(every, rows, free_at, snapshot.now_ns)

    def numbers_of(self, job: int) -> Sequence[int]:
        """The queries of the job with the number `job`."""
        return (job,) if job >= 0 else [query.id for query in self.batches[-1 - job].queries]


def _long(queue: QueueView, virtual: Mapping[int, int], known: ShortQueue | LongQueue | None) -> LongQueue:
    """Jobs of a long queue at its present edition; `known` has those of an earlier edition."""
    from cotenant.policies.shedding.many_jobs import LongQueue

    return LongQueue(queue, virtual, known if isinstance(known, LongQueue) else None)
