"""What every tenant has had, and what it is entitled to: the memory that choices between tenants go by.

A tenant's entitlement is a token bucket of device time. It fills at the tenant's share of all lanes, and holds as much
as that share gives within an SLO, one query at least. A query that arrives while there is as much in it as it is
predicted to take is within the entitlement, and takes that out. What all tenants have within their entitlements can be
done in time by the earliest deadline, but for what lanes and cuts waste: in any stretch of time the work that has to
begin and end in it fits into the share of each.

What a tenant has beyond costs it nothing, and what it does not use is lost to it after an SLO: who used what others
left over is no worse off, and who was away for long cannot come back for more than its share.
"""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.types import Outcome, Query, Tenant

_MEMORY = 1 / 64
"""Weight of one query in the attainment, as soon as there were so many: a record of the last few seconds under load."""
_COUNTED = (Outcome.ANSWERED, Outcome.LATE, Outcome.REJECTED, Outcome.DROPPED)


class Account:
    """One tenant's; see `core.snapshot.AccountView`. `share` is its part of device time, from 0 to 1."""

    __slots__ = ("_count", "_filled_ns", "_level_ns", "attainment", "entitled", "share", "slo_ns")

    def __init__(self, slo_ns: int) -> None:
        self.slo_ns = slo_ns
        self.share = 0.0
        self.attainment = 1.0
        self.entitled: dict[int, float] = {}
        """What each live query within the entitlement took out of the bucket, by its number."""
        self._count = 0
        self._filled_ns: int | None = None
        self._level_ns = 0.0

    def enter(self, query: Query, work_ns: int, lanes: int, now_ns: int) -> None:
        """A query is admitted that is predicted to take `work_ns` of one of the lanes."""
        rate = self.share * lanes
        depth = max(rate * self.slo_ns, work_ns)
        if self._filled_ns is None:
            level = depth
        else:
            level = min(depth, self._level_ns + (now_ns - self._filled_ns) * rate)
        self._filled_ns = now_ns
        if level >= work_ns:
            level -= work_ns
            self.entitled[query.id] = work_ns
        self._level_ns = level

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        self.entitled.pop(query.id, None)
        if outcome in _COUNTED:
            self._count += 1
            step = max(_MEMORY, 1 / (self._count + 1))  # as if one before the first had been in time
            self.attainment += step * ((outcome is Outcome.ANSWERED) - self.attainment)


class Accounts:
    """Those of all tenants, by name in `known`."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[str, Account] = {}

    def deal(self, tenants: Iterable[Tenant]) -> None:
        """These are the tenants now: what named shares leave over is dealt to the others by weight.

        Shares that are above 1 together are scaled down to it. Tenants that stay keep what they had.
        """
        present = {tenant.name: tenant for tenant in tenants}
        self.known = {name: self.known.get(name) or Account(each.slo_ns) for name, each in present.items()}
        named = sum([each.share for each in present.values()])
        weights = sum([each.weight for each in present.values() if not each.share])
        for name, each in present.items():
            account = self.known[name]
            account.slo_ns = each.slo_ns
            if each.share:
                account.share = each.share / max(1.0, named)
            else:
                account.share = max(0.0, 1 - named) * each.weight / weights

    def enter(self, query: Query, work_ns: int, lanes: int, now_ns: int) -> None:
        """See Account."""
        self.known[query.tenant].enter(query, work_ns, lanes, now_ns)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """See Account."""
        account = self.known.get(query.tenant)
        if account is not None:
            account.leave(query, outcome)
