"""Causes of lost queries: gives each query that was not answered in time exactly one cause, and its culprit if any.

It observes the events and actions of the core, in the server, in the simulator and from a trace alike. Pure. Memory is
bounded by the pending queries, the tenants and one second of history.

Delays of a query are its time in the front end, its queueing delay, and the overrun of launches over the profile.
Overrun counts for its own launches and for those ahead of it; overrun without a processor is steal time. Queueing delay
is charged to tenants by the slot time that they used meanwhile. `Ledger.is_over_quota` compares demand with the quota.

1. A cause that the core states is kept. A policy's choice counts only while total demand exceeds the slots.
2. `SLO`, if the profile predicts a latency above the SLO.
3. `GONE`, if models were loaded for most of its time, and front-end time, steal time and overrun are a quarter or more
   of its delays.
4. The largest avoidable delay: front end, steal time, no worker, overrun, or queueing. Queueing is avoidable if its own
   tenant is over quota, or the tenant ahead of it. While total demand exceeds the slots, queueing goes first.
5. If that is less than a quarter of all delays: the tenant that it queued behind most.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET

from cotenant.core.actions import Action, Launch, Respond
from cotenant.core.events import (
    AnswerLate,
    ApplicationArrived,
    ApplicationEnded,
    Event,
    LaunchEnded,
    ModelOpening,
    PolicyChanged,
    PredictorChanged,
    QueryArrived,
    QueryRefused,
    TenantAdded,
    TenantChanged,
    TenantRemoved,
    TenantResumed,
    TenantSuspended,
)
from cotenant.core.predictor import Predictor
from cotenant.errors import CotenantError
from cotenant.predict.scales import scale_of
from cotenant.predict.table import TablePredictor
from cotenant.trace.ledger import Delays, Held, Ledger, LoadTimes, PendingQuery, set_quotas, split_wait
from cotenant.types import LossCause, Outcome, Query, StageQuery, Tenant
from cotenant.work import Share

_HISTORY_NS = 1_000_000_000
"""Age up to which snapshots of the slot time used are kept."""
_SNAPSHOT_NS = 20_000_000
"""Least time between two snapshots; they explain queries that are refused at arrival."""
_LEAST_PART = 0.25
"""Least part of all delays that an avoidable delay has to be to become the cause."""
_RECENT = 64
"""Last losses of a tenant that `leading` counts."""
CAUSE_NAMES: Mapping[LossCause, str] = {
    LossCause.OWN_RATE: "own load",
    LossCause.NEIGHBOUR: "other tenants",
    LossCause.SLOW: "slow launches",
    LossCause.STEAL_TIME: "steal time",
    LossCause.SLO: "SLO too short",
    LossCause.FRONT_END: "front end",
    LossCause.REPLY: "late response",
    LossCause.RATE_LIMIT: "rate limit",
    LossCause.CLIENT: "client",
    LossCause.FAILED: "failure",
    LossCause.GONE: "not served",
}
"""Names of causes in headings and log lines."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost query. `culprit` is the other tenant if the cause is NEIGHBOUR, else empty. `query` is -1 for a request
    that never became a query. `delays` is None where the cause did not depend on them."""

    query: int
    tenant: str
    arrival_ns: int
    ended_ns: int
    outcome: Outcome
    cause: LossCause
    culprit: str = ""
    delays: Delays | None = None


class LossAccount:
    """Gives every lost query its cause, by the rules of this module.

    `lanes` are the shares on which launches run. `on_loss` is called with each loss. A tenant without a table in the
    predictor is never over its quota.
    """

    def __init__(
        self,
        predictor: Predictor,
        lanes: Sequence[Share],
        tenants: Iterable[Tenant] = (),
        on_loss: Callable[[Loss], None] | None = None,
    ) -> None:
        self.lost: dict[str, Counter[LossCause]] = {}
        """Number of lost queries by tenant or application, and cause."""
        self.culprit: Counter[tuple[str, str]] = Counter()
        """Number of queries lost to another tenant: by tenant and culprit."""
        self._recent: dict[str, deque[LossCause]] = {}
        self._on_loss = on_loss
        self._predictor = predictor
        self._cost: dict[tuple[str, int, int], float] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._pending: dict[int, PendingQuery] = {}
        self._running: dict[int, tuple[Launch, int, float]] = {}
        """Running launches, with their start and the latency that the profile predicts."""
        self._applications: dict[int, ApplicationArrived] = {}
        self._stage_lost: dict[int, tuple[LossCause, str]] = {}
        """Cause and culprit of the last lost stage, by application's query."""
        self._held: Held | None = None
        """Cached result of `_held_now`; None after a launch started or ended. `_held_at_ns` is its time."""
        self._held_at_ns = 0
        self._snapshots: deque[tuple[int, Held]] = deque()
        self._load_times = LoadTimes()
        self.use_lanes(lanes)
        for tenant in tenants:
            self._add(tenant)

    def use_lanes(self, lanes: Sequence[Share]) -> None:
        """Use these lanes from now on."""
        self._slots = len({(share.device, core) for share in lanes for core in share.cores})
        self._size = min((share.size for share in lanes), default=1)
        self._widest = max((share.size for share in lanes), default=1)
        self._cost.clear()

    def use_predictor(self, predictor: Predictor) -> None:
        """Use this predictor from now on."""
        self._predictor = predictor
        self._cost.clear()

    def forget(self) -> None:
        """Drop pending queries and running launches: events are missing here, so their ends are not known."""
        for known in (self._pending, self._running, self._applications, self._stage_lost, self._snapshots):
            known.clear()
        self._held, self._load_times = None, LoadTimes()
        for ledger in self._ledgers.values():
            ledger.away_ns = None

    def leading(self, tenant: str) -> LossCause | None:
        """Most frequent cause of the last losses of a tenant; None before the first loss."""
        recent = tuple(self._recent.get(tenant, ()))  # a copy: other threads may append
        return Counter(recent).most_common(1)[0][0] if recent else None

    def __call__(self, time_ns: int, event: Event | None, actions: Sequence[Action], timing: object = None) -> None:
        """Observe an event and its actions. None stands for an event without information on lost queries."""
        kind = type(event)
        if kind is QueryArrived:
            self._arrived(event.query, time_ns)  # type: ignore[union-attr, arg-type]
        elif kind is LaunchEnded:
            self._ended(event, actions, time_ns)  # type: ignore[arg-type]
        elif kind in _RARE_EVENTS:
            self._handle_rare(event, time_ns)  # type: ignore[arg-type]
        for action in actions:
            if type(action) is Launch:
                self._started(action, time_ns)
            elif type(action) is Respond:
                self._responded(action, time_ns)

    # --- what happens ---------------------------------------------------------------------------------------------

    def _handle_rare(self, event: Event, now_ns: int) -> None:
        match event:
            case PredictorChanged():
                self.use_predictor(event.predictor)
            case PolicyChanged():
                self.use_lanes(event.policy.spec.lanes)
            case TenantAdded():
                self._add(event.tenant)
            case TenantChanged(tenant=tenant) if tenant.name in self._ledgers:
                self._ledgers[tenant.name].tenant = tenant
                self._cost.clear()
                set_quotas(self._ledgers.values())
            case TenantRemoved():
                self._ledgers.pop(event.tenant, None)
                set_quotas(self._ledgers.values())
            case TenantSuspended(tenant=name) if name in self._ledgers and self._ledgers[name].away_ns is None:
                self._ledgers[name].away_ns = now_ns
            case TenantResumed(tenant=name) if name in self._ledgers:
                self._resumed(self._ledgers[name], now_ns)
            case ApplicationArrived():
                self._applications[event.query] = event
            case ApplicationEnded():
                self._application_ended(event)
            case QueryRefused():
                self._refused(event, now_ns)
            case ModelOpening():
                self._load_times.add(event, now_ns)
            case AnswerLate():
                late = Outcome.LATE, LossCause.REPLY
                self._lose(Loss(event.query, event.tenant, event.arrival_ns, event.written_ns, *late))

    def _refused(self, event: QueryRefused, now_ns: int) -> None:
        ledger = self._ledgers.get(event.tenant)
        if event.cause is not UNSET or ledger is None:
            cause = LossCause.GONE if event.cause is UNSET else event.cause
            self._lose(Loss(-1, event.tenant, event.arrival_ns, now_ns, Outcome.REJECTED, cause))
            return
        self._arrived(Query(-1, event.tenant, event.arrival_ns, event.arrival_ns + ledger.tenant.slo_ns), now_ns)
        self._responded(Respond(-1, Outcome.REJECTED, event.reason), now_ns)

    def _resumed(self, ledger: Ledger, now_ns: int) -> None:
        for pending in self._pending.values() if ledger.away_ns is not None else ():
            if pending.query.tenant == ledger.tenant.name:
                pending.away_ns += ledger.away_for_ns(pending.came_ns, now_ns)
        ledger.away_ns = None

    def _add(self, tenant: Tenant) -> None:
        self._ledgers[tenant.name] = Ledger(tenant)
        self._held = None
        for _, held in self._snapshots:
            held.pop(tenant.name, None)  # a tenant that comes back starts from zero
        self._cost.clear()
        set_quotas(self._ledgers.values())

    def _arrived(self, query: Query, now_ns: int) -> None:
        ledger = self._ledgers.get(query.tenant)
        if ledger is not None:
            ledger.add_demand(self._slot_ns(ledger.tenant, query.shape, query.items), now_ns)
        self._pending[query.id] = PendingQuery(query, now_ns, self._held_now(now_ns))

    def _slot_ns(self, tenant: Tenant, shape: int, items: int) -> float:
        """Slot time of `items` rows on the smallest lane by the profile: the smaller of alone and in a full batch."""
        key = tenant.name, shape, items
        found = self._cost.get(key)
        if found is None:
            found = self._cost[key] = min(
                self._profile_ns(tenant, shape, rows, self._size) * self._size * items / rows
                for rows in {items, max(items, tenant.max_batch)}
            )
        return found

    def _profile_ns(self, tenant: Tenant, shape: int, items: int, size: int) -> float:
        """Latency by the profile, without later corrections; 0 without a profile."""
        try:
            return self._predictor.latency_ns(tenant.work(shape, items), size) / self._pace(tenant.name, shape)
        except CotenantError:
            return 0.0

    def _pace(self, tenant: str, shape: int) -> float:
        """Factor by which the predictor corrects the profile of a tenant."""
        predictor = self._predictor
        return scale_of(predictor.scales, tenant, shape) if isinstance(predictor, TablePredictor) else 1.0

    def _started(self, launch: Launch, now_ns: int) -> None:
        self._held = None
        self._running[launch.id] = (
            launch,
            now_ns,
            launch.predicted_ns / self._pace(launch.work.tenant, launch.work.shape),
        )
        for number in launch.queries:
            if (pending := self._pending.get(number)) is not None and pending.waits_from is not None:
                pending.started(now_ns, partial(self._held_now, now_ns))

    def _ended(self, event: LaunchEnded, actions: Sequence[Action], now_ns: int) -> None:
        found = self._running.pop(event.launch, None)
        if found is None:
            return
        (launch, since_ns, profile_ns), self._held = found, None
        took_ns, size = now_ns - since_ns, launch.share.size
        over_ns = max(0, round(took_ns - profile_ns))
        steal_ns = 0 if event.steal_ns is UNSET else min(over_ns, event.steal_ns)
        if (ledger := self._ledgers.get(launch.work.tenant)) is not None:
            ledger.held_ns += size * (took_ns - over_ns)
            ledger.slow_ns += size * (over_ns - steal_ns)
            ledger.steal_ns += size * steal_ns
        goes_on = any(type(each) is Launch and each.batch == launch.batch for each in actions)
        for number in launch.queries:
            if (pending := self._pending.get(number)) is not None:
                pending.slow_ns += over_ns - steal_ns
                pending.steal_ns += steal_ns
                if not goes_on:
                    pending.waits_since, pending.waits_from = now_ns, self._held_now(now_ns)

    def _held_now(self, now_ns: int) -> Held:
        """Slot time used so far. Overrun of a running launch counts from its end on."""
        if self._held is None or self._held_at_ns != now_ns:
            held = {name: (each.held_ns, each.slow_ns, each.steal_ns) for name, each in self._ledgers.items()}
            for launch, since_ns, profile_ns in self._running.values():
                name = launch.work.tenant
                if name in held:
                    so_far = launch.share.size * round(min(now_ns - since_ns, profile_ns))
                    held[name] = held[name][0] + so_far, *held[name][1:]
            self._held, self._held_at_ns = held, now_ns
            if not self._snapshots or now_ns - self._snapshots[-1][0] >= _SNAPSHOT_NS:
                self._snapshots.append((now_ns, held))
                while now_ns - self._snapshots[0][0] > _HISTORY_NS:
                    self._snapshots.popleft()
        return self._held

    def _responded(self, respond: Respond, now_ns: int) -> None:
        pending = self._pending.pop(respond.query, None)
        if pending is None or respond.outcome is Outcome.ANSWERED:
            return
        query = pending.query
        cause, culprit, delays = self._cause(pending, respond, now_ns)
        if isinstance(query, StageQuery) and query.part_of in self._applications:
            self._stage_lost[query.part_of] = cause, culprit
        self._lose(Loss(query.id, query.tenant, query.arrival_ns, now_ns, respond.outcome, cause, culprit, delays))

    def _application_ended(self, event: ApplicationEnded) -> None:
        """An application's query ended: if lost, it and its withdrawn stages have the cause of its last lost stage."""
        arrived = self._applications.pop(event.query, None)
        known = self._stage_lost.pop(event.query, None)
        if arrived is None or event.outcome is Outcome.ANSWERED:
            return
        if event.outcome is Outcome.CANCELLED:
            known = LossCause.CLIENT, ""
        elif known is None:
            known = (LossCause.GONE if event.outcome is Outcome.REJECTED else LossCause.FAILED), ""
            if event.outcome is Outcome.LATE:  # each stage met its own deadline
                known = LossCause.SLOW, ""
        for pending in self._pending.values():
            if isinstance(pending.query, StageQuery) and pending.query.part_of == event.query:
                pending.withdrawn = known
        times = arrived.arrival_ns, event.ended_ns
        self._lose(Loss(event.query, arrived.application, *times, event.outcome, *known))

    def _lose(self, loss: Loss) -> None:
        self.lost.setdefault(loss.tenant, Counter())[loss.cause] += 1
        self._recent.setdefault(loss.tenant, deque(maxlen=_RECENT)).append(loss.cause)
        if loss.culprit:
            self.culprit[loss.tenant, loss.culprit] += 1
        if self._on_loss is not None:
            self._on_loss(loss)

    # --- causes ---------------------------------------------------------------------------------------------------

    def _cause(self, pending: PendingQuery, respond: Respond, now_ns: int) -> tuple[LossCause, str, Delays | None]:
        query, ledger, known = pending.query, self._ledgers.get(pending.query.tenant), respond.cause
        if known in _CERTAIN or ledger is None:
            return (LossCause.GONE if known is UNSET else known), "", None
        if pending.withdrawn is not None:
            return *pending.withdrawn, None
        if respond.outcome is Outcome.CANCELLED or self._is_impatient(query, ledger.tenant):
            return LossCause.CLIENT, "", None
        if known is not UNSET and known is not LossCause.SLO and self._is_for_load(known, ledger, now_ns):
            return known, "" if respond.culprit is UNSET else respond.culprit, None
        profile_ns = self._profile_ns(ledger.tenant, query.shape, query.items, self._widest)
        if profile_ns > ledger.tenant.slo_ns:
            return LossCause.SLO, "", None
        if known is LossCause.SLO:  # by the corrected predictor, but not by the profile
            return self._why_long(ledger, now_ns), "", None
        delays = self._delays(pending, ledger, now_ns)
        return *self._pick(delays, pending, ledger, now_ns), delays

    def _is_for_load(self, chosen: LossCause, ledger: Ledger, now_ns: int) -> bool:
        """Whether demand explains that a policy shed a query: total demand exceeds the slots. If a query of its own
        tenant replaced it, that tenant also has to be over quota."""
        return self._is_crowded(now_ns) and (
            chosen is not LossCause.OWN_RATE or ledger.is_over_quota(self._slots, now_ns)
        )

    def _why_long(self, ledger: Ledger, now_ns: int) -> LossCause:
        """Whether recent overrun of a tenant is steal time or slow launches."""
        name = ledger.tenant.name
        _, slow, steal = self._held_now(now_ns)[name]
        _, slow_before, steal_before = self._snapshots[0][1].get(name, (0, 0, 0)) if self._snapshots else (0, 0, 0)
        return LossCause.STEAL_TIME if steal - steal_before > slow - slow_before else LossCause.SLOW

    def _is_crowded(self, now_ns: int) -> bool:
        """Whether the demand of all tenants, by the profile, exceeds the slots."""
        return sum([each.busy_slots(now_ns) for each in self._ledgers.values()]) > self._slots

    def _is_impatient(self, query: Query, tenant: Tenant) -> bool:
        """Whether the client's time-out is below the SLO."""
        if not isinstance(query, StageQuery):
            return query.deadline_ns - query.arrival_ns < tenant.slo_ns
        whole = self._applications.get(query.part_of)
        return whole is not None and query.expiry_ns is not None and query.expiry_ns <= whole.deadline_ns

    def _delays(self, pending: PendingQuery, ledger: Ledger, now_ns: int) -> Delays:
        """Delays of a query. A query refused at arrival has the delays that the use of the lanes before it would have
        caused, for at most its SLO."""
        query = pending.query
        made = Delays(pending.came_ns - query.arrival_ns, pending.steal_ns, slow={query.tenant: pending.slow_ns})
        waits = [*pending.waits]
        if pending.waits_from is not None and now_ns > pending.waits_since:
            waits.append((now_ns - pending.waits_since, pending.waits_from, self._held_now(now_ns)))
        made.away_ns = pending.away_ns + ledger.away_for_ns(pending.came_ns, now_ns)
        for launch, since_ns, profile_ns in self._running.values():
            if query.id in launch.queries:
                made.slow[query.tenant] += max(0, round(now_ns - since_ns - profile_ns))
        if not waits and now_ns == pending.came_ns and made.front_end_ns < ledger.tenant.slo_ns // 2:
            since_ns = now_ns - ledger.tenant.slo_ns
            snapshot = next((each for each in self._snapshots if each[0] >= since_ns), None)
            if snapshot is not None and snapshot[0] < now_ns:
                waits.append((now_ns - snapshot[0], snapshot[1], self._held_now(now_ns)))
        for wait_ns, begin, end in waits:
            split_wait(wait_ns, begin, end, made)
        return made

    def _pick(self, delays: Delays, pending: PendingQuery, ledger: Ledger, now_ns: int) -> tuple[LossCause, str]:
        """Cause and culprit by the delays: rules 3 to 5 of this module."""
        own, since_ns = pending.query.tenant, pending.query.arrival_ns
        found: dict[tuple[LossCause, str], int] = {
            (LossCause.FRONT_END, ""): delays.front_end_ns,
            (LossCause.STEAL_TIME, ""): delays.steal_ns,
            (LossCause.FAILED, ""): delays.away_ns,
            (LossCause.SLOW, ""): delays.slow.get(own, 0),
        }
        if 2 * self._load_times.loading_ns(since_ns, now_ns) > now_ns - since_ns:
            kept = delays.front_end_ns + delays.steal_ns + sum(delays.slow.values())
            if kept > _LEAST_PART * delays.total_ns:
                return LossCause.GONE, ""
        if ledger.is_over_quota(self._slots, now_ns):
            found[LossCause.OWN_RATE, ""] = sum(delays.behind.values())
        for name, each in self._ledgers.items():
            if name != own:
                waited = delays.slow.get(name, 0)
                if (LossCause.OWN_RATE, "") not in found and each.is_over_quota(self._slots, now_ns):
                    waited += delays.behind.get(name, 0)
                found[LossCause.NEIGHBOUR, name] = waited
        if self._is_crowded(now_ns):  # without any overrun it would be lost as well
            by_load = {each: ns for each, ns in found.items() if each[0] in _OF_LOAD}
            if sum(by_load.values()) > _LEAST_PART * delays.total_ns:
                found = by_load
        cause = max(found, key=found.__getitem__)
        if found[cause] > _LEAST_PART * delays.total_ns:
            return cause
        others = {name: ns for name, ns in delays.behind.items() if name != own}
        if sum(others.values()) > delays.behind.get(own, 0):
            return LossCause.NEIGHBOUR, max(others, key=others.__getitem__)
        return LossCause.OWN_RATE if delays.behind.get(own) else LossCause.SLOW, ""


_OF_LOAD = (LossCause.OWN_RATE, LossCause.NEIGHBOUR)
_CERTAIN = (LossCause.GONE, LossCause.FAILED, LossCause.CLIENT, LossCause.RATE_LIMIT)
_RARE_EVENTS = (
    *(AnswerLate, ApplicationArrived, ApplicationEnded, ModelOpening, PolicyChanged, PredictorChanged, QueryRefused),
    *(TenantAdded, TenantChanged, TenantRemoved, TenantResumed, TenantSuspended),
)
"""Events on more than one query or launch."""
