"""Upper bounds on the queries that any schedule can answer in time, on their value, and on the least attainment.

Relaxation: arrivals are known, and a query is preemptible work that may spread over all slots and be answered in part.
Then the slot time `f(S)` that a set `S` of queries can get before its deadlines is a maximum flow. Earliest deadline
first reaches it. `f` is submodular, so the greedy algorithm for polymatroids (Edmonds, 1970) is optimal: take queries
by value per slot time. No scheduler with lanes, cuts, batches and unknown arrivals can exceed these bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations
from math import fsum, inf
from typing import NamedTuple

_MOST_SUBSETS = 7
"""Number of tenants up to which all their subsets are searched; above it, a local search adds or removes one tenant."""


_ROUNDING = 1e-9
"""Relative rounding error of sums."""


class TimedQuery(NamedTuple):
    """A query: its arrival, its deadline, and the least slot time that it needs."""

    tenant: str
    arrival_ns: int
    deadline_ns: int
    slot_ns: float


def most_value(queries: Sequence[TimedQuery], slots: float, values: Mapping[str, float]) -> float:
    """The largest total value of queries answered in time. `values` is by tenant; a missing tenant has value 0."""
    by_arrival = sorted(queries, key=_by_arrival)
    rates = [values.get(each.tenant, 0.0) / each.slot_ns for each in by_arrival]
    total = before = 0.0
    for least in sorted({rate for rate in rates if rate > 0}, reverse=True):
        given = _most_time_ns([each for each, rate in zip(by_arrival, rates, strict=True) if rate >= least], slots)
        total += (given - before) * least
        before = given
    everything = fsum(values.get(each.tenant, 0.0) for each in queries)
    return min(everything, total * (1 + _ROUNDING))


def most_answers(queries: Sequence[TimedQuery], slots: float) -> float:
    """The largest number of queries answered in time."""
    return most_value(queries, slots, {each.tenant: 1.0 for each in queries})


def answers_alone(queries: Sequence[TimedQuery], slots: float) -> float:
    """Number of queries that a tenant could answer in time alone on `slots` slots, which may be a fraction.

    Queries are served whole in order of arrival, without those that would be late. A query with no other before it
    always counts: a share is of time, and the whole device is faster than a fraction of it. The result is at most
    `most_answers`, so that all tenants can reach theirs at once.
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
    """The largest number of queries answered in time where each tenant keeps its `answers_alone`; and these, by tenant.

    `shares` are parts of the device from 0 to 1, by tenant. For any values `v >= 1` the number is at most
    `most_value(v) - sum((v - 1) * kept)`, the Lagrange dual. `v` comes from the greedy algorithm on the contraction of
    the polymatroid by the kept answers. The bound is exact if the queries of each tenant take equal time and all
    subsets are searched.
    """
    mine: dict[str, list[TimedQuery]] = {}
    for each in queries:
        mine.setdefault(each.tenant, []).append(each)
    kept = {name: answers_alone(mine[name], slots * shares.get(name, 0.0)) for name in sorted(mine)}
    mean_ns = {name: fsum(each.slot_ns for each in mine[name]) / len(mine[name]) for name in kept}
    cache: dict[frozenset[str], float] = {}

    def left_ns(some: frozenset[str]) -> float:
        """Slot time that these tenants could get beyond their kept answers."""
        if some not in cache:
            by_arrival = sorted([each for each in queries if each.tenant in some], key=_by_arrival)
            cache[some] = _most_time_ns(by_arrival, slots) - fsum(kept[name] * mean_ns[name] for name in some)
        return cache[some]

    order = sorted(kept, key=lambda name: (mean_ns[name], name))
    values = dict.fromkeys(kept, 0.0)
    for size, name in enumerate(order, 1):
        tight = _least_set(left_ns, frozenset(order[:size]), frozenset(order[size:]))
        step = 1 / mean_ns[name] - (1 / mean_ns[order[size]] if size < len(order) else 0.0)
        for other in sorted(tight):
            values[other] += step * mean_ns[other]
    above = fsum((values[name] - 1) * kept[name] for name in kept)
    return min(most_answers(queries, slots), most_value(queries, slots, values) - above), kept


def largest_least_share(queries: Sequence[TimedQuery], slots: int) -> tuple[float, tuple[str, ...]]:
    """The largest attainment that all tenants can reach at once (max-min), and the set of tenants that limits it.

    For any values, the least attainment is at most `most_value` over the value of all queries. The bound is the minimum
    over sets of tenants, with the mean slot time of a tenant as its value. It is exact if the queries of each tenant
    take equal time and all subsets are searched.
    """
    count: dict[str, int] = {}
    time_ns: dict[str, float] = {}
    for each in queries:
        count[each.tenant] = count.get(each.tenant, 0) + 1
        time_ns[each.tenant] = time_ns.get(each.tenant, 0.0) + each.slot_ns
    tenants = sorted(count)
    cache: dict[frozenset[str], float] = {}

    def share_of(some: frozenset[str]) -> float:
        if some not in cache:
            values = {name: time_ns[name] / count[name] for name in tenants if name in some}
            total = fsum(values[name] * count[name] for name in values)
            most = most_value([each for each in queries if each.tenant in some], slots, values)
            cache[some] = min(1.0, most * (1 + _ROUNDING) / total)
        return cache[some]

    if not tenants:
        return 1.0, ()
    best = _least_set(lambda some: share_of(some) if some else inf, frozenset(), frozenset(tenants))
    return share_of(best), tuple(sorted(best))


def _least_set(
    cost: Callable[[frozenset[str]], float], always: frozenset[str], others: frozenset[str]
) -> frozenset[str]:
    """The set of least cost that contains `always` and any of `others`: by enumeration, or by local search for more
    than `_MOST_SUBSETS` others."""

    def key(some: frozenset[str]) -> tuple[float, int, list[str]]:
        return cost(some), len(some), sorted(some)

    if len(others) <= _MOST_SUBSETS:
        return min(
            [always.union(some) for size in range(len(others) + 1) for some in combinations(sorted(others), size)],
            key=key,
        )
    single = sorted(others, key=lambda name: (cost(always | {name}), name))
    best = min([always.union(single[:size]) for size in range(len(single) + 1)], key=key)
    while True:
        other = min([best ^ {name} for name in single], key=key)
        if cost(other) >= cost(best):
            return best
        best = other


def _by_arrival(query: TimedQuery) -> tuple[int, int]:
    return query.arrival_ns, query.deadline_ns


def _most_time_ns(queries: Sequence[TimedQuery], slots: float) -> float:
    """The most slot time that queries, sorted by arrival, can use before their deadlines: preemptive earliest deadline
    first on all slots."""
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
