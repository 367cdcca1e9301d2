"""The engine: the only thing that changes scheduling state. Events in, actions out.

Every query that arrives gets exactly one Respond action, whatever fails. The engine owns waiting queries and running
launches; the policy decides; drivers carry out the actions and report back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, structs

from cotenant.core.actions import Action, Enqueue, Expand, Launch, LookAhead, Probe, Release, Respond
from cotenant.core.admission import Gate, gate_of, refusal, sizes_to_try
from cotenant.core.batches import Batch, BegunBatches
from cotenant.core.decisions import fault_of, is_behind
from cotenant.core.events import (
    MOMENTS,
    AnswerLate,
    ApplicationArrived,
    ApplicationEnded,
    DrainStarted,
    Event,
    LaunchEnded,
    LaunchExpanded,
    LookAheadDue,
    ModelOpening,
    PolicyChanged,
    PredictorChanged,
    QueryArrived,
    QueryCancelled,
    QueryRefused,
    QueryWithdrawn,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
    TimerFired,
)
from cotenant.core.expiries import Expiries
from cotenant.core.fair_queues import FairQueues
from cotenant.core.faults import RETRY_NS, PolicyGuard
from cotenant.core.launches import Launches
from cotenant.core.lifecycle import (
    LOOK_TRANSITIONS,
    NEXT_TRANSITIONS,
    SERVICE_TRANSITIONS,
    BatchState,
    LookState,
    LookStep,
    NextState,
    NextStep,
    QueryState,
    QueryStep,
    ServiceState,
    ServiceStep,
    next_query_state,
)
from cotenant.core.predictor import Predictor
from cotenant.core.probes import Probes
from cotenant.core.queues import Live, TenantQueues
from cotenant.core.snapshot import Ask, Decision, Moment, Policy, Snapshot, Start
from cotenant.errors import ProtocolViolationError
from cotenant.types import LossCause, Outcome, Query, StageQuery, Tenant
from cotenant.work import Machine

# The members that every query meets: looking one up in its enumeration costs 0.1 us in Python 3.11.
_CHANGED = "its model is being changed"
_NOTES = (ApplicationArrived, ApplicationEnded, AnswerLate, ModelOpening)
_NEW = QueryState.NEW
_ADMIT, _FINISH, _LAUNCH = QueryStep.ADMIT, QueryStep.FINISH, QueryStep.LAUNCH
_PAUSED, _DOOMED = BatchState.PAUSED, BatchState.DOOMED
_DRAINING = ServiceState.DRAINING
_ANSWERED = Outcome.ANSWERED
_NEVER = 1 << 62
_PLACES = {BatchState.RUNNING: "while it was running", BatchState.PAUSED: "between two of its segments"}


class Engine:
    """Turns events into actions. Not thread-safe: a driver serialises the calls.

    `handle` raises ProtocolViolationError for an event that is impossible in the present state: a bug of the driver or
    an executor, never of a client. A fault of a policy affects one call alone: see `core.faults`.
    The constructor raises InvalidValueError for a policy spec that is invalid on this machine (`PolicySpec.check`).
    """

    def __init__(self, tenants: Iterable[Tenant], policy: Policy, predictor: Predictor, machine: Machine) -> None:
        self.guard = PolicyGuard()
        self.predictor, self._key = predictor, self.guard.key
        self._queues, self._fair_queues = TenantQueues(), FairQueues()
        self._live: dict[int, Live] = {}
        self._batches = BegunBatches()
        self._launches = Launches(machine.mask)
        self._expiries = Expiries(policy.spec.drop)
        self._probes = Probes()
        self._machine = machine
        self._devices = {each.device: each for each in machine.devices}
        self._service, self._look, self._next = ServiceState.OPEN, LookState.IDLE, NextState.OPEN
        self._request_handlers: dict[Ask, Callable[[Any, int, list[Action]], None]] = {
            Ask.START: self._request_start,
            Ask.SELECT: self._request_selection,
            **{ask: partial(self._request_group, ask) for ask in (Ask.GROUP, Ask.GROUP_ANEW, Ask.NEXT_GROUP)},
        }
        self._handlers: dict[type, Callable[[Any, int, list[Action]], None]] = {
            QueryArrived: self._on_arrival,
            LaunchEnded: self._on_launch_ended,
            LaunchExpanded: self._on_launch_expanded,
            TimerFired: self._on_timer,
            **dict.fromkeys((QueryCancelled, QueryWithdrawn), self._on_cancel),
            **dict.fromkeys(_NOTES, self._on_note),
            QueryRefused: self._on_refused,
            TenantAdded: self._on_tenant_added,
            TenantRemoved: self._on_tenant_removed,
            PredictorChanged: self._on_predictor,
            DrainStarted: self._on_drain,
            TenantSuspended: self._on_suspended,
            TenantChanged: self._on_tenant_changed,
            TenantResumed: self._on_resumed,
            LookAheadDue: self._on_plan_due,
            PolicyChanged: self._on_policy,
        }
        self._use(policy)
        for tenant in tenants:
            self._on_tenant_added(TenantAdded(tenant), 0, [])

    @property
    def policy(self) -> Policy:
        """The policy that decides, unless the fallback does."""
        return self.guard.policy

    @property
    def live(self) -> int:
        """Number of queries that have not ended."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Number of running launches."""
        return len(self._launches.running)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Tenants that may send queries now, suspended ones included."""
        return tuple(queue.tenant for queue in self._queues.known.values())

    @property
    def rated_part(self) -> float:
        """Share of all lanes that guaranteed rates need; above 1 each rate is divided by it."""
        return self._fair_queues.rated_part

    @property
    def launches(self) -> tuple[int, ...]:
        """Numbers of the running launches, then of the waiting ones."""
        return (*self._launches.running, *self._launches.waiting)

    def waiting(self, tenant: str) -> int:
        """Number of a tenant's queries that wait for their first launch; 0 for an unknown tenant."""
        queue = self._queues.known.get(tenant)
        return len(queue.queries) if queue else 0

    def gate(self, tenant: str, now_ns: int) -> Gate:
        """Admission state of a tenant, without regard to a query."""
        queues, draining = self._queues, self._service is _DRAINING
        return gate_of(queues.known.get(tenant), draining=draining, is_away=tenant in queues.suspended, now_ns=now_ns)

    def snapshot(self, now_ns: int) -> Snapshot:
        """The policy's view of the present state. Valid until the next event."""
        queues, launches = self._queues, self._launches
        return Snapshot(
            now_ns,
            queues.served,
            self._batches.paused,
            launches.running,
            launches.free_mask,
            self.predictor,
            queues.weights_differ,
            launches.waiting,
            launches.count,
            self._fair_queues.known,
        )

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Apply one event; returns the actions to carry out, in order. `now_ns` never decreases.

        Four steps: apply the event; expire queries; decide, as the policy's table says; set the timer.
        """
        actions: list[Action] = []
        self._handlers[type(event)](event, now_ns, actions)
        expiries = self._expiries
        if expiries.heap and expiries.heap[0][0] <= now_ns:
            self._expire(now_ns, actions)
        if type(event) is not QueryArrived or not event.more:  # one decision for queries that arrive together
            self._requests[type(event)](event, now_ns, actions)
        if self.guard.met and self.guard.settle(now_ns, actions):
            expiries.arm_at(now_ns + RETRY_NS, actions)
        heap = expiries.heap
        if heap and (expiries.timer_ns is None or heap[0][0] < expiries.timer_ns):
            expiries.arm(self._live, actions)
        return actions

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_arrival(self, event: QueryArrived, now_ns: int, actions: list[Action]) -> None:
        query = event.query
        if query.id in self._live:
            raise ProtocolViolationError(f"query {query.id} arrived twice")
        queue = self._queues.known.get(query.tenant)
        drop, predictor, ends = self._expiries.drop, self.predictor, self._service is _DRAINING
        refused = refusal(query, queue, drop=drop, predictor=predictor, sizes=self._sizes, draining=ends, now_ns=now_ns)
        if refused is not None and (probe := self._probe(query, refused.needed_ns, now_ns, actions)) is not None:
            query, refused = probe, None
        if refused is not None:
            next_query_state(_NEW, QueryStep.REJECT, query.id)
            actions.append(Respond(query.id, Outcome.REJECTED, refused.reason, refused.cause))
            if refused.is_full and queue is not None:
                self._fair_queues.refused(query, self._alone_ns(query, queue.tenant), now_ns)
            return
        assert queue is not None  # without one there is a reason
        if queue.limit is not None and not isinstance(query, StageQuery):
            queue.limit.take(now_ns)
        key = self._key(query, queue.tenant, predictor)
        live = self._live[query.id] = Live(query, key, next_query_state(_NEW, _ADMIT, query.id))
        self._fair_queues.enter(query, self._alone_ns(query, queue.tenant), now_ns)
        self._queues.push(key, query)
        self._expiries.watch(live)

    def _on_refused(self, event: QueryRefused, now_ns: int, actions: list[Action]) -> None:
        """Count a request that was refused before it was decoded: as one row, since its shape is unknown."""
        queue = self._queues.known.get(event.tenant)
        if event.cause is UNSET and queue is not None:
            query = Query(-1, event.tenant, event.arrival_ns, event.arrival_ns + queue.tenant.slo_ns)
            self._fair_queues.refused(query, self._alone_ns(query, queue.tenant), now_ns)

    def _on_launch_ended(self, event: LaunchEnded, now_ns: int, actions: list[Action]) -> None:
        run, error = self._launches.end(event.launch), event.error
        launch = run.launch
        if self._probes.inside:
            self._probes.ended(launch, now_ns - run.started_ns, now_ns, has_failed=error is not None)
        batch = self._batches.known[launch.batch]
        batch.open -= 1
        is_lost = error is None and not launch.last and launch.work.tenant in self._queues.suspended
        is_broken = is_lost or error is not None
        if is_broken or not batch.open:  # else other launches of the batch still run
            if is_lost:  # the worker died just after the launch, with the launch's tensors
                self._return(batch)
            elif error is not None and batch.is_merged:  # perhaps one query alone causes the error
                has_died = launch.work.tenant in self._queues.suspended  # and may die at each further attempt
                self._return(batch, 1 if has_died else (len(batch.queries) + 1) // 2)
            elif error is not None:
                for query in batch.queries:
                    failed = Respond(query.id, Outcome.FAILED, error, LossCause.FAILED)
                    self._close(query.id, QueryStep.FAIL, failed, actions)
            elif batch.until == batch.tenant.cuts[-1]:
                for query in batch.queries:
                    if now_ns <= query.deadline_ns:
                        self._close(query.id, _FINISH, Respond(query.id, _ANSWERED), actions)
                    else:
                        over = f"late by {(now_ns - query.deadline_ns) / 1e6:.1f} ms"
                        self._close(query.id, _FINISH, Respond(query.id, Outcome.LATE, over), actions)
            if is_broken:
                batch.until = 0
                self._end_batch(batch, actions)
            elif batch.until == batch.tenant.cuts[-1] or batch.state is _DOOMED:
                self._batches.end(batch)
                if batch.until < batch.tenant.cuts[-1]:
                    actions.append(Release(batch.id))
            else:
                self._batches.pause(batch, launch.share)
                for query in batch.queries:
                    self._expiries.watch(self._live[query.id])
        if self._launches.waiting:
            due = self._launches.due(event.launch)
            actions += [self._launches.wake(each, self._batches.known[each.batch], now_ns) for each in due]

    def _on_launch_expanded(self, event: LaunchExpanded, now_ns: int, actions: list[Action]) -> None:
        self._launches.expanded(event.launch)

    def _on_timer(self, event: TimerFired, now_ns: int, actions: list[Action]) -> None:
        self._expiries.timer_ns = None

    def _expire(self, now_ns: int, actions: list[Action]) -> None:
        """Drop expired queries, before any decision: no launch begins with a query that has timed out.

        The timer calls the engine in time; an event that comes before the timer has the same effect.
        """
        while (live := self._expiries.pop_due(self._live, now_ns)) is not None:
            batch = live.batch
            place = "in the queue" if batch is None else _PLACES[batch.state]
            if batch is not None and batch.open and self._launches.waiting_of(batch.id) == batch.open:
                place = "while its launch waited for others"
            reason = f"timed out after {(now_ns - live.query.arrival_ns) / 1e6:.1f} ms {place}"
            cause = LossCause.SLO if live.query.id in self._probes.inside else UNSET
            self._end(live.query.id, QueryStep.DROP, Outcome.DROPPED, reason, actions, cause)

    def _on_cancel(self, event: QueryCancelled | QueryWithdrawn, now_ns: int, actions: list[Action]) -> None:
        if event.query in self._live:
            cause = LossCause.CLIENT if type(event) is QueryCancelled else UNSET
            self._end(event.query, QueryStep.CANCEL, Outcome.CANCELLED, event.reason, actions, cause)

    def _on_note(self, event: Event, now_ns: int, actions: list[Action]) -> None:
        """Ignore an event that exists for traces and observers alone."""

    def _on_tenant_added(self, event: TenantAdded, now_ns: int, actions: list[Action]) -> None:
        if event.tenant.name in self._queues.known:
            raise ProtocolViolationError(f"tenant {event.tenant.name!r} is known already: remove it first")
        self._queues.add(event.tenant)
        self._probes.forget(event.tenant.name)
        self._set_quotas(now_ns)

    def _on_tenant_removed(self, event: TenantRemoved, now_ns: int, actions: list[Action]) -> None:
        if event.tenant not in self._queues.known:
            raise ProtocolViolationError(f"tenant {event.tenant!r} cannot be removed: it is unknown")
        for live in list(self._live.values()):
            if live.query.tenant == event.tenant:
                self._end(live.query.id, QueryStep.FAIL, Outcome.FAILED, event.reason, actions, LossCause.GONE)
        self._queues.drop(event.tenant)
        self._probes.forget(event.tenant)
        self._set_quotas(now_ns)

    def _on_suspended(self, event: TenantSuspended, now_ns: int, actions: list[Action]) -> None:
        if self._queues.suspend(event.tenant, event.reason):
            self._begin_anew(event.tenant, actions, running=False)

    def _on_tenant_changed(self, event: TenantChanged, now_ns: int, actions: list[Action]) -> None:
        name = event.tenant.name
        if name not in self._queues.known:
            raise ProtocolViolationError(f"tenant {name!r} cannot be changed: it is unknown")
        self._queues.suspend(name, _CHANGED)
        self._begin_anew(name, actions, running=True)
        self._queues.change(event.tenant)
        for query, key in self._queues.reorder(self._key, self.predictor, name):
            self._live[query.id].key = key
        self._probes.forget(name)

    def _begin_anew(self, tenant: str, actions: list[Action], *, running: bool) -> None:
        """Return queries of a tenant's batches to the queue: of batches that are paused or have waiting launches. With
        `running`, also of batches that need another launch after the running ones."""
        for batch in [batch for batch in self._batches.paused if batch.tenant.name == tenant]:
            self._return(batch)
            self._abandon(batch, actions)
        for number in self._launches.of_tenant(tenant, running=running):
            batch = self._batches.known[number]
            if batch.state is BatchState.RUNNING and not self._launches.is_ending(batch):
                self._return(batch)
                self._end_batch(batch, actions)

    def ending(self, tenant: str) -> frozenset[int]:
        """Numbers of a tenant's queries that end with the running launches of their batches."""
        batches = [self._batches.known[number] for number in self._launches.of_tenant(tenant, running=True)]
        return frozenset(query.id for each in batches if self._launches.is_ending(each) for query in each.queries)

    def _on_resumed(self, event: TenantResumed, now_ns: int, actions: list[Action]) -> None:
        is_changed = self._queues.suspended.get(event.tenant) is _CHANGED
        self._queues.resume(event.tenant)
        if is_changed:  # the latencies of the new model are known from now on
            self._set_quotas(now_ns)

    def _on_plan_due(self, event: LookAheadDue, now_ns: int, actions: list[Action]) -> None:
        self._look = LOOK_TRANSITIONS[self._look][LookStep.COME]

    def _on_predictor(self, event: PredictorChanged, now_ns: int, actions: list[Action]) -> None:
        self.predictor = event.predictor
        if self._fair_queues.rated_part:
            self._set_quotas(now_ns)

    def _on_policy(self, event: PolicyChanged, now_ns: int, actions: list[Action]) -> None:
        """Waiting queries get keys and expiries of the new policy. Batches and launches continue unchanged."""
        self._use(event.policy)
        self._set_quotas(now_ns)
        for query, key in self._queues.reorder(self._key, self.predictor):
            self._live[query.id].key = key
        self._expiries.renew(self._live.values(), self._drop)

    def _on_drain(self, event: DrainStarted, now_ns: int, actions: list[Action]) -> None:
        self._service = SERVICE_TRANSITIONS[self._service][ServiceStep.DRAIN]

    def _use(self, policy: Policy) -> None:
        """Use a policy from now on, with empty memory. Raises InvalidValueError; then the old policy stays."""
        spec = policy.spec
        spec.check(self._machine)
        requests = {
            event: self._request_handlers[spec.requests[MOMENTS.get(event, Moment.OTHER)]] for event in self._handlers
        }
        self._grouped, self._sizes, self._requests = spec.grouped, sizes_to_try(spec), requests
        self.guard.trust(policy)
        self._lanes, self._drop, self._again_ns = spec.lanes, spec.drop, _NEVER
        self._lane_masks = tuple(lane.mask for lane in spec.lanes)

    # --- decisions ------------------------------------------------------------------------------------------------

    def _request_start(self, event: Event, now_ns: int, actions: list[Action]) -> None:
        """Ask.START."""
        if self._queues.waiting or self._batches.paused or self._launches.expandable:
            free = self._launches.free_mask
            for mask in self._lane_masks:
                if mask & free == mask:
                    self._decide(now_ns, actions)
                    break

    def _request_selection(self, event: QueryArrived, now_ns: int, actions: list[Action]) -> None:
        """Ask.SELECT."""
        if self._queues.waiting:
            self._decide(now_ns, actions, event.query.id)
        else:
            self._request_start(event, now_ns, actions)

    def _request_group(self, ask: Ask, event: Event, now_ns: int, actions: list[Action]) -> None:
        """Ask.GROUP, GROUP_ANEW and NEXT_GROUP: start a group when none runs, else choose the next one.

        A policy may start the next group behind the running one. The engine then calls the policy again when the
        launches of the next group run, or have no queries left.
        """
        launches, was_booked = self._launches, self._next is NextState.BOOKED
        self._next = NEXT_TRANSITIONS[self._next][NextStep.WAITS if launches.waiting else NextStep.IS_CLEAR]
        if launches.waiting or not (self._queues.waiting or self._batches.paused):
            return
        is_idle = not launches.running
        if is_idle or ask is Ask.NEXT_GROUP:
            again_ns = self._decide(now_ns, actions).again_ns
            self._next = NEXT_TRANSITIONS[self._next][NextStep.WAITS if launches.waiting else NextStep.IS_CLEAR]
            self._again_ns = again_ns if again_ns > now_ns else _NEVER
            is_due = is_idle and bool(launches.running) and bool(self._queues.waiting or self._batches.paused)
        else:
            is_due = was_booked or ask is Ask.GROUP_ANEW or self._again_ns <= now_ns
        if is_due:
            if self._look is LookState.IDLE:
                self._look = LOOK_TRANSITIONS[self._look][LookStep.SEND]
                actions.append(LookAhead())
        elif self._again_ns != _NEVER:
            self._expiries.arm_at(self._again_ns, actions)

    def _fault_of(self, decision: Decision) -> str | None:
        """First violation of the contract in a decision, as the rest of a sentence; None for a valid one."""
        fault = fault_of(decision, self._live, self._batches.known, self._queues.served, self._launches, self._devices)
        if self._grouped and type(decision) is Decision:
            if decision.starts and not is_behind(decision.starts, self._launches):
                return "starts a group while another one runs"
            if type(decision.again_ns) is not int:
                return f"wants another decision at {decision.again_ns!r}, expected nanoseconds"
        return fault

    def _decide(self, now_ns: int, actions: list[Action], arrived: int = -1) -> Decision:
        """Call the policy and carry out its decision. A drop of the query `arrived` counts as a rejection."""
        decision = self.guard.ask(self.snapshot(now_ns), self._fault_of)
        for drop in decision.drops:
            outcome = Outcome.REJECTED if drop.query == arrived else Outcome.DROPPED
            self._end(drop.query, QueryStep.DROP, outcome, drop.reason, actions, drop.cause, drop.culprit)
        if starts := decision.starts:
            wholes = [(start.batch, start.queries) for start in starts] if len(starts) > 1 else []
            begun: dict[tuple[Query, ...], Batch] = {}
            for start in starts:
                is_part = bool(wholes) and wholes.count((start.batch, start.queries)) > 1
                self._start(start, begun, is_part, now_ns, actions)
        for expansion in decision.expansions:
            self._launches.expand(expansion.launch, expansion.share, expansion.predicted_ns)
            actions.append(Expand(expansion.launch, expansion.share))
        if decision.again_ns > now_ns and not self._grouped:
            self._expiries.arm_at(decision.again_ns, actions)
        return decision

    # --- queries and batches ------------------------------------------------------------------------------------------

    def _end(
        self,
        number: int,
        step: QueryStep,
        outcome: Outcome,
        reason: str,
        actions: list[Action],
        cause: LossCause | UnsetType = UNSET,
        culprit: str | UnsetType = UNSET,
    ) -> None:
        """End a live query, in any state, with its one outcome."""
        live = self._close(number, step, Respond(number, outcome, reason, cause, culprit), actions)
        batch = live.batch
        if batch is None:
            self._queues.remove(live.key, live.query)
            return
        batch.remove(live.query)
        if not batch.queries:
            if batch.state is _PAUSED:
                self._abandon(batch, actions)
            elif batch.state is BatchState.RUNNING:
                self._end_batch(batch, actions)
        elif batch.next_unit == 0 and batch.open and self._launches.waiting_of(batch.id) == batch.open:
            self._return(batch)  # its rows were never gathered: the other queries form a new batch
            self._end_batch(batch, actions)

    def _end_batch(self, batch: Batch, actions: list[Action]) -> None:
        """End a batch without live queries: cancel its waiting launches; its running launches still end."""
        if self._launches.waiting and (gone := self._launches.cancel(batch.id)):
            batch.open -= gone
            batch.until = 0  # the cancelled launches never run
        if not batch.open:
            self._batches.end(batch)
            actions.append(Release(batch.id))
        elif batch.state is not _DOOMED:
            self._batches.abandon(batch)

    def _abandon(self, batch: Batch, actions: list[Action]) -> None:
        """Remove a paused batch without live queries."""
        self._batches.abandon(batch)
        actions.append(Release(batch.id))

    def _return(self, batch: Batch, group_size: int = 0) -> None:
        """Return the queries of a batch that cannot continue to the queue; they will run from the start.

        With `group_size`, in groups of that many queries: the queries of a group merge with no others from now on.
        """
        for at, query in enumerate(batch.queries):
            live = self._live[query.id]
            live.state, live.batch = next_query_state(live.state, QueryStep.RETURN, query.id), None
            if group_size:
                self._batches.exclusions += at % group_size == 0
                live.query = structs.replace(query, merge_key=-self._batches.exclusions)
            live.key = self._key(live.query, batch.tenant, self.predictor)
            self._queues.push(live.key, live.query)
            self._expiries.watch(live)

    def _close(self, number: int, step: QueryStep, respond: Respond, actions: list[Action]) -> Live:
        """Give a live query its outcome; the caller removes it from its queue or batch."""
        live = self._live.pop(number)
        next_query_state(live.state, step, number)
        actions.append(respond)
        self._fair_queues.leave(live.query, respond.outcome)
        return live

    def _start(
        self, start: Start, begun: dict[tuple[Query, ...], Batch], is_part: bool, now_ns: int, actions: list[Action]
    ) -> None:
        """Launch one start. `begun` has the new batches of this decision that have several starts."""
        work, launches, batches = start.work, self._launches, self._batches
        if start.batch is not None:
            batch = batches.known[start.batch]
        elif not is_part or (known := begun.get(start.queries)) is None:
            batch = self._new_batch(start)
            if is_part:
                begun[start.queries] = batch
        else:
            batch = known
        batches.launch(batch, work.end)
        cuts = batch.tenant.cuts
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
            cuts[bisect_right(cuts, work.start) : bisect_left(cuts, work.end)] if start.is_expandable else (),
            start.basis,
        )
        actions.append(launch if launches.book(launch, batch, now_ns) else Enqueue(launch))

    def _new_batch(self, start: Start) -> Batch:
        batch = self._batches.begin(self._queues.served[start.work.tenant].tenant, start.queries)
        keys: list[tuple[int, ...]] = []
        for query in start.queries:
            live = self._live[query.id]
            live.state, live.batch = next_query_state(live.state, _LAUNCH, query.id), batch
            keys.append(live.key)
        self._queues.take(keys, start.queries, start.work.tenant)
        part = 1.0 if len(start.queries) == 1 else self._part_of_alone(batch)
        self._fair_queues.begin(start.work.tenant, start.queries, part)
        return batch

    def _probe(self, query: Query, needed_ns: int, now_ns: int, actions: list[Action]) -> Query | None:
        """The query as a probe, if `needed_ns`, its predicted latency above the SLO, is the reason to refuse it."""
        if not needed_ns:
            return None
        slo_ns = self._queues.known[query.tenant].tenant.slo_ns
        probe = self._probes.admit(query, needed_ns, slo_ns, -self._batches.exclusions - 1, now_ns)
        if probe is not None:
            self._batches.exclusions += 1
            actions.append(Probe(query.id, needed_ns))
        return probe

    def _alone_ns(self, query: Query, tenant: Tenant) -> int:
        """Predicted latency in ns of a query that runs alone in the first lane."""
        return self.predictor.latency_ns(tenant.work(query.shape, query.items), self._lanes[0].size)

    def _set_quotas(self, now_ns: int) -> None:
        """Compute the quotas again: tenants, lanes or the predictor have changed."""
        size, latency_ns = self._lanes[0].size, self.predictor.latency_ns
        tenants = [queue.tenant for queue in self._queues.known.values()]
        self._fair_queues.set_quotas(tenants, len(self._lanes), lambda each: latency_ns(each.work(0, 1), size), now_ns)

    def _part_of_alone(self, batch: Batch) -> float:
        """Predicted latency of a batch over that of its queries one by one; at most 1."""
        queries, tenant = batch.queries, batch.tenant
        size, latency_ns = self._lanes[0].size, self.predictor.latency_ns
        alone_ns = sum([latency_ns(tenant.work(query.shape, query.items), size) for query in queries])
        return min(1.0, latency_ns(tenant.work(batch.shape, batch.items), size) / max(1, alone_ns))
