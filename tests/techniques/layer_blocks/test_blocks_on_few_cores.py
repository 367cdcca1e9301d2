"""Blocks on two cores: models of very different SLOs, which on few cores get into each other's way."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from cotenant.core.snapshot import Policy
from cotenant.policies.ordered.edf import Edf
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.techniques.layer_blocks.policy.slack_blocks import SlackBlocks
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Share
from scenario import MS, play

LANES = Share((0,)), Share((1,))
LATENCIES = {"far": (56 * MS, 29 * MS, 18), "middle": (20 * MS, 11 * MS, 15), "near": (7 * MS, 4 * MS, 20)}
"""On one core and on two, and the units."""
TENANTS = tuple(Tenant(name, 5 * one, cuts=tuple(range(units + 1))) for name, (one, _, units) in LATENCIES.items())
TABLES = {
    name: LatencyTable((LatencyRow(0, 1, 1, one), LatencyRow(0, 1, 2, two)), (1.0,) * units)
    for name, (one, two, units) in LATENCIES.items()
}


def arrivals(load: float, seed: int, until_ns: int = 5000 * MS) -> list[Query]:
    """Each tenant asks for the same core time."""
    rng, made = Random(seed), list[tuple[int, Tenant]]()
    for tenant in TENANTS:
        mean = LATENCIES[tenant.name][0] * len(TENANTS) / (load * len(LANES))
        now = rng.expovariate(1 / mean)
        while now < until_ns:
            made.append((round(now), tenant))
            now += rng.expovariate(1 / mean)
    made.sort(key=lambda each: each[0])
    return [Query(number, who.name, at, at + who.slo_ns) for number, (at, who) in enumerate(made)]


def in_time(policy: Policy, queries: list[Query]) -> Counter[str]:
    """Queries answered in time, by tenant, where each decision takes 0.1 ms."""
    made = play(policy, TENANTS, TablePredictor(TABLES), queries, decision_ns=MS // 10)
    return Counter(each.tenant for each in queries if made.outcomes[each.id] is Outcome.ANSWERED)


@pytest.mark.parametrize("load", [0.8, 1.2, 2.0])
def test_blocks_by_slack_answer_as_many_in_time_as_deadlines_first(load: float) -> None:
    queries = arrivals(load, 1)
    ours, others = in_time(SlackBlocks(LANES), queries), in_time(Edf(LANES), queries)
    assert ours.total() >= 0.97 * others.total()


def test_who_has_time_does_not_keep_the_cores_from_who_has_not() -> None:
    queries = arrivals(0.8, 2)
    offered = Counter(each.tenant for each in queries)
    patient = in_time(SlackBlocks(LANES), queries)
    eager = in_time(SlackBlocks(LANES, patience=1000.0), queries)
    assert patient["near"] >= 0.99 * offered["near"] > eager["near"]


def test_queries_are_merged_for_the_cores_that_they_will_get() -> None:
    rows = [(1, 1, 10), (2, 1, 21), (1, 2, 10), (2, 2, 15)]  # two cores quicken batches alone
    table = LatencyTable(tuple(LatencyRow(0, items, cores, ms * MS) for items, cores, ms in rows), (1.0,))
    queries = [Query(number, "a", 0, 30 * MS) for number in range(4)]
    made = play(SlackBlocks(LANES), [Tenant("a", 30 * MS, max_batch=2)], TablePredictor({"a": table}), queries)
    assert sorted(made.ended_ns.values()) == [10 * MS, 10 * MS, 20 * MS, 20 * MS]
