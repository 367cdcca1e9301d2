"""What no schedule could beat: how many queries can be answered in time by a device, whoever chooses, and how evenly;
and how many where every tenant keeps what it could have alone on its share.

Every query is taken as work that can be stopped at any time, spread over all slots of the device at once, and answered
in parts; arrivals are known. What is left is a flow, in which a set of queries can be given at most so much time, and
that bound is submodular: it is reached by always serving the earliest deadline, and the best use of it is to take
queries by their worth for the time (Edmonds' greedy algorithm for polymatroids). All of it is above what any scheduler
with lanes, cuts, batches and no foresight can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def most_worth(queries: Sequence[TimedQuery], slots: float, worth: Mapping[str, float]) -> float:
    """The largest sum of what answers in time are worth, by tenant; tenants that are not named are worth nothing."""
    by_arrival = sorted(queries, key=_by_arrival)
    rates = [worth.get(each.tenant, 0.0) / each.slot_ns for each in by_arrival]
    total = before = 0.0
    for least in sorted({rate for rate in rates if rate > 0}, reverse=True):
        given = _most_time_ns([each for each, rate in zip(by_arrival, rates, strict=True) if rate >= least], slots)
        total += (given - before) * least
        before = given
    everything = fsum(worth.get(each.tenant, 0.0) for each in queries)
    return min(everything, total * (1 + _ROUNDING))


def most_answers(queries: Sequence[TimedQuery], slots: float) -> float:
    """The largest number of answers in time."""
    return most_worth(queries, slots, {each.tenant: 1.0 for each in queries})


def answers_alone(queries: Sequence[TimedQuery], slots: float) -> float:
    """How many answers in time a tenant could have alone on so many slots, or a part of one.

    Queries are served whole and in the order of arrival, without those that would be late; one that finds nobody before
    it is served whatever its deadline, since a share is of time and a device is quicker than a part of it. At most what
    a flow gives, so that all tenants can have as much at once.
    """
    count, free_ns = 0, -inf
    for each in sorted(queries, key=_by_arrival) if slots > 0 else ():
        end_ns = max(free_ns, each.arrival_ns) + each.slot_ns / slots
        if free_ns <= each.arrival_ns or end_ns <= each.deadline_ns:
            count, free_ns = count + 1, end_ns
    return min(float(count), most_answers(queries, slots))


def most_answers_with_shares(
    queries: Sequence[TimedQuery], slots: int, shares: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The largest number of answers in time where every tenant keeps at least what it could have alone on its share of
    the device, by tenant from 0 to 1, and how many answers that is for each.

    Whatever an answer of a tenant is worth above 1, the number is at most what all could be worth less what those that
    are kept are worth above 1. The worth is what the same greedy algorithm finds when what is kept is taken out before
    (the contraction of the polymatroid): exact for tenants whose queries take one time each where all sets are looked
    at.
    """
    mine: dict[str, list[TimedQuery]] = {}
    for each in queries:
        mine.setdefault(each.tenant, []).append(each)
    kept = {name: answers_alone(mine[name], slots * shares.get(name, 0.0)) for name in sorted(mine)}
    mean_ns = {name: fsum(each.slot_ns for each in mine[name]) / len(mine[name]) for name in kept}
    known: dict[frozenset[str], float] = {}

    def left_ns(some: frozenset[str]) -> float:
        """What some could be given beside what they keep."""
        if some not in known:
            by_arrival = sorted([each for each in queries if each.tenant in some], key=_by_arrival)
            known[some] = _most_time_ns(by_arrival, slots) - fsum(kept[name] * mean_ns[name] for name in some)
        return known[some]

    order = sorted(kept, key=lambda name: (mean_ns[name], name))
    worth = dict.fromkeys(kept, 0.0)
    for size, name in enumerate(order, 1):
        tight = _least_set(left_ns, frozenset(order[:size]), frozenset(order[size:]))
        step = 1 / mean_ns[name] - (1 / mean_ns[order[size]] if size < len(order) else 0.0)
        for other in sorted(tight):
            worth[other] += step * mean_ns[other]
    above = fsum((worth[name] - 1) * kept[name] for name in kept)
    return min(most_answers(queries, slots), most_worth(queries, slots, worth) - above), kept


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
    best = _least_set(lambda some: share_of(some) if some else inf, frozenset(), frozenset(tenants))
    return share_of(best), tuple(sorted(best))


def _least_set(
    value: Callable[[frozenset[str]], float], always: frozenset[str], others: frozenset[str]
) -> frozenset[str]:
    """The set with the least value that holds `always` and some of `others`: of many others, one that gets no better by
    a single one."""

    def key(some: frozenset[str]) -> tuple[float, int, list[str]]:
        return value(some), len(some), sorted(some)

    if len(others) <= _MOST_SUBSETS:
        return min(
            [always.union(some) for size in range(len(others) + 1) for some in combinations(sorted(others), size)],
            key=key,
        )
    single = sorted(others, key=lambda name: (value(always | {name}), name))
    best = min([always.union(single[:size]) for size in range(len(single) + 1)], key=key)
    while True:
        other = min([best ^ {name} for name in single], key=key)
        if value(other) >= value(best):
            return best
        best = other


def _by_arrival(query: TimedQuery) -> tuple[int, int]:
    return query.arrival_ns, query.deadline_ns


def _most_time_ns(queries: Sequence[TimedQuery], slots: float) -> float:
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
