"""The books of an engine: what waits, what has begun, and what becomes of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from msgspec import UNSET, UnsetType, structs

from cotenant.core.accounts import Accounts
from cotenant.core.actions import Action, Enqueue, Launch, Probe, Release, Respond
from cotenant.core.expiries import Expiries
from cotenant.core.faults import Guarded
from cotenant.core.launches import Launches
from cotenant.core.lifecycle import BatchState, BatchStep, QueryStep, next_batch_state, next_query_state
from cotenant.core.predictor import Predictor
from cotenant.core.probes import Probes
from cotenant.core.queues import Batch, Live, TenantQueues
from cotenant.core.snapshot import Start
from cotenant.types import LossCause, Outcome, Query, Tenant
from cotenant.work import Machine, Share

# The members that every query meets: looking one up in its enumeration costs 0.1 us in Python 3.11.
_LAUNCH = QueryStep.LAUNCH
_LAUNCH_BATCH, _END_BATCH = BatchStep.LAUNCH, BatchStep.END
_PAUSED, _DOOMED = BatchState.PAUSED, BatchState.DOOMED


class Books(Guarded):
    """What the engine keeps, and the steps that its events and decisions share. All of it is for the engine alone."""

    def __init__(self, predictor: Predictor, machine: Machine, expiries: Expiries) -> None:
        super().__init__()
        self.predictor = predictor
        self._queues = TenantQueues()
        self._accounts = Accounts()
        self._live: dict[int, Live] = {}
        self._paused: list[Batch] = []
        """Batches between two decisions, in the order in which they stopped."""
        self._launches = Launches(machine.mask)
        self._batches: dict[int, Batch] = {}
        """Those that have begun and not ended."""
        self._lanes: tuple[Share, ...] = ()
        """Those of the policy."""
        self._expiries = expiries
        self._probes = Probes()
        self._batch_count = 0
        self._apart_count = 0
        """Groups of queries that are merged with nobody else."""

    def _end(
        self,
        number: int,
        step: QueryStep,
        outcome: Outcome,
        reason: str,
        actions: list[Action],
        cause: LossCause | UnsetType = UNSET,
        whom: str | UnsetType = UNSET,
    ) -> None:
        """End a live query, wherever it is, with its one outcome."""
        live = self._close(number, step, Respond(number, outcome, reason, cause, whom), actions)
        batch = live.batch
        if batch is None:
            self._queues.remove(live.key, live.query)
            return
        batch.remove(live.query)
        if not batch.queries:
            if batch.state is _PAUSED:
                self._abandon(batch, actions)
            elif batch.state is BatchState.RUNNING:
                self._give_up(batch, actions)
        elif batch.next_unit == 0 and batch.open and self._launches.waiting_of(batch.id) == batch.open:
            self._return(batch)  # its rows are not together yet, and never will be: the others form another batch
            self._give_up(batch, actions)

    def _give_up(self, batch: Batch, actions: list[Action]) -> None:
        """Nobody waits any more for a batch of which something has run: what of it waits never runs."""
        if self._launches.waiting and (gone := self._launches.cancel(batch.id)):
            batch.open -= gone
            batch.until = 0  # it will not get there
        if not batch.open:
            self._forget(batch, actions)
        elif batch.state is not _DOOMED:
            batch.queries = []
            self._step_batch(batch, BatchStep.ABANDON)

    def _forget(self, batch: Batch, actions: list[Action], is_unfinished: bool = True) -> None:
        """No launch of a batch is left, and none will come."""
        self._step_batch(batch, _END_BATCH)
        del self._batches[batch.id]
        if is_unfinished:
            actions.append(Release(batch.id))

    def _abandon(self, batch: Batch, actions: list[Action]) -> None:
        """Forget a paused batch that nobody waits for."""
        self._step_batch(batch, BatchStep.ABANDON)
        self._paused.remove(batch)
        del self._batches[batch.id]
        actions.append(Release(batch.id))

    def _return(self, batch: Batch, apart: int = 0) -> None:
        """Let the queries of a batch that cannot go on wait again, to be run anew.

        With `apart`, in groups of so many, whose queries are merged with nobody else from now on.
        """
        for at, query in enumerate(batch.queries):
            live = self._live[query.id]
            live.state, live.batch = next_query_state(live.state, QueryStep.RETURN, query.id), None
            if apart:
                self._apart_count += at % apart == 0
                live.query = structs.replace(query, merge_key=-self._apart_count)  # those of clients begin at 0
            live.key = self._key(live.query, batch.tenant, self.predictor)
            self._queues.push(live.key, live.query)
            self._expiries.watch(live)

    def _close(self, number: int, step: QueryStep, respond: Respond, actions: list[Action]) -> Live:
        """Give a live query its outcome; where it waited or ran is left to the caller."""
        live = self._live.pop(number)
        next_query_state(live.state, step, number)
        actions.append(respond)
        self._accounts.leave(live.query, respond.outcome)
        return live

    def _step_batch(self, batch: Batch, step: BatchStep) -> None:
        batch.state = next_batch_state(batch.state, step, batch.id)

    def _start(
        self,
        start: Start,
        begun: dict[tuple[Query, ...], Batch],
        is_part: bool,
        now_ns: int,
        actions: list[Action],
    ) -> None:
        """Launch one start. `begun` has the batches that this decision has begun, and that have several."""
        work, launches = start.work, self._launches
        if start.batch is not None:
            batch = self._batches[start.batch]
        elif not is_part or (known := begun.get(start.queries)) is None:
            batch = self._new_batch(start)
            if is_part:
                begun[start.queries] = batch
        else:
            batch = known
        if not batch.open:
            if start.batch is not None:
                self._paused.remove(batch)
            self._step_batch(batch, _LAUNCH_BATCH)
        cuts = batch.tenant.cuts
        batch.open += 1
        if work.end > batch.until:
            batch.until = work.end
        launch = Launch(
            launches.count,
            batch.id,
            batch.query_ids,
            work,
            work.end == cuts[-1],
            start.share,
            start.predicted_ns,
            is_part,
            start.after,
            cuts[bisect_right(cuts, work.start) : bisect_left(cuts, work.end)] if start.grows else (),
            start.basis,
        )
        actions.append(launch if launches.book(launch, batch, now_ns) else Enqueue(launch))

    def _new_batch(self, start: Start) -> Batch:
        batch = Batch(self._batch_count, self._queues.served[start.work.tenant].tenant, start.queries)
        self._batch_count += 1
        self._batches[batch.id] = batch
        keys: list[tuple[int, ...]] = []
        for query in start.queries:
            live = self._live[query.id]
            live.state = next_query_state(live.state, _LAUNCH, query.id)
            live.batch = batch
            keys.append(live.key)
        self._queues.take(keys, start.queries, start.work.tenant)
        part = 1.0 if len(start.queries) == 1 else self._part_of_alone(batch)
        self._accounts.begin(start.work.tenant, start.queries, part)
        return batch

    def _probe(self, query: Query, needed_ns: int, now_ns: int, actions: list[Action]) -> Query | None:
        """A query that is refused since it is predicted to need more than the SLO, as a probe; None where it is not."""
        if not needed_ns:
            return None
        slo_ns = self._queues.known[query.tenant].tenant.slo_ns
        probe = self._probes.admit(query, needed_ns, slo_ns, -self._apart_count - 1, now_ns)
        if probe is None:
            return None
        self._apart_count += 1
        actions.append(Probe(query.id, needed_ns))
        return probe

    def _alone_ns(self, query: Query, tenant: Tenant) -> int:
        """What a query is predicted to take of a lane, alone."""
        return self.predictor.latency_ns(tenant.work(query.shape, query.items), self._lanes[0].size)

    def _deal(self, now_ns: int) -> None:
        """Deal quotas anew: tenants, lanes or the predictor have changed."""
        size, latency_ns = self._lanes[0].size, self.predictor.latency_ns
        tenants = [queue.tenant for queue in self._queues.known.values()]
        self._accounts.deal(tenants, len(self._lanes), lambda each: latency_ns(each.work(0, 1), size), now_ns)

    def _part_of_alone(self, batch: Batch) -> float:
        """What a batch is predicted to take of what its queries would one by one; 1 at most."""
        queries, tenant = batch.queries, batch.tenant
        size, latency_ns = self._lanes[0].size, self.predictor.latency_ns
        alone_ns = sum([latency_ns(tenant.work(query.shape, query.items), size) for query in queries])
        return min(1.0, latency_ns(tenant.work(batch.shape, batch.items), size) / max(1, alone_ns))
