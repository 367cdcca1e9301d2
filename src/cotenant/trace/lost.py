"""An account of lost queries, those that were not answered in time: the one cause of each, and whom it waited behind.

It follows what happens to the core, in the server and in the simulator as in a trace. Pure: bounded by the queries that
are inside, the tenants, and a second of the past.

What delayed a query is the time at the door, the time that it waited while the lanes ran others, and what launches took
beyond what the profile says of them: its own, and those that it waited behind. A wait is whose launches held the lanes
meanwhile, in proportion. A tenant is over its share when its queries of the last seconds ask for more slot time, by the
profile, than it is entitled to, and by more than chance makes of random arrivals.

While a model is being opened, which takes the same cores, launches that ran long and time at the door are due to that.
Else the cause is what delayed it most, of what should not have been: launches that ran long, time at the door, a worker
that was away, waits of a tenant that is over its share, and waits behind such a tenant. Where all that is less than a
quarter of what delayed it, it is whom it waited behind most.
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
from cotenant.predict.table import TablePredictor
from cotenant.trace.ledger import Delays, Held, Inside, Ledger, Openings, divide, share_out
from cotenant.types import LossCause, Outcome, Query, StageQuery, Tenant
from cotenant.work import Share

_PAST_NS = 1_000_000_000
"""How far back one looks for what filled a queue."""
_LOOK_NS = 20_000_000
"""Between two looks at what the lanes have run, kept for queries that are refused at once."""
_LEAST_PART = 0.25
"""Of all delays: what should not have been has to be so much of them to be the cause."""
_RECENT = 64
"""Last losses of a tenant that `leading` goes by."""
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
    """A lost query. `whom` is the other tenant, of the cause NEIGHBOUR alone. A request that never became a query has
    no number (-1). `delays` is None where the cause was known without."""

    query: int
    tenant: str
    arrival_ns: int
    ended_ns: int
    outcome: Outcome
    cause: LossCause
    culprit: str = ""
    delays: Delays | None = None


class LossAccount:
    """Gives every lost query its cause. An observer of what happens: see the head of the module.

    `slots` are those of the lanes, `size` those of the smallest lane. `on_loss` is told of each loss. Tenants that
    have no table in the predictor are never found to be over their share.
    """

    def __init__(
        self,
        predictor: Predictor,
        lanes: Sequence[Share],
        tenants: Iterable[Tenant] = (),
        on_loss: Callable[[Loss], None] | None = None,
    ) -> None:
        self.lost: dict[str, Counter[LossCause]] = {}
        """How many were lost by tenant or application, and cause."""
        self.culprit: Counter[tuple[str, str]] = Counter()
        """How many were lost to a neighbour: by tenant and neighbour."""
        self._recent: dict[str, deque[LossCause]] = {}
        self._on_loss = on_loss
        self._predictor = predictor
        self._cost: dict[tuple[str, int, int], float] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._inside: dict[int, Inside] = {}
        self._running: dict[int, tuple[Launch, int, float]] = {}
        """Launches under way: since when, and how long they take by the profile."""
        self._applications: dict[int, ApplicationArrived] = {}
        self._stage_lost: dict[int, tuple[LossCause, str]] = {}
        """Of an application's query under way, or that has just ended: the cause of its last lost stage."""
        self._held: Held | None = None
        """What `_held_now` gave, while nothing has begun or ended since `_held_at_ns`."""
        self._held_at_ns = 0
        self._looks: deque[tuple[int, Held]] = deque()
        self._openings = Openings()
        self.use_lanes(lanes)
        for tenant in tenants:
            self._add(tenant)

    def use_lanes(self, lanes: Sequence[Share]) -> None:
        """Other lanes are there from now on."""
        self._slots = len({(share.device, core) for share in lanes for core in share.cores})
        self._size = min((share.size for share in lanes), default=1)
        self._widest = max((share.size for share in lanes), default=1)
        self._cost.clear()

    def believe(self, predictor: Predictor) -> None:
        """Another predictor is there from now on."""
        self._predictor = predictor
        self._cost.clear()

    def forget(self) -> None:
        """Events are missing here: how the queries and the launches that are inside end will not be told."""
        for known in (self._inside, self._running, self._applications, self._stage_lost, self._looks):
            known.clear()
        self._held, self._openings = None, Openings()
        for ledger in self._ledgers.values():
            ledger.away_ns = None

    def leading(self, tenant: str) -> LossCause | None:
        """The cause that the last losses of a tenant have most often; None before the first."""
        recent = tuple(self._recent.get(tenant, ()))  # a copy: others may add to it meanwhile
        return Counter(recent).most_common(1)[0][0] if recent else None

    def __call__(self, time_ns: int, event: Event | None, actions: Sequence[Action], timing: object = None) -> None:
        """An event was handled, with these actions. None stands for one that tells nothing of lost queries."""
        kind = type(event)
        if kind is QueryArrived:
            self._arrived(event.query, time_ns)  # type: ignore[union-attr, arg-type]
        elif kind is LaunchEnded:
            self._ended(event, actions, time_ns)  # type: ignore[arg-type]
        elif kind in _RARE:
            self._happened(event, time_ns)  # type: ignore[arg-type]
        for action in actions:
            if type(action) is Launch:
                self._started(action, time_ns)
            elif type(action) is Respond:
                self._responded(action, time_ns)

    # --- what happens ---------------------------------------------------------------------------------------------

    def _happened(self, event: Event, now_ns: int) -> None:
        match event:
            case PredictorChanged():
                self.believe(event.predictor)
            case PolicyChanged():
                self.use_lanes(event.policy.spec.lanes)
            case TenantAdded():
                self._add(event.tenant)
            case TenantChanged(tenant=tenant) if tenant.name in self._ledgers:
                self._ledgers[tenant.name].tenant = tenant
                self._cost.clear()
                divide(self._ledgers.values())
            case TenantRemoved():
                self._ledgers.pop(event.tenant, None)
                divide(self._ledgers.values())
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
                self._openings.happened(event, now_ns)
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
        for inside in self._inside.values() if ledger.away_ns is not None else ():
            if inside.query.tenant == ledger.tenant.name:
                inside.away_ns += ledger.away_for_ns(inside.came_ns, now_ns)
        ledger.away_ns = None

    def _add(self, tenant: Tenant) -> None:
        self._ledgers[tenant.name] = Ledger(tenant)
        self._held = None
        for _, held in self._looks:
            held.pop(tenant.name, None)  # one that comes back begins with nothing
        self._cost.clear()
        divide(self._ledgers.values())

    def _arrived(self, query: Query, now_ns: int) -> None:
        ledger = self._ledgers.get(query.tenant)
        if ledger is not None:
            ledger.asks(self._slot_ns(ledger.tenant, query.shape, query.items), now_ns)
        self._inside[query.id] = Inside(query, now_ns, self._held_now(now_ns))

    def _slot_ns(self, tenant: Tenant, shape: int, items: int) -> float:
        """Slot time that rows take on the smallest lane by the profile, alone or in the largest batch."""
        key = tenant.name, shape, items
        found = self._cost.get(key)
        if found is None:
            found = self._cost[key] = min(
                self._profile_ns(tenant, shape, rows, self._size) * self._size * items / rows
                for rows in {items, max(items, tenant.max_batch)}
            )
        return found

    def _profile_ns(self, tenant: Tenant, shape: int, items: int, size: int) -> float:
        """Latency by the profile, without what was corrected since; 0 where there is none."""
        try:
            return self._predictor.latency_ns(tenant.work(shape, items), size) / self._pace(tenant.name)
        except CotenantError:
            return 0.0

    def _pace(self, tenant: str) -> float:
        """How many times as long as the profile says a tenant's launches are believed to take."""
        predictor = self._predictor
        return predictor.scales.get(tenant, 1.0) if isinstance(predictor, TablePredictor) else 1.0

    def _started(self, launch: Launch, now_ns: int) -> None:
        self._held = None
        self._running[launch.id] = launch, now_ns, launch.predicted_ns / self._pace(launch.work.tenant)
        for number in launch.queries:
            if (inside := self._inside.get(number)) is not None and inside.waits_from is not None:
                inside.runs(now_ns, partial(self._held_now, now_ns))

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
            if (inside := self._inside.get(number)) is not None:
                inside.slow_ns += over_ns - steal_ns
                inside.steal_ns += steal_ns
                if not goes_on:
                    inside.waits_since, inside.waits_from = now_ns, self._held_now(now_ns)

    def _held_now(self, now_ns: int) -> Held:
        """Slot time so far; what a launch under way takes beyond the profile counts when it has ended."""
        if self._held is None or self._held_at_ns != now_ns:
            held = {name: (each.held_ns, each.slow_ns, each.steal_ns) for name, each in self._ledgers.items()}
            for launch, since_ns, profile_ns in self._running.values():
                name = launch.work.tenant
                if name in held:
                    so_far = launch.share.size * round(min(now_ns - since_ns, profile_ns))
                    held[name] = held[name][0] + so_far, *held[name][1:]
            self._held, self._held_at_ns = held, now_ns
            if not self._looks or now_ns - self._looks[-1][0] >= _LOOK_NS:
                self._looks.append((now_ns, held))
                while now_ns - self._looks[0][0] > _PAST_NS:
                    self._looks.popleft()
        return self._held

    def _responded(self, respond: Respond, now_ns: int) -> None:
        inside = self._inside.pop(respond.query, None)
        if inside is None or respond.outcome is Outcome.ANSWERED:
            return
        query = inside.query
        cause, culprit, delays = self._cause(inside, respond, now_ns)
        if isinstance(query, StageQuery) and query.part_of in self._applications:
            self._stage_lost[query.part_of] = cause, culprit
        self._lose(Loss(query.id, query.tenant, query.arrival_ns, now_ns, respond.outcome, cause, culprit, delays))

    def _application_ended(self, event: ApplicationEnded) -> None:
        """One is lost for the reason for which its last lost stage was; its stages that are withdrawn go with it."""
        arrived = self._applications.pop(event.query, None)
        known = self._stage_lost.pop(event.query, None)
        if arrived is None or event.outcome is Outcome.ANSWERED:
            return
        if event.outcome is Outcome.CANCELLED:
            known = LossCause.CLIENT, ""
        elif known is None:
            known = (LossCause.GONE if event.outcome is Outcome.REJECTED else LossCause.FAILED), ""
            if event.outcome is Outcome.LATE:  # no stage was, each by its own deadline
                known = LossCause.SLOW, ""
        for inside in self._inside.values():
            if isinstance(inside.query, StageQuery) and inside.query.part_of == event.query:
                inside.withdrawn = known
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

    def _cause(self, inside: Inside, respond: Respond, now_ns: int) -> tuple[LossCause, str, Delays | None]:
        query, ledger, known = inside.query, self._ledgers.get(inside.query.tenant), respond.cause
        if known in _CERTAIN or ledger is None:
            return (LossCause.GONE if known is UNSET else known), "", None
        if inside.withdrawn is not None:
            return *inside.withdrawn, None
        if respond.outcome is Outcome.CANCELLED or self._is_short(query, ledger.tenant):
            return LossCause.CLIENT, "", None
        if known is not UNSET and known is not LossCause.SLO and self._is_for_load(known, ledger, now_ns):
            return known, "" if respond.culprit is UNSET else respond.culprit, None
        profile_ns = self._profile_ns(ledger.tenant, query.shape, query.items, self._widest)
        if profile_ns > ledger.tenant.slo_ns:
            return LossCause.SLO, "", None
        if known is LossCause.SLO:  # by what is believed by now, and not by the profile
            return self._why_long(ledger, now_ns), "", None
        delays = self._delays(inside, ledger, now_ns)
        return *self._pick(delays, inside, ledger, now_ns), delays

    def _is_for_load(self, chosen: LossCause, ledger: Ledger, now_ns: int) -> bool:
        """Whether a policy that chose this query had to choose since too much is asked for: of the tenant that was over
        its share, where it went for one of its own. Else there was no room for another reason."""
        return self._is_crowded(now_ns) and (chosen is not LossCause.OWN_RATE or ledger.is_over(self._slots, now_ns))

    def _why_long(self, ledger: Ledger, now_ns: int) -> LossCause:
        """Why launches of a tenant have lately taken longer than the profile says."""
        name = ledger.tenant.name
        _, slow, steal = self._held_now(now_ns)[name]
        _, slow_before, steal_before = self._looks[0][1].get(name, (0, 0, 0)) if self._looks else (0, 0, 0)
        return LossCause.STEAL_TIME if steal - steal_before > slow - slow_before else LossCause.SLOW

    def _is_crowded(self, now_ns: int) -> bool:
        """Whether all tenants together ask for more, by the profile, than there is."""
        return sum([each.asks_for(now_ns) for each in self._ledgers.values()]) > self._slots

    def _is_short(self, query: Query, tenant: Tenant) -> bool:
        """Whether a client allowed less time than the SLO."""
        if not isinstance(query, StageQuery):
            return query.deadline_ns - query.arrival_ns < tenant.slo_ns
        whole = self._applications.get(query.part_of)
        return whole is not None and query.expiry_ns is not None and query.expiry_ns <= whole.deadline_ns

    def _delays(self, inside: Inside, ledger: Ledger, now_ns: int) -> Delays:
        """What kept a query; one that was refused at once counts what would have kept it: what held the lanes before
        it came, for as long as its SLO at most."""
        query = inside.query
        made = Delays(inside.came_ns - query.arrival_ns, inside.steal_ns, slow={query.tenant: inside.slow_ns})
        waits = [*inside.waits]
        if inside.waits_from is not None and now_ns > inside.waits_since:
            waits.append((now_ns - inside.waits_since, inside.waits_from, self._held_now(now_ns)))
        made.away_ns = inside.away_ns + ledger.away_for_ns(inside.came_ns, now_ns)
        for launch, since_ns, profile_ns in self._running.values():
            if query.id in launch.queries:
                made.slow[query.tenant] += max(0, round(now_ns - since_ns - profile_ns))
        if not waits and now_ns == inside.came_ns and made.front_end_ns < ledger.tenant.slo_ns // 2:
            since_ns = now_ns - ledger.tenant.slo_ns
            look = next((each for each in self._looks if each[0] >= since_ns), None)
            if look is not None and look[0] < now_ns:
                waits.append((now_ns - look[0], look[1], self._held_now(now_ns)))
        for wait_ns, begin, end in waits:
            share_out(wait_ns, begin, end, made)
        return made

    def _pick(self, delays: Delays, inside: Inside, ledger: Ledger, now_ns: int) -> tuple[LossCause, str]:
        """The cause; see the head of the module."""
        own, since_ns = inside.query.tenant, inside.query.arrival_ns
        found: dict[tuple[LossCause, str], int] = {
            (LossCause.FRONT_END, ""): delays.front_end_ns,
            (LossCause.STEAL_TIME, ""): delays.steal_ns,
            (LossCause.FAILED, ""): delays.away_ns,
            (LossCause.SLOW, ""): delays.slow.get(own, 0),
        }
        if 2 * self._openings.lasted_ns(since_ns, now_ns) > now_ns - since_ns:
            kept = delays.front_end_ns + delays.steal_ns + sum(delays.slow.values())
            if kept > _LEAST_PART * delays.total_ns:
                return LossCause.GONE, ""
        if ledger.is_over(self._slots, now_ns):
            found[LossCause.OWN_RATE, ""] = sum(delays.behind.values())
        for name, each in self._ledgers.items():
            if name != own:
                waited = delays.slow.get(name, 0)
                if (LossCause.OWN_RATE, "") not in found and each.is_over(self._slots, now_ns):
                    waited += delays.behind.get(name, 0)
                found[LossCause.NEIGHBOUR, name] = waited
        if self._is_crowded(now_ns):  # it would be lost, too, if no launch took longer than the profile says
            asked = {each: ns for each, ns in found.items() if each[0] in _OF_LOAD}
            if sum(asked.values()) > _LEAST_PART * delays.total_ns:
                found = asked
        cause = max(found, key=found.__getitem__)
        if found[cause] > _LEAST_PART * delays.total_ns:
            return cause
        others = {name: ns for name, ns in delays.behind.items() if name != own}
        if sum(others.values()) > delays.behind.get(own, 0):
            return LossCause.NEIGHBOUR, max(others, key=others.__getitem__)
        return LossCause.OWN_RATE if delays.behind.get(own) else LossCause.SLOW, ""


_OF_LOAD = (LossCause.OWN_RATE, LossCause.NEIGHBOUR)
_CERTAIN = (LossCause.GONE, LossCause.FAILED, LossCause.CLIENT, LossCause.RATE_LIMIT)
_RARE = (
    *(AnswerLate, ApplicationArrived, ApplicationEnded, ModelOpening, PolicyChanged, PredictorChanged, QueryRefused),
    *(TenantAdded, TenantChanged, TenantRemoved, TenantResumed, TenantSuspended),
)
"""Events that tell more than of one query or launch."""
