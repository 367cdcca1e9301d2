"""What no schedule could beat: how many queries can be answered in time by a device, whoever chooses, and how evenly.

Every query is taken as work that can be stopped at any time, spread over all slots of the device at once, and answered
in parts; arrivals are known. What is left is a flow, in which a set of queries can be given at most so much time, and
that bound is submodular: it is reached by always serving the earliest deadline, and the best use of it is to take
queries by their worth for the time (Edmonds' greedy algorithm for polymatroids). All of it is above what any scheduler
with lanes, cuts, batches and no foresight can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations
from math import fsum, inf
from typing import NamedTuple

_MOST_SUBSETS = 7
"""Tenants up to which all sets of them are looked at for who can be kept from an even share; of more, those to which
and from which single tenants go."""


_ROUNDING = 1e-9
"""Share by which sums may be too small."""


class TimedQuery(NamedTuple):
    """A query: when it comes, when it has to be answered, and the time of one slot that it takes at least."""

    tenant: str
    arrival_ns: int
    deadline_ns: int
    slot_ns: float


def most_worth(queries: Sequence[TimedQuery], slots: int, worth: Mapping[str, float]) -> float:
    """The largest sum of what answers in time are worth, by tenant; tenants that are not named are worth nothing."""
    by_arrival = sorted(queries, key=lambda each: (each.arrival_ns, each.deadline_ns))
    rates = [worth.get(each.tenant, 0.0) / each.slot_ns for each in by_arrival]
    total = before = 0.0
    for least in sorted({rate for rate in rates if rate > 0}, reverse=True):
        given = _most_time_ns([each for each, rate in zip(by_arrival, rates, strict=True) if rate >= least], slots)
        total += (given - before) * least
        before = given
    everything = fsum(worth.get(each.tenant, 0.0) for each in queries)
    return min(everything, total * (1 + _ROUNDING))


def most_answers(queries: Sequence[TimedQuery], slots: int) -> float:
    """The largest number of answers in time."""
    return most_worth(queries, slots, {each.tenant: 1.0 for each in queries})


def largest_least_share(queries: Sequence[TimedQuery], slots: int) -> tuple[float, tuple[str, ...]]:
    """The largest attainment that all tenants can have at once, and the tenants that keep it from being larger.

    Whatever worth tenants are given, the least attainment is at most what all can be worth over what they would be
    worth if all were answered: the bound is the least of that over sets of tenants, each worth its mean time. It is
    exact for tenants whose queries take one time each where all sets are looked at.
    """
    count: dict[str, int] = {}
    time_ns: dict[str, float] = {}
    for each in queries:
        count[each.tenant] = count.get(each.tenant, 0) + 1
        time_ns[each.tenant] = time_ns.get(each.tenant, 0.0) + each.slot_ns
    tenants = sorted(count)
    known: dict[frozenset[str], float] = {}

    def share_of(some: frozenset[str]) -> float:
        if some not in known:
            worth = {name: time_ns[name] / count[name] for name in tenants if name in some}
            asked = fsum(worth[name] * count[name] for name in worth)
            most = most_worth([each for each in queries if each.tenant in some], slots, worth)
            known[some] = min(1.0, most * (1 + _ROUNDING) / asked)
        return known[some]

    if not tenants:
        return 1.0, ()
    if len(tenants) <= _MOST_SUBSETS:
        sets = [frozenset(some) for size in range(1, len(tenants) + 1) for some in combinations(tenants, size)]
    else:
        single = sorted(tenants, key=lambda name: share_of(frozenset({name})))
        sets = [frozenset(single[:size]) for size in range(1, len(tenants) + 1)]
    best = min(sets, key=lambda some: (share_of(some), len(some), sorted(some)))
    while len(tenants) > _MOST_SUBSETS:
        near = [best ^ {name} for name in tenants if best != {name}]
        other = min(near, key=lambda some: (share_of(some), len(some), sorted(some)))
        if share_of(other) >= share_of(best):
            break
        best = other
    return share_of(best), tuple(sorted(best))


def _most_time_ns(queries: Sequence[TimedQuery], slots: int) -> float:
    """The most slot time that these can be given between arrival and deadline, none more than it takes, in the order of
    arrival. The earliest deadline goes first: then as little as can be is lost."""
    waiting: list[tuple[int, int, float]] = []
    given, now, at = 0.0, 0.0, 0
    while at < len(queries) or waiting:
        if not waiting:
            now = max(now, queries[at].arrival_ns)
        while at < len(queries) and queries[at].arrival_ns <= now:
            heappush(waiting, (queries[at].deadline_ns, at, queries[at].slot_ns))
            at += 1
        deadline, number, left = heappop(waiting)
        until = min(deadline, queries[at].arrival_ns if at < len(queries) else inf)
        if deadline <= now:
            continue
        room = (until - now) * slots
        if left <= room:
            given += left
            now += left / slots
        else:
            given += room
            now = until
            if deadline > now:
                heappush(waiting, (deadline, number, left - room))
    return given
