"""Per-tenant and per-query state of `lost.LossAccount`: demand, device time used, delays of pending queries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import exp, sqrt

from msgspec import UNSET

from cotenant.core.events import ModelOpening
from cotenant.types import LossCause, Query, Tenant

DECAY_NS = 2_000_000_000
"""Time constant of the exponentially decayed demand of a tenant."""
_TOLERANCE = 0.5
"""Standard deviations of random arrivals by which demand may exceed a quota without being over it."""
_KEPT_NS = 60_000_000_000
"""Age up to which load times of models are kept; most SLOs are shorter."""
_NOTHING = (0, 0, 0)


@dataclass(slots=True)
class Delays:
    """Delays of a query, in ns. `behind` is queueing delay by the tenant that held the lanes, its own included. `slow`
    is the overrun of launches over the profile by tenant, `steal_ns` the overrun without a processor."""

    front_end_ns: int = 0
    steal_ns: int = 0
    away_ns: int = 0
    """Time without a worker of its tenant."""
    behind: dict[str, int] = field(default_factory=dict)
    slow: dict[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """Sum of all delays."""
        parts = self.front_end_ns, self.steal_ns, self.away_ns, *self.behind.values(), *self.slow.values()
        return sum(parts)


class Ledger:
    """State of one tenant: its quota, the slot time that its launches used, and its demand. The demand is a decayed sum
    over arrivals of their slot time `s`: `demand = demand * exp(-elapsed / DECAY_NS) + s`."""

    __slots__ = (
        *("away_ns", "demand", "demand_at_ns", "demand_ns", "demand_squares", "held_ns", "quota", "slow_ns"),
        "steal_ns",
        "tenant",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.quota = 1.0
        self.demand = self.demand_ns = self.demand_squares = 0.0
        self.demand_at_ns = 0
        """Decayed sums at `demand_at_ns`: number of queries, their slot time, and the squares of it."""
        self.held_ns = self.slow_ns = self.steal_ns = 0
        """Slot time of ended launches: as the profile predicts, overrun with and without a processor."""
        self.away_ns: int | None = None
        """Time at which its worker went away; None while it is there."""

    def add_demand(self, slot_ns: float, now_ns: int) -> None:
        """Note the arrival of a query that needs `slot_ns` of slot time."""
        fade = exp((self.demand_at_ns - now_ns) / DECAY_NS)
        self.demand = self.demand * fade + 1
        self.demand_ns = self.demand_ns * fade + slot_ns
        self.demand_squares = self.demand_squares * fade + slot_ns * slot_ns
        self.demand_at_ns = now_ns

    def busy_slots(self, now_ns: int) -> float:
        """Average number of slots that the recent demand keeps busy."""
        return self.demand_ns * exp((self.demand_at_ns - now_ns) / DECAY_NS) / DECAY_NS

    def is_over_quota(self, slots: int, now_ns: int) -> bool:
        """Whether demand exceeds the quota of `slots`, and the reserved rate, by more than random arrivals explain."""
        fade = exp((self.demand_at_ns - now_ns) / DECAY_NS)
        if self.tenant.rate is not UNSET:
            demand = self.demand * fade
            if demand <= self.tenant.rate * DECAY_NS / 1e9 + _TOLERANCE * sqrt(demand):
                return False
        quota_ns = self.quota * slots * DECAY_NS  # mean of the decayed sum at a demand equal to the quota
        return self.demand_ns * fade > quota_ns + _TOLERANCE * sqrt(self.demand_squares * fade)

    def away_for_ns(self, since_ns: int, now_ns: int) -> int:
        """Time since `since_ns` for which the worker has been away; 0 while it is there."""
        return 0 if self.away_ns is None else max(0, now_ns - max(self.away_ns, since_ns))


class LoadTimes:
    """Times at which models were loaded, for the last `_KEPT_NS`."""

    __slots__ = ("_open", "_over")

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._over: deque[tuple[int, int]] = deque()

    def add(self, event: ModelOpening, now_ns: int) -> None:
        """Note that loading a model has begun or ended."""
        if not event.done:
            self._open[event.model] = now_ns
            return
        self._over.append((self._open.pop(event.model, now_ns), now_ns))
        while now_ns - self._over[0][1] > _KEPT_NS:
            self._over.popleft()

    def loading_ns(self, since_ns: int, now_ns: int) -> int:
        """Time since `since_ns` for which models were loaded, summed over models."""
        spans = [*self._over, *[(begun_ns, now_ns) for begun_ns in self._open.values()]]
        return sum([max(0, until - max(begun, since_ns)) for begun, until in spans])


Held = dict[str, tuple[int, int, int]]
"""Slot time used so far, by tenant: as the profile predicts, overrun, and steal time."""


class PendingQuery:
    """A query that has not ended: its present wait, its past waits, and the overrun of its launches. A wait has its
    duration, and the slot time used by tenants at its begin and end."""

    __slots__ = (
        *(
            "away_ns",
            "came_ns",
            "query",
            "slow_ns",
            "steal_ns",
            "waits",
            "waits_from",
            "waits_since",
            "withdrawn",
        ),
    )

    def __init__(self, query: Query, now_ns: int, held: Held) -> None:
        self.query = query
        self.came_ns = self.waits_since = now_ns
        self.waits_from: Held | None = held
        self.waits: list[tuple[int, Held, Held]] = []
        self.slow_ns = self.steal_ns = self.away_ns = 0
        self.withdrawn: tuple[LossCause, str] | None = None
        """Cause and culprit of the application's query of which it is a stage, once that one is lost."""

    def started(self, now_ns: int, held: Callable[[], Held]) -> None:
        """Note that a launch with it has started: a present wait ends."""
        if self.waits_from is not None:
            if now_ns > self.waits_since:
                self.waits.append((now_ns - self.waits_since, self.waits_from, held()))
            self.waits_from = None


def set_quotas(ledgers: Collection[Ledger]) -> None:
    """Set the quotas: the share of each tenant; tenants without one divide the rest by weight."""
    given = {each.tenant.name: each.tenant.share for each in ledgers}
    left = max(0.0, 1.0 - sum(given.values()))
    weights = sum(each.tenant.weight for each in ledgers if not given[each.tenant.name])
    for each in ledgers:
        each.quota = given[each.tenant.name] or left * each.tenant.weight / weights


def split_wait(wait_ns: int, begin: Held, end: Held, made: Delays) -> None:
    """Divide a wait among tenants, in proportion to the slot time that they used from `begin` to `end`."""
    parts = {name: [max(0, new - old) for new, old in zip(each, begin.get(name, _NOTHING), strict=True)]
             for name, each in end.items()}  # fmt: skip
    total = sum(map(sum, parts.values()))
    for name, (plain, slow, steal) in parts.items() if total else ():
        made.behind[name] = made.behind.get(name, 0) + wait_ns * plain // total
        made.slow[name] = made.slow.get(name, 0) + wait_ns * slow // total
        made.steal_ns += wait_ns * steal // total
