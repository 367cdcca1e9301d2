"""Upper bounds on any schedule: clairvoyant schedulers that know all arrivals and every latency.

Prices are put on kinds of queries such that no group of whole queries takes less time than the sum of its members'
prices. They are the dual of the linear programme that fills a device with groups. So the answers in time of any
schedule in some interval have a value of at most the interval's length. A second linear programme says how many queries
that can be, each of them divisible at will. Queries are not merged here and models not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from bench.papers.abacus._a100 import A100, BATCHES, NS_PER_MS
from cotenant.core.predictor import Member
from cotenant.types import Query
from cotenant.work import Work

Kind = tuple[str, int, int]
"""Model, shape and batch."""


def kinds_of(world: A100, models: Sequence[str]) -> list[list[Kind]]:
    """The kinds of queries of each model."""
    known = {model.name: model for model in world.models}
    return [
        [(name, shape, batch) for shape in range(max(1, len(known[name].lengths))) for batch in BATCHES]
        for name in models
    ]


def prices_ms(world: A100, models: Sequence[str], overlap: bool = True) -> tuple[dict[Kind, float], float]:
    """Prices, and the rate a second at which the device is full; every model gets the same share, every kind of it too.

    Without `overlap` queries run one by one, and the price of each is its latency.
    """
    kinds = kinds_of(world, models)
    flat = [kind for each in kinds for kind in each]
    groups = _groups(kinds, world.most(models) if overlap else 1)
    latencies = world.latencies_ms([tuple(_member(world, kind) for kind in group) for group in groups])
    at = {kind: number for number, kind in enumerate(flat)}
    entries = [(at[kind], column) for column, group in enumerate(groups) for kind in group]
    matrix = coo_matrix(
        (np.ones(len(entries)), tuple(zip(*entries, strict=True))), shape=(len(flat), len(groups))
    ).tocsr()
    share = np.array([1.0 / len(models) / len(each) for each in kinds for _ in each])
    worth = linprog(-share, A_ub=matrix.T, b_ub=latencies, bounds=(0, None), method="highs")
    assert worth.status == 0
    return {kind: float(price) for kind, price in zip(flat, worth.x, strict=True)}, 1000.0 / -float(worth.fun)


def merging_gain(world: A100, models: Sequence[str]) -> float:
    """Rate of a device that overlaps over that of one that does not, if rows of a model can be merged at will.

    Every model gets the same number of rows; sequence lengths are those of the third shape, the mean one.
    """
    known = {model.name: model for model in world.models}
    options = [[(name, min(2, max(0, len(known[name].lengths) - 1)), batch) for batch in BATCHES] for name in models]
    groups = _groups(options, world.most(models))
    latencies = world.latencies_ms([tuple(_member(world, kind) for kind in group) for group in groups])
    rows = np.array([[sum(kind[2] for kind in group if kind[0] == name) for group in groups] for name in models], float)
    alone = len(models) * len(BATCHES)
    serial = linprog(latencies[:alone], A_eq=rows[:, :alone], b_eq=np.ones(len(models)), method="highs")
    overlapped = linprog(latencies, A_eq=rows, b_eq=np.ones(len(models)), method="highs")
    assert serial.fun is not None, "the rates cannot be chosen"
    assert overlapped.fun is not None, "the rates cannot be chosen"
    return float(serial.fun / overlapped.fun)


def most_in_time(queries: Sequence[Query], prices: dict[Kind, float]) -> float:
    """The largest share of the queries that any such schedule could answer in time."""
    times = np.unique([time for query in queries for time in (query.arrival_ns, query.deadline_ns)]) / NS_PER_MS
    count = len(queries)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    spans: list[int] = []
    for number, query in enumerate(queries):
        first = int(np.searchsorted(times, query.arrival_ns / NS_PER_MS))
        last = int(np.searchsorted(times, query.deadline_ns / NS_PER_MS))
        price = prices[query.tenant, query.shape, query.items]
        rows.append(number)  # price * share answered = time it gets
        columns.append(number)
        values.append(price)
        for interval in range(first, last):
            rows.append(number)
            columns.append(count + len(spans))
            values.append(-1.0)
            spans.append(interval)
    served = coo_matrix((values, (rows, columns)), shape=(count, count + len(spans))).tocsr()
    room = coo_matrix(
        (np.ones(len(spans)), (spans, range(count, count + len(spans)))),
        shape=(len(times) - 1, count + len(spans)),
    ).tocsr()
    cost = np.concatenate([-np.ones(count), np.zeros(len(spans))])
    bounds = [(0, 1)] * count + [(0, None)] * len(spans)
    found = linprog(
        cost, A_eq=served, b_eq=np.zeros(count), A_ub=room, b_ub=np.diff(times), bounds=bounds, method="highs"
    )
    assert found.status == 0
    return -float(found.fun) / count


def _groups(kinds: Sequence[Sequence[Kind]], most: int) -> list[tuple[Kind, ...]]:
    """All groups of one to `most` models, by number of members; each model with one of its kinds."""
    sets = [chosen for size in range(1, most + 1) for chosen in combinations(kinds, size)]
    return [group for chosen in sets for group in product(*chosen)]


def _member(world: A100, kind: Kind) -> Member:
    name, shape, batch = kind
    return Member(Work(name, shape, batch, 0, world.operators(name)), 1)
