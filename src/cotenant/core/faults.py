"""Fault isolation of policies: an exception, or a result that breaks the contract, affects one call alone.

Earlier effects of the event stay. Earliest deadline first decides the event instead of the policy. After MOST_FAULTS
faults within WITHIN_NS a fallback with quotas serves until a policy is set (docs/decisions/0049-faults.md).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop
from typing import Protocol

from msgspec import structs

from cotenant.core.actions import Action, GroupBasis, PolicyFault
from cotenant.core.admission import hopeless, sizes_to_try
from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView, Decision, Drop, DropRule, Policy, PolicySpec, Snapshot, Start
from cotenant.errors import CotenantError, ProtocolViolationError
from cotenant.types import Query, Tenant
from cotenant.work import Work

MOST_FAULTS = 3
"""Number of faults of a policy within WITHIN_NS after which the fallback serves."""
WITHIN_NS = 60_000_000_000
RETRY_NS = 100_000_000
"""Time after which the engine decides again if the fallback failed as well."""
DECIDE, QUEUE_KEY = "decide", "queue_key"
"""The calls of a policy while it serves."""
_LONGEST = 300
"""Characters of a reason."""

_Entry = tuple[int, int, int, int, int, Work, tuple[Query, ...], int | None]
"""A candidate: its order in three numbers, 1 for a query and 0 for a batch, that number, work, queries."""


class Decider(Protocol):
    """A policy, or the fallback."""

    @property
    def spec(self) -> PolicySpec:
        """Description of the decider; its name appears in traces and metrics."""

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Decide, as `Policy.decide` does."""


def deadline_key(query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
    """The fallback's key of a query: (priority, deadline, number)."""
    return (tenant.rank, query.deadline_ns, query.id)


class Fallback:
    """Work-conserving list scheduling in the shares of a policy, without code of the policies.

    1. Order: with `keeps_quotas` first queries in quota, by virtual deadline; then by (priority, deadline).
    2. Under the drop rule `hopeless`, drop a query that no share ends in time.
    3. Start each query alone and whole, in the smallest free share that ends it in time, else in the fastest free
       share.
    4. In place of a policy that launches groups: start nothing while a group runs.
    """

    __slots__ = ("_drops", "_grouped", "_quotas", "_shares", "_sizes", "spec")

    def __init__(self, spec: PolicySpec, *, keeps_quotas: bool) -> None:
        self.spec = structs.replace(spec, name="fallback-quota" if keeps_quotas else "fallback-edf")
        self._quotas, self._grouped = keeps_quotas, spec.grouped
        self._drops = spec.drop is DropRule.HOPELESS
        self._shares = sorted(spec.shares, key=lambda share: share.size)
        self._sizes = tuple(dict.fromkeys((*sizes_to_try(spec), *[share.size for share in self._shares])))

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Start the most urgent candidates on the free shares. `memory` is not used."""
        free, now_ns, latency_ns = snapshot.free_mask, snapshot.now_ns, snapshot.predictor.latency_ns
        if self._grouped and snapshot.running:
            return Decision()
        open_shares = [share for share in self._shares if share.mask & ~free == 0]
        waiting = self._waiting(snapshot) if open_shares else []
        heapify(waiting)
        basis = GroupBasis(snapshot.next_launch) if self._grouped else None
        starts: list[Start] = []
        drops: list[Drop] = []
        while waiting and open_shares:
            *_, work, queries, batch = heappop(waiting)
            left_ns = max([query.deadline_ns for query in queries]) - now_ns
            if self._drops:
                best_ns = min([latency_ns(work, size) for size in self._sizes])
                if best_ns > left_ns:
                    drops += [Drop(query.id, hopeless(best_ns, left_ns)) for query in queries]
                    continue
            by_size = {share.size: share for share in reversed(open_shares)}
            needed = {size: latency_ns(work, size) for size in sorted(by_size)}
            size = next((size for size, ns in needed.items() if ns <= left_ns), min(needed, key=needed.__getitem__))
            share = by_size[size]
            starts.append(Start(work, () if batch is not None else queries, share, needed[size], batch, basis=basis))
            open_shares = [each for each in open_shares if not each.mask & share.mask]
        return Decision(tuple(starts), tuple(drops))

    def _waiting(self, snapshot: Snapshot) -> list[_Entry]:
        """All candidates, in any order."""
        made: list[_Entry] = []
        for queue in snapshot.queues.values():
            tenant = queue.tenant
            for query in queue.queries:
                work = tenant.work(query.shape, query.items)
                made.append((*self._order(snapshot, tenant, query), 1, query.id, work, (query,), None))
        for batch in snapshot.paused:
            tenant = batch.tenant
            work = tenant.work(batch.shape, batch.items, batch.next_unit)
            made.append((*self._batch_order(snapshot, batch), 0, batch.id, work, tuple(batch.queries), batch.id))
        return made

    def _batch_order(self, snapshot: Snapshot, batch: BatchView) -> tuple[int, int, int]:
        return min([self._order(snapshot, batch.tenant, query) for query in batch.queries])

    def _order(self, snapshot: Snapshot, tenant: Tenant, query: Query) -> tuple[int, int, int]:
        queue = snapshot.fair_queues.get(tenant.name) if self._quotas else None
        due_ns = None if queue is None else queue.deadlines_ns.get(query.id)
        return (1, tenant.rank, query.deadline_ns) if due_ns is None else (0, due_ns, 0)


class PolicyGuard:
    """The policy of an engine, its fallbacks, and the faults of the present event.

    `faults` counts all faults by decider name and call. `error` is the exception of the last fault. `met` has the
    faults of the present event. `memory` is the memory of the last decision.
    """

    def __init__(self) -> None:
        self.faults: dict[tuple[str, str], int] = {}
        self.error: Exception | None = None
        self.met: list[PolicyFault] = []
        self._is_stuck = False
        """Whether the fallback failed as well: no decision was made in this event."""

    @property
    def falls_back(self) -> bool:
        """Whether the fallback serves instead of the policy."""
        return self._fallback is not None

    def trust(self, policy: Policy) -> None:
        """Use this policy from now on."""
        self.policy, self._edf = policy, Fallback(policy.spec, keeps_quotas=False)
        self._fallback: Fallback | None = None
        self.memory: object = None
        self._faulted_ns: list[int] = []

    def key(self, query: Query, tenant: Tenant, predictor: Predictor) -> tuple[int, ...]:
        """The query's key. After a faulty key, the other keys of the same event are by deadline."""
        if self._fallback is not None or (self.met and self.met[-1].call == QUEUE_KEY):
            return deadline_key(query, tenant, predictor)
        try:
            key = self.policy.queue_key(query, tenant, predictor)
            if type(key) is not tuple or key[-1] != query.id or (total := sum(key)) != total:
                raise ProtocolViolationError(
                    f"policy {self.policy.spec.name!r} gives query {query.id} the key {key!r}, expected a tuple of "
                    "integers that ends with its number"
                )
        except Exception as error:
            self._blame(self.policy.spec.name, QUEUE_KEY, error, query.id)
            return deadline_key(query, tenant, predictor)
        return key

    def ask(self, snapshot: Snapshot, fault: Callable[[Decision], str | None]) -> Decision:
        """A valid decision: the policy's, else one by deadline, else an empty one. `fault` names a decision's error."""
        decider: Decider = self._fallback or self.policy
        memory = self.memory
        while True:
            try:
                decision = decider.decide(snapshot, memory)
                if (found := fault(decision)) is None:
                    self.memory = decision.memory
                    return decision
                raise ProtocolViolationError(f"policy {decider.spec.name!r} {found}")
            except Exception as error:
                self._blame(decider.spec.name, DECIDE, error)
            if decider is self._edf:
                self._is_stuck, self.memory = True, None
                return Decision()
            decider, memory = self._edf, None

    def _blame(self, name: str, call: str, error: Exception, query: int = -1) -> None:
        """Record a fault."""
        self.error = error
        try:
            text = str(error) if isinstance(error, CotenantError) else f"{type(error).__name__}: {error}"
        except Exception:
            text = type(error).__name__
        self.met.append(PolicyFault(name, call, text[:_LONGEST], query))

    def settle(self, now_ns: int, actions: list[Action]) -> bool:
        """Report the faults of this event as actions. Whether no decision was made in it."""
        for fault in self.met:
            place = fault.policy, fault.call
            self.faults[place] = self.faults.get(place, 0) + 1
            if not self.falls_back and fault.policy == self.policy.spec.name:
                self._faulted_ns = [at for at in self._faulted_ns if at > now_ns - WITHIN_NS] + [now_ns]
                if len(self._faulted_ns) >= MOST_FAULTS:
                    self._fallback, self.memory = Fallback(self.policy.spec, keeps_quotas=True), None
                    fault = structs.replace(fault, falls_back=True)
            actions.append(fault)
        self.met, is_stuck, self._is_stuck = [], self._is_stuck, False
        return is_stuck
