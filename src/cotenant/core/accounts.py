"""What every tenant has had, and its quota: the memory that choices between tenants go by.

A tenant's quota is a virtual device of its own, as fast as its share of all lanes, or as the rate takes that it is
guaranteed, which serves its queries in turn. A query that this device would end in time is in quota, and due when it
would; one that finds the device idle always is. All that is in quota can be done when it is due, but for what lanes and
cuts waste, since the virtual devices together are no faster than the lanes: while no tenant is behind that, whatever
comes next in quota can be done, too. What a quota leaves unused is gone: a tenant that was away cannot come back for
more than its share (virtual clocks: Zhang, SIGCOMM 1990). A quota is of answers: one in time out of quota, for which
the others left room, stands for a later one in quota, a few at most.

Quotas depend on the configuration and on the predictor alone, never on what clients send: a rate is priced by one row
of the first declared shape. Rates that take more than all lanes together are scaled down in proportion.

The recurrence of a virtual device of `quota` lanes, with `left` as the work that it has not done at time `at`:

    left := max(0, left - quota * (now - at)),  at := now           whenever a query comes, or the quota changes
    end   = now + (left + work) / quota                             of a query that comes now
    left := left + work                                             if the query is in quota

Two clocks go for each tenant: one at its quota, and one for attainments that are even, at the part that its work is of
all that was asked for of late, and faster the worse the tenant has fared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, expm1

from msgspec import UNSET

from cotenant.types import UNSET_RANK, Outcome, Query, Tenant

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
_NOTHING_NS = 1e-3
"""Work below which a virtual device is idle: the error of sums."""
_ANSWERED = Outcome.ANSWERED
_COUNTED = (_ANSWERED, Outcome.LATE, Outcome.REJECTED, Outcome.DROPPED)


class _Clock:
    """A virtual device of `quota` lanes; `due_ns` tells when each live query that is in quota is due, by number."""

    __slots__ = ("_at_ns", "_left_ns", "due_ns", "quota")

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self.quota = 0.0
        self._left_ns = 0.0
        """Work of a lane that the device has not done at `_at_ns`."""
        self._at_ns = 0

    def run(self, quota: float, now_ns: int) -> None:
        """From now on the device has so many lanes."""
        left = self._left_ns - self.quota * (now_ns - self._at_ns)
        self._left_ns, self._at_ns, self.quota = left if left >= _NOTHING_NS else 0.0, now_ns, quota

    def enter(self, query: Query, work_ns: int, quota: float, now_ns: int, slack: float = 0.0) -> bool:
        """A query comes that takes `work_ns` of a lane, where the device has `quota` lanes from now on. It is due by so
        much of the rest of its SLO later as `slack` says. Whether it is in quota."""
        left = self._left_ns - self.quota * (now_ns - self._at_ns)  # as in run: a call costs as much as all of it
        if left < _NOTHING_NS:
            left = 0.0
        self._at_ns, self.quota = now_ns, quota
        if quota > 0:
            deadline_ns = query.deadline_ns
            due = now_ns + (left + work_ns) / quota
            if due <= deadline_ns or not left:
                self._left_ns = left + work_ns
                if due > deadline_ns:
                    due = deadline_ns
                self.due_ns[query.id] = int(due + slack * (deadline_ns - due))
                return True
        self._left_ns = left
        return False

    def take_over(self, query: Query, work_ns: int, waiting: Mapping[int, tuple[int, int]]) -> int | None:
        """Put a query in quota in place of one of a lower rank that waits and is as long: the last one that is due.

        `waiting` has the rank and the work of each that waits, by number. The number of the one that gives way; None
        where there is none. `due_ns` is another dictionary then.
        """
        rank, dues, deadline_ns = query.rank, self.due_ns, query.deadline_ns
        found = [
            (other, dues[number], number)
            for number, (other, work) in waiting.items()
            if other > rank and work >= work_ns and dues.get(number, deadline_ns + 1) <= deadline_ns
        ]
        if not found:
            return None
        _, due, number = max(found)
        self.due_ns = {each: at for each, at in dues.items() if each != number} | {query.id: due}
        return number


class _Pace:
    """How what was asked for is counted: now for `scale`, where that at the beginning counts for 1."""

    __slots__ = ("_begun_ns", "_now_ns", "scale")

    def __init__(self) -> None:
        self.scale = 1.0
        self._begun_ns = self._now_ns = 0

    def pass_to(self, now_ns: int) -> None:
        """It is now so late."""
        if not self._now_ns:  # the clock begins anywhere
            self._begun_ns = self._now_ns = now_ns
        # and may have stood still for days: what was asked then counts for nothing now
        self.scale *= exp(min(_MOST_SCALES, (now_ns - self._now_ns) / _ASKED_NS))
        self._now_ns = now_ns

    @property
    def lane_ns(self) -> float:
        """What one lane that was asked for all the time adds up to."""
        age = (self._now_ns - self._begun_ns + _YOUNG_NS) / _ASKED_NS
        return self.scale * (_ASKED_NS * -expm1(-age))


class Account:
    """One tenant's; see `core.snapshot.AccountView`. `share` is its part of what rates leave of the lanes, from 0 to 1,
    and `rated` the lanes that the rate takes that it is guaranteed."""

    __slots__ = (
        *("_count", "_even", "_owed", "_own", "_pace", "_surplus", "_waiting", "_within"),
        *("asked_ns", "attainment", "kept", "merged", "rated", "share"),
    )

    def __init__(self, pace: _Pace) -> None:
        self.share = self.rated = 0.0
        self.attainment = self.kept = 1.0
        self.asked_ns = 0.0
        self._pace = pace
        self._within = 1.0
        """Part of its queries of late that were in quota."""
        self._own, self._even = _Clock(), _Clock()
        self._count = 0
        self._owed: set[int] = set()
        """Live queries that are in quota, or would be had not one out of quota stood for them."""
        self._waiting: dict[int, tuple[int, int]] = {}
        """Rank and work of those that have not begun, by number: their place in quota can be taken."""
        self.merged = 1.0
        """What of the work of its queries alone is left when they run as they were merged of late."""
        self._surplus = 0
        """Answers in time above those that it was owed."""

    @property
    def asked(self) -> float:
        """Lanes that what it asked for of late would keep busy."""
        return self.asked_ns / self._pace.lane_ns

    @property
    def quota(self) -> float:
        """See AccountView."""
        return self._own.quota

    @property
    def due_ns(self) -> dict[int, int]:
        """When those of its live queries are due that are in quota, by number."""
        return self._own.due_ns

    @property
    def even_due_ns(self) -> dict[int, int]:
        """The same were device time dealt in proportion to what each tenant asks for."""
        return self._even.due_ns

    def deal(self, quota: float, even: float, now_ns: int) -> None:
        """Lanes of its virtual devices from now on."""
        self._own.run(quota, now_ns)
        self._even.run(even, now_ns)

    def enter(self, query: Query, work_ns: int, even: float, now_ns: int) -> None:
        """A query is admitted; `even` are the lanes that are its tenant's part by what all ask for."""
        own, waiting, has_rank = self._own, self._waiting, query.rank < UNSET_RANK
        ahead = self.kept - 1
        if own.enter(query, work_ns, own.quota, now_ns, min(1.0, ahead / _AHEAD) if ahead > 0 else 0.0):
            if self._surplus > 0:
                self._surplus -= 1
                del own.due_ns[query.id]
            else:
                self._owed.add(query.id)
        elif has_rank and (other := own.take_over(query, work_ns, waiting)) is not None:
            self._owed.discard(other)
            self._owed.add(query.id)
        if not self._even.enter(query, work_ns, even, now_ns) and has_rank:
            self._even.take_over(query, work_ns, waiting)
        waiting[query.id] = query.rank, work_ns

    def begin(self, queries: Sequence[Query], part: float) -> None:
        """Queries begin as one, for a part of the work that each takes alone."""
        waiting = self._waiting
        for query in queries:
            waiting.pop(query.id, None)
        if part != self.merged:
            self.merged += min(1.0, len(queries) * _MERGED) * (part - self.merged)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        number = query.id
        is_owed = number in self._owed
        self._owed.discard(number)
        self._own.due_ns.pop(number, None)
        self._even.due_ns.pop(number, None)
        is_answered = outcome is _ANSWERED
        if not is_answered:  # else it has begun
            self._waiting.pop(number, None)
        if outcome in _COUNTED:
            self._surplus = max(-_STANDING, min(_STANDING, self._surplus + is_answered - is_owed))
            self._count += 1
            step = max(_MEMORY, 1 / (self._count + 1))  # as if one before the first had been in time
            self.attainment += step * (is_answered - self.attainment)
            self._within += step * (is_owed - self._within)
            self.kept = self.attainment / max(self._within, _LEAST)


class Accounts:
    """Those of all tenants, by name in `known`."""

    __slots__ = ("_asked_ns", "_had_ns", "_lanes", "_pace", "known", "rated_part")

    def __init__(self) -> None:
        self.known: dict[str, Account] = {}
        self._asked_ns = self._had_ns = 0.0
        self._pace = _Pace()
        self._lanes = 0
        self.rated_part = 0.0
        """Part of all lanes that guaranteed rates take; above 1 each is kept only by so much less."""

    def deal(self, tenants: Iterable[Tenant], lanes: int, row_ns: Callable[[Tenant], float], now_ns: int) -> None:
        """These are the tenants and lanes now, and what `row_ns` says is what a row of the first shape takes of a lane.

        Guaranteed rates go first, scaled down where they take more than all lanes. Of the lanes that they leave each
        tenant has a share: what named shares leave over is dealt to the others by weight. Shares that are above 1
        together are scaled down to it. Tenants that stay keep what they had.
        """
        present = {tenant.name: tenant for tenant in tenants}
        self.known = {name: self.known.get(name) or Account(self._pace) for name in present}
        self._lanes = lanes
        self._add_up()
        rated = {name: each.rate * row_ns(each) / 1e9 for name, each in present.items() if each.rate is not UNSET}
        self.rated_part = sum(rated.values()) / max(1, lanes)
        named = sum([each.share for each in present.values()])
        weights = sum([each.weight for each in present.values() if not each.share])
        unrated, left = lanes * max(0.0, 1 - self.rated_part), max(0.0, 1 - named)
        for name, each in present.items():
            account = self.known[name]
            account.rated = rated.get(name, 0.0) / max(1.0, self.rated_part)
            account.share = each.share / max(1.0, named) if each.share else left * each.weight / weights
            account.deal(max(account.rated, account.share * unrated), self._even(account), now_ns)

    def enter(self, query: Query, work_ns: int, now_ns: int) -> None:
        """A query is admitted that is predicted to take `work_ns` of one of the lanes, alone."""
        account = self.known[query.tenant]
        work_ns = self._ask(account, work_ns, now_ns)
        account.enter(query, work_ns, self._even(account), now_ns)

    def refused(self, query: Query, work_ns: int, now_ns: int) -> None:
        """A query was not admitted, for want of room in its tenant's queue: it was asked for, and is lost."""
        self._ask(self.known[query.tenant], work_ns, now_ns)
        self.leave(query, Outcome.REJECTED)

    def begin(self, tenant: str, queries: Sequence[Query], part: float) -> None:
        """Queries of a tenant begin as one, for a part of the work that each takes alone."""
        if (account := self.known.get(tenant)) is not None:
            account.begin(queries, part)

    def leave(self, query: Query, outcome: Outcome) -> None:
        """A query has ended."""
        account = self.known.get(query.tenant)
        if account is not None:
            before = account.attainment
            account.leave(query, outcome)
            self._had_ns += account.asked_ns * (account.attainment - before)

    def _ask(self, account: Account, work_ns: int, now_ns: int) -> int:
        """A tenant asks for a query of so much work; what of it is left as its queries are merged."""
        pace, work_ns = self._pace, round(work_ns * account.merged)
        pace.pass_to(now_ns)
        if pace.scale > 1e100:
            for each in self.known.values():
                each.asked_ns /= pace.scale
            pace.scale = 1.0
            self._add_up()
        counted = work_ns * pace.scale
        account.asked_ns += counted
        self._asked_ns += counted
        self._had_ns += counted * account.attainment
        return work_ns

    def _even(self, account: Account) -> float:
        """Lanes of a tenant were device time dealt in proportion to what each tenant asks for."""
        if not account.asked_ns:
            return 0.0
        mean = self._had_ns / self._asked_ns
        faster = min(2.0, max(0.5, (mean / max(account.attainment, _LEAST)) ** _EVENING))
        return self._lanes * min(1.0, account.asked_ns / self._asked_ns * faster)

    def _add_up(self) -> None:
        every = self.known.values()
        self._asked_ns = sum([each.asked_ns for each in every])
        self._had_ns = sum([each.asked_ns * each.attainment for each in every])
