"""What every tenant has had, and what it is entitled to: the memory that choices between tenants go by.

A tenant's entitlement is a virtual device of its own, as fast as its share of all lanes, or as the rate takes that it
is guaranteed, which serves its queries in turn. A query that this device would end in time is within the entitlement,
and due when it would; one that finds the device idle always is. All that is within entitlements can be done when it is
due, but for what lanes and cuts waste, since the virtual devices together are no faster than the lanes: while nobody is
behind that, whatever comes next within an entitlement can be done, too. What it leaves unused is gone: who was away
cannot come back for more than its share (virtual clocks: Zhang, SIGCOMM 1990). An entitlement is to answers: one in
time beyond it, which the others left room for, stands for a later one within it, a few at most, so that what is beyond
is no gift to those who get it.

Two clocks go for each tenant: one at its share, and one for attainments that are even, at the part that its work is of
all that was asked for of late, and faster the worse the tenant has fared.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1

from msgspec import UNSET

from cotenant.types import Outcome, Query, Tenant

_MEMORY = 1 / 64
"""Weight of one query in the attainment, as soon as there were so many: a record of the last few seconds under load."""
_ASKED_NS = 10_000_000_000
"""Time in which what was asked for falls to 1/e of its weight."""
_EVENING = 4
"""Power of mean attainment over a tenant's own by which its even clock is faster: at 1.2 to 3 times the capacity four
tenants (tests/policies/test_selective.py) got 0.91 to 0.95 of the largest smallest attainment, 0.79 to 0.90 without."""
_AHEAD = 0.1
"""A tenant that has had so much more in time than was within its share needs no head start: its queries within are due
at their deadlines, and what is beyond can go before them. With this four tenants at 1.2 times the capacity got 0.93 of
the largest number of answers, 0.89 without."""
_STANDING = 8
"""Answers beyond a share, at most, that stand for later ones within it: more would be debts of long ago."""
_MERGED = 1 / 64
"""Weight of a query in what merging leaves of the work."""
_YOUNG_NS = 1_000_000_000
"""Time for which whatever is asked for first counts as asked for."""
_MOST_SCALES = 200.0
"""Lengths of that time, at most, by which the clock goes on at once: more make no difference."""
_LEAST = 0.05
"""Attainment below which a tenant counts as one that has this."""
_COUNTED = (Outcome.ANSWERED, Outcome.LATE, Outcome.REJECTED, Outcome.DROPPED)


class _Clock:
    """A virtual device; `due_ns` tells when each live query that is within it is due, by number."""

    __slots__ = ("_end_ns", "due_ns")

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self._end_ns = 0.0

    def enter(self, query: Query, work_ns: int, rate: float, now_ns: int, slack: float = 0.0) -> bool:
        """A query comes that takes `work_ns` of a lane; the device is `rate` times as fast as one. It is due by so much
        of the rest of its SLO later as `slack` says. Whether it is within."""
        is_idle = self._end_ns <= now_ns
        if rate <= 0:
            return False
        end = (now_ns if is_idle else self._end_ns) + work_ns / rate
        if not is_idle and end > query.deadline_ns:
            return False
        self._end_ns = end
        due = min(end, query.deadline_ns)
        self.due_ns[query.id] = int(due + slack * (query.deadline_ns - due))
        return True


class _Pace:
    """How what was asked for is counted: now for `scale`, where that at the beginning counts for 1."""

    __slots__ = ("_begun_ns", "_now_ns", "_whole_ns", "rated", "scale")

    def __init__(self) -> None:
        self.scale = 1.0
        self.rated = 0.0
        """Lanes that guaranteed rates take: shares are of what they leave."""
        self._whole_ns = 1.0
        self._begun_ns = self._now_ns = 0

    def pass_to(self, now_ns: int) -> None:
        """It is now so late."""
        if not self._now_ns:  # the clock begins anywhere
            self._begun_ns = self._now_ns = now_ns
        # and may have stood still for days: what was asked then counts for nothing now
        self.scale *= exp(min(_MOST_SCALES, (now_ns - self._now_ns) / _ASKED_NS))
        self._now_ns = now_ns
        age = (now_ns - self._begun_ns + _YOUNG_NS) / _ASKED_NS
        self._whole_ns = _ASKED_NS * -expm1(-age)

    @property
    def lane_ns(self) -> float:
        """What one lane that was asked for all the time adds up to."""
        return self.scale * self._whole_ns


class Account:
    """One tenant's; see `core.snapshot.AccountView`. `share` is its part of device time, from 0 to 1, and `rate` how
    many queries a second it may send even where they take more than that."""

    __slots__ = (
        *("_count", "_owed", "_own", "_pace", "_part", "_rated", "_surplus", "_within"),
        *("asked_ns", "attainment", "merged", "rate", "share"),
    )

    def __init__(self, pace: _Pace) -> None:
        self.share = self.rate = self._rated = 0.0
        self.attainment = 1.0
        self.asked_ns = 0.0
        self._pace = pace
        self._within = 1.0
        """Part of its queries of late that were within its share."""
        self._own, self._part = _Clock(), _Clock()
        self._count = 0
        self._owed: set[int] = set()
        """Live queries that are within the share, or would be had not one beyond it stood for them."""
        self.merged = 1.0
        """What of the work of its queries alone is left when they run as they were merged of late."""
        self._surplus = 0
        """Answers in time above those that it was owed."""

    @property
    def asked(self) -> float:
        """Lanes that what it asked for of late would keep busy."""
        return self.asked_ns / self._pace.lane_ns

    @property
    def due_ns(self) -> dict[int, int]:
        """When those of its live queries are due that are within its share, by number."""
        return self._own.due_ns

    @property
    def even_due_ns(self) -> dict[int, int]:
        """The same were device time dealt in proportion to what each tenant asks for."""
        return self._part.due_ns

    def guarantee(self, rate: float) -> None:
        """So many queries a second from now on."""
        self._pace.rated -= self._rated
        self._rated, self.rate = 0.0, rate

    def takes(self, work_ns: float) -> None:
        """A query of it takes so much of a lane: a guaranteed rate of such goes before shares."""
        if self.rate:
            before, self._rated = self._rated, self.rate * work_ns / 1e9
            self._pace.rated += self._rated - before

    def entitled(self, lanes: int, work_ns: float) -> float:
        """See AccountView."""
        return max(self.share * max(0.0, lanes - self._pace.rated), self.rate * work_ns / 1e9)

    def enter(self, query: Query, work_ns: int, lanes: int, part: float, now_ns: int) -> None:
        """A query is admitted; `part` is what its tenant's work is of all."""
        ahead = self.attainment / max(self._within, _LEAST) - 1
        slack = min(1.0, max(0.0, ahead / _AHEAD))
        if self._own.enter(query, work_ns, self.entitled(lanes, work_ns), now_ns, slack):
            if self._surplus > 0:
                self._surplus -= 1
                del self._own.due_ns[query.id]
            else:
                self._owed.add(query.id)
        self._part.enter(query, work_ns, part * lanes, now_ns)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        is_owed = query.id in self._owed
        self._owed.discard(query.id)
        self._own.due_ns.pop(query.id, None)
        self._part.due_ns.pop(query.id, None)
        if outcome in _COUNTED:
            is_answered = outcome is Outcome.ANSWERED
            self._surplus = max(-_STANDING, min(_STANDING, self._surplus + is_answered - is_owed))
            self._count += 1
            step = max(_MEMORY, 1 / (self._count + 1))  # as if one before the first had been in time
            self.attainment += step * (is_answered - self.attainment)
            self._within += step * (is_owed - self._within)


class Accounts:
    """Those of all tenants, by name in `known`."""

    __slots__ = ("_asked_ns", "_had_ns", "_pace", "known")

    def __init__(self) -> None:
        self.known: dict[str, Account] = {}
        self._asked_ns = self._had_ns = 0.0
        self._pace = _Pace()

    def deal(self, tenants: Iterable[Tenant]) -> None:
        """These are the tenants now: what named shares leave over is dealt to the others by weight.

        Shares that are above 1 together are scaled down to it. Tenants that stay keep what they had.
        """
        present = {tenant.name: tenant for tenant in tenants}
        for account in self.known.values():
            account.guarantee(0.0)
        self.known = {name: self.known.get(name) or Account(self._pace) for name in present}
        self._add_up()
        named = sum([each.share for each in present.values()])
        weights = sum([each.weight for each in present.values() if not each.share])
        for name, each in present.items():
            left = max(0.0, 1 - named)
            self.known[name].guarantee(0.0 if each.rate is UNSET else each.rate)
            self.known[name].share = each.share / max(1.0, named) if each.share else left * each.weight / weights

    def enter(self, query: Query, work_ns: int, lanes: int, now_ns: int) -> None:
        """A query is admitted that is predicted to take `work_ns` of one of the lanes, alone."""
        account, pace = self.known[query.tenant], self._pace
        work_ns = round(work_ns * account.merged)
        pace.pass_to(now_ns)
        if pace.scale > 1e100:
            for each in self.known.values():
                each.asked_ns /= pace.scale
            pace.scale = 1.0
            self._add_up()
        account.takes(work_ns)
        counted = work_ns * pace.scale
        account.asked_ns += counted
        self._asked_ns += counted
        self._had_ns += counted * account.attainment
        mean = self._had_ns / self._asked_ns
        faster = min(2.0, max(0.5, (mean / max(account.attainment, _LEAST)) ** _EVENING))
        account.enter(query, work_ns, lanes, min(1.0, account.asked_ns / self._asked_ns * faster), now_ns)

    def begin(self, tenant: str, queries: int, part: float) -> None:
        """So many queries of a tenant begin as one, for a part of the work that each takes alone."""
        if (account := self.known.get(tenant)) is not None:
            account.merged += min(1.0, queries * _MERGED) * (part - account.merged)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        account = self.known.get(query.tenant)
        if account is not None:
            before = account.attainment
            account.leave(query, outcome)
            self._had_ns += account.asked_ns * (account.attainment - before)

    def _add_up(self) -> None:
        every = self.known.values()
        self._asked_ns = sum([each.asked_ns for each in every])
        self._had_ns = sum([each.asked_ns * each.attainment for each in every])
