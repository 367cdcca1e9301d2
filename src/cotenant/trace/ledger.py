"""The books of the account of lost queries: what tenants ask for, what their launches have held, what kept a query."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import exp, sqrt

from msgspec import UNSET

from cotenant.core.events import ModelOpening
from cotenant.types import LossCause, Query, Tenant

FADE_NS = 2_000_000_000
"""How fast what tenants asked for is forgotten."""
_CHANCE = 0.5
"""Standard deviations of what random arrivals ask for that are not taken for asking too much."""
_OPENED_NS = 60_000_000_000
"""How long it is known when a model was opened: SLOs are shorter, as a rule."""
_NOTHING = (0, 0, 0)


@dataclass(slots=True)
class Delays:
    """What kept a query, in ns. `behind` is by tenant, its own included, at the pace of the profile; `slow` is by
    tenant what launches took beyond that, and `steal_ns` such time in which they were kept off the processor."""

    front_end_ns: int = 0
    steal_ns: int = 0
    away_ns: int = 0
    """The worker of its tenant was away."""
    behind: dict[str, int] = field(default_factory=dict)
    slow: dict[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """All of it."""
        parts = self.front_end_ns, self.steal_ns, self.away_ns, *self.behind.values(), *self.slow.values()
        return sum(parts)


class Ledger:
    """What is kept of a tenant: its entitlement, what it asks for, and what its launches have held."""

    __slots__ = (
        *("asked", "asked_at_ns", "asked_ns", "asked_squares", "away_ns", "entitlement", "held_ns", "slow_ns"),
        "steal_ns",
        "tenant",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.entitlement = 1.0
        self.asked = self.asked_ns = self.asked_squares = 0.0
        self.asked_at_ns = 0
        """Its last queries, the slot time that they ask for, and the squares of that: sums that fade, and when."""
        self.held_ns = self.slow_ns = self.steal_ns = 0
        """Slot time of ended launches: as the profile says, beyond that, and beyond that off the processor."""
        self.away_ns: int | None = None
        """Since when its worker is away."""

    def asks(self, slot_ns: float, now_ns: int) -> None:
        """A query comes that takes so much slot time."""
        fade = exp((self.asked_at_ns - now_ns) / FADE_NS)
        self.asked = self.asked * fade + 1
        self.asked_ns = self.asked_ns * fade + slot_ns
        self.asked_squares = self.asked_squares * fade + slot_ns * slot_ns
        self.asked_at_ns = now_ns

    def asks_for(self, now_ns: int) -> float:
        """How many slots the tenant would keep busy as it asks lately."""
        return self.asked_ns * exp((self.asked_at_ns - now_ns) / FADE_NS) / FADE_NS

    def is_over(self, slots: int, now_ns: int) -> bool:
        """Whether the tenant asks for more than its share of `slots`, and than the rate that it is guaranteed, by more
        than chance makes likely."""
        fade = exp((self.asked_at_ns - now_ns) / FADE_NS)
        if self.tenant.rate is not UNSET:
            asked = self.asked * fade
            if asked <= self.tenant.rate * FADE_NS / 1e9 + _CHANCE * sqrt(asked):
                return False
        entitled_ns = self.entitlement * slots * FADE_NS  # what an asker of just that has on average
        return self.asked_ns * fade > entitled_ns + _CHANCE * sqrt(self.asked_squares * fade)

    def away_for_ns(self, since_ns: int, now_ns: int) -> int:
        """How long the worker has been away, of the time since then; 0 when it is there."""
        return 0 if self.away_ns is None else max(0, now_ns - max(self.away_ns, since_ns))


class Openings:
    """When models were being opened, of late."""

    __slots__ = ("_open", "_over")

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._over: deque[tuple[int, int]] = deque()

    def happened(self, event: ModelOpening, now_ns: int) -> None:
        """One begins, or is over."""
        if not event.done:
            self._open[event.model] = now_ns
            return
        self._over.append((self._open.pop(event.model, now_ns), now_ns))
        while now_ns - self._over[0][1] > _OPENED_NS:
            self._over.popleft()

    def lasted_ns(self, since_ns: int, now_ns: int) -> int:
        """For how long models were being opened, of the time since then."""
        spans = [*self._over, *[(begun_ns, now_ns) for begun_ns in self._open.values()]]
        return sum([max(0, until - max(begun, since_ns)) for begun, until in spans])


Held = dict[str, tuple[int, int, int]]
"""Slot time so far, by tenant: as the profile says, beyond that, and off the processor."""


class Inside:
    """A query that has not ended: since when it waits and what was held then, the waits that are over, its launches."""

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
        """Why the application's query was lost that it is a stage of, and that has ended."""

    def runs(self, now_ns: int, held: Callable[[], Held]) -> None:
        """A launch carries it from now on."""
        if self.waits_from is not None:
            if now_ns > self.waits_since:
                self.waits.append((now_ns - self.waits_since, self.waits_from, held()))
            self.waits_from = None


def divide(ledgers: Collection[Ledger]) -> None:
    """What each tenant is entitled to: its share, or of what is left by the weights of those that have none."""
    given = {each.tenant.name: each.tenant.share for each in ledgers}
    left = max(0.0, 1.0 - sum(given.values()))
    weights = sum(each.tenant.weight for each in ledgers if not given[each.tenant.name])
    for each in ledgers:
        each.entitlement = given[each.tenant.name] or left * each.tenant.weight / weights


def share_out(wait_ns: int, begin: Held, end: Held, made: Delays) -> None:
    """A wait is of those whose launches held the lanes, in proportion."""
    parts = {name: [max(0, new - old) for new, old in zip(each, begin.get(name, _NOTHING), strict=True)]
             for name, each in end.items()}  # fmt: skip
    total = sum(map(sum, parts.values()))
    for name, (plain, slow, steal) in parts.items() if total else ():
        made.behind[name] = made.behind.get(name, 0) + wait_ns * plain // total
        made.slow[name] = made.slow.get(name, 0) + wait_ns * slow // total
        made.steal_ns += wait_ns * steal // total
