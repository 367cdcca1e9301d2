"""What clients of one tenant send takes nothing of another one's quota: adversarial mixes through the engine.

The mixes are those of the benchmark `isolation-core`: rates, rows, priorities of requests and of tenants, time-outs,
withdrawn queries, floods, bursts and small queues.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bench.isolation_core import drawn, kept, queries_of
from cotenant.policies import policy_class
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.types import Outcome, Query, Tenant, priority_rank
from cotenant.work import Share
from scenario import MS, ONE_LANE, TWO_LANES, play, tables

HARD = (2, 30, 37, 43, 45, 46, 50, 59)
"""Mixes in which requests that go before quotas, or rates that requests price, take most of what is guaranteed."""


@pytest.mark.parametrize("seed", [*HARD, *range(100, 112)])
def test_a_tenant_that_keeps_to_its_quota_has_what_it_could_have_alone_on_it(seed: int) -> None:
    rows = list(kept(seed))
    assert all(row["kept"] >= 0.9 for row in rows), rows


def test_the_mixes_have_what_adversaries_send() -> None:
    mixes = [drawn(seed) for seed in range(1, 60)]
    parties = [each for mix in mixes for each in mix.parties]
    for what in ("timeout", "leaves", "priority"):
        assert sum(bool(getattr(each, what)) for each in parties) > 20, what
    assert sum(each.rows > 1 for each in parties) > 20
    assert sum(isinstance(each.tenant.rate, float) for each in parties) > 20
    assert sum(each.tenant.max_queue < 20 for each in parties) > 20
    for seed, mix in list(enumerate(mixes, 1))[:8]:
        sent = Counter(each.tenant for each in queries_of(mix, seed)[0])
        assert all(sent[each.tenant.name] >= 200 for each in mix.parties if each.is_good)


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_queries_do_not_raise_a_rate(seed: int) -> None:
    """One tenant has a rate that takes a fifth of two lanes, and sends so many queries of 32 rows a second instead."""
    random = Random(seed)
    tenants = [
        Tenant("bulk", 400 * MS, cuts=tuple(range(33)), max_batch=32, rate=20.0),
        *[Tenant(name, 200 * MS, cuts=(0, 1, 2)) for name in "ab"],
    ]
    rows = (LatencyRow(0, 1, 1, 10 * MS), LatencyRow(0, 32, 1, 320 * MS))
    predictor = TablePredictor(
        {"bulk": LatencyTable(rows, (1.0,) * 32)}
        | {name: LatencyTable((LatencyRow(0, 1, 1, 20 * MS),), (1.0, 1.0)) for name in "ab"}
    )
    come = []
    for name, rate in (("bulk", 20.0), ("a", 24.0), ("b", 24.0)):  # 0.8 of what each of the others has: 0.6 lanes
        now = 0.0
        while (now := now + random.expovariate(rate)) < 8:
            come.append((round(now * 1e9), name))
    queries = [
        Query(
            at,
            name,
            now,
            now + next(each.slo_ns for each in tenants if each.name == name),
            items=32 if name == "bulk" else 1,
        )
        for at, (now, name) in enumerate(sorted(come))
    ]
    made = play(policy_class("shares")(TWO_LANES), tenants, predictor, queries)
    for name in "ab":
        own = [each.id for each in queries if each.tenant == name]
        assert sum(made.outcomes[each] is Outcome.ANSWERED for each in own) >= 0.95 * len(own)


def flood(random: Random, others: str, rank: int) -> list[Query]:
    """Queries of 10 ms: a flood of tenant "z", and half a share of each of the others."""
    rate = 100 / (len(others) + 1)
    come = []
    for name, times in [("z", 12.0), *[(name, 0.6) for name in others]]:
        now = 0.0
        while (now := now + random.expovariate(times * rate)) < 6:
            come.append((round(now * 1e9), name))
    return [
        Query(at, name, now, now + 150 * MS, rank if name == "z" else priority_rank(0))
        for at, (now, name) in enumerate(sorted(come))
    ]


@pytest.mark.parametrize("policy", ["shares", "fair"])
@pytest.mark.parametrize("priority", [0, 1])
def test_no_priority_goes_above_quotas(policy: str, priority: int) -> None:
    """Neither that of requests nor that of the tenant."""
    for seed in range(4):
        random = Random(f"{policy} {seed}")
        others = "abc"[: random.randint(1, 3)]
        queries = flood(random, others, priority_rank(1))
        tenants = [Tenant("z", 150 * MS, priority=priority), *[Tenant(name, 150 * MS) for name in others]]
        made = play(policy_class(policy)(ONE_LANE), tenants, tables(dict.fromkeys("zabc", 10 * MS)), queries)
        answered = Counter(each.tenant for each in queries if made.outcomes[each.id] is Outcome.ANSWERED)
        asked = Counter(each.tenant for each in queries)
        if policy == "shares":
            assert all(answered[name] >= 0.95 * asked[name] for name in others)
        else:  # of what each asks for, alike; beyond that the flood has the priority
            assert all(answered[name] / asked[name] >= 0.8 * answered["z"] / asked["z"] for name in others)


def test_out_of_quota_the_tenant_of_the_highest_priority_goes_first() -> None:
    """Three tenants ask for three times the lane: what one of them does not need of its quota is for the first."""
    random, come = Random(1), list[tuple[int, str]]()
    for name, rate in (("idle", 1.0), ("low", 150.0), ("high", 150.0)):
        now = 0.0
        while (now := now + random.expovariate(rate)) < 8:
            come.append((round(now * 1e9), name))
    queries = [Query(at, name, now, now + 150 * MS) for at, (now, name) in enumerate(sorted(come))]
    predictor = tables(dict.fromkeys(("idle", "low", "high"), 10 * MS))
    share = {}
    for priority in (0, 1):
        tenants = [Tenant("idle", 150 * MS), Tenant("low", 150 * MS), Tenant("high", 150 * MS, priority=priority)]
        made = play(policy_class("shares")(ONE_LANE), tenants, predictor, queries)
        answered = Counter(each.tenant for each in queries if made.outcomes[each.id] is Outcome.ANSWERED)
        assert answered["low"] >= 0.95 * 8 * 100 / 3, "its quota"
        share[priority] = answered["high"] / answered["low"]
    assert share[0] == pytest.approx(1.0, abs=0.2)
    assert share[1] > 1.5


@pytest.mark.parametrize("seed", range(4))
def test_under_fair_a_short_queue_does_not_hide_a_flood(seed: int) -> None:
    """Two equal tenants ask for 1.6 lanes of one: 0.8 each. The queue of one of them has room for four queries."""
    random, come = Random(seed), list[tuple[int, str]]()
    for name in "ab":
        now = 0.0
        while (now := now + random.expovariate(80.0)) < 10:
            come.append((round(now * 1e9), name))
    queries = [Query(at, name, now, now + 400 * MS) for at, (now, name) in enumerate(sorted(come))]
    lane = (Share((0,)),)
    tenants = [Tenant("a", 400 * MS, max_queue=4), Tenant("b", 400 * MS)]
    made = play(policy_class("fair")(lane), tenants, tables({"a": 10 * MS, "b": 10 * MS}), queries)
    part = {
        name: sum(made.outcomes[each.id] is Outcome.ANSWERED for each in queries if each.tenant == name)
        / sum(each.tenant == name for each in queries)
        for name in "ab"
    }
    assert part["a"] == pytest.approx(part["b"], abs=0.2), part


def test_tenants_are_as_they_are_configured() -> None:
    """A replaced priority is another rank."""
    assert replace(Tenant("a", 9), priority=3).rank == priority_rank(3)
