"""What every tenant has had, and what it is entitled to: the memory that choices between tenants go by.

A tenant's entitlement is a virtual device of its own, as fast as its share of all lanes, which serves its queries in
turn. A query that this device would end in time is within the entitlement, and due when it would; one that finds the
device idle always is. All that is within entitlements can be done when it is due, but for what lanes and cuts waste,
since the virtual devices together are no faster than the lanes: while nobody is behind that, whatever comes next within
an entitlement can be done, too. What a tenant has beyond costs it nothing, and what it leaves unused is gone: who was
away cannot come back for more than its share (virtual clocks: Zhang, SIGCOMM 1990).

Two clocks go for each tenant: one at its share, and one at the part that its work is of all that was asked for of late.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

from cotenant.types import Outcome, Query, Tenant

_MEMORY = 1 / 64
"""Weight of one query in the attainment, as soon as there were so many: a record of the last few seconds under load."""
_ASKED_NS = 10_000_000_000
"""Time in which what was asked for falls to 1/e of its weight."""
_COUNTED = (Outcome.ANSWERED, Outcome.LATE, Outcome.REJECTED, Outcome.DROPPED)


class _Clock:
    """A virtual device; `due_ns` tells when each live query that is within it is due, by number."""

    __slots__ = ("_end_ns", "due_ns")

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self._end_ns = 0.0

    def enter(self, query: Query, work_ns: int, rate: float, now_ns: int) -> None:
        """A query comes that takes `work_ns` of a lane; the device is `rate` times as fast as one."""
        is_idle = self._end_ns <= now_ns
        if rate <= 0:
            return
        end = (now_ns if is_idle else self._end_ns) + work_ns / rate
        if is_idle or end <= query.deadline_ns:
            self._end_ns = end
            self.due_ns[query.id] = min(int(end), query.deadline_ns)


class Account:
    """One tenant's; see `core.snapshot.AccountView`. `share` is its part of device time, from 0 to 1."""

    __slots__ = ("_count", "_own", "_part", "asked_ns", "attainment", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self.attainment = 1.0
        self.asked_ns = 0.0
        self._own, self._part = _Clock(), _Clock()
        self._count = 0

    @property
    def due_ns(self) -> dict[int, int]:
        """When those of its live queries are due that are within its share, by number."""
        return self._own.due_ns

    @property
    def even_due_ns(self) -> dict[int, int]:
        """The same were device time dealt in proportion to what each tenant asks for."""
        return self._part.due_ns

    def enter(self, query: Query, work_ns: int, lanes: int, part: float, now_ns: int) -> None:
        """A query is admitted; `part` is what its tenant's work is of all."""
        self._own.enter(query, work_ns, self.share * lanes, now_ns)
        self._part.enter(query, work_ns, part * lanes, now_ns)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        self._own.due_ns.pop(query.id, None)
        self._part.due_ns.pop(query.id, None)
        if outcome in _COUNTED:
            self._count += 1
            step = max(_MEMORY, 1 / (self._count + 1))  # as if one before the first had been in time
            self.attainment += step * ((outcome is Outcome.ANSWERED) - self.attainment)


_MOST_SCALES = 200.0


class Accounts:
    """Those of all tenants, by name in `known`."""

    __slots__ = ("_asked_ns", "_now_ns", "_scale", "known")

    def __init__(self) -> None:
        self.known: dict[str, Account] = {}
        self._asked_ns = 0.0
        self._now_ns = 0
        self._scale = 1.0
        """What work that is asked for now counts for, where that at the beginning counts for 1."""

    def deal(self, tenants: Iterable[Tenant]) -> None:
        """These are the tenants now: what named shares leave over is dealt to the others by weight.

        Shares that are above 1 together are scaled down to it. Tenants that stay keep what they had.
        """
        present = {tenant.name: tenant for tenant in tenants}
        self.known = {name: self.known.get(name) or Account() for name in present}
        self._asked_ns = sum([account.asked_ns for account in self.known.values()])
        named = sum([each.share for each in present.values()])
        weights = sum([each.weight for each in present.values() if not each.share])
        for name, each in present.items():
            left = max(0.0, 1 - named)
            self.known[name].share = each.share / max(1.0, named) if each.share else left * each.weight / weights

    def enter(self, query: Query, work_ns: int, lanes: int, now_ns: int) -> None:
        """A query is admitted that is predicted to take `work_ns` of one of the lanes."""
        account = self.known[query.tenant]
        # the clock begins anywhere, and may have stood still for days: what was asked then counts for nothing now
        self._scale *= exp(min(_MOST_SCALES, (now_ns - (self._now_ns or now_ns)) / _ASKED_NS))
        self._now_ns = now_ns
        if self._scale > 1e100:
            for each in self.known.values():
                each.asked_ns /= self._scale
            self._asked_ns, self._scale = self._asked_ns / self._scale, 1.0
        account.asked_ns += work_ns * self._scale
        self._asked_ns += work_ns * self._scale
        account.enter(query, work_ns, lanes, account.asked_ns / self._asked_ns, now_ns)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        account = self.known.get(query.tenant)
        if account is not None:
            account.leave(query, outcome)
