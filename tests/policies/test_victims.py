"""Victims from heaps against a search one by one; queues kept up to date against queues made anew; the reserve against
its sum. All on random input."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from random import Random

import numpy as np
import pytest

from cotenant.core.queues import TenantQueue
from cotenant.policies import policy_class
from cotenant.policies.shedding.jobs import (
    DEADLINE,
    DEFERRED,
    FEW,
    OWNER,
    RANK,
    WORK,
    FewJobs,
    Job,
    SelectionValues,
    Value,
)
from cotenant.policies.shedding.many_jobs import LongQueue, ManyJobs, ahead_ns
from cotenant.policies.shedding.reserve import ExpectedDemand, Reserve
from cotenant.predict.margin import SafetyMargin, Spread
from cotenant.types import Query, Tenant
from scenario import MS, TWO_LANES, tables

ALL = 10**9
RANKS = (3, 3, 1, 65536, 3, 65536, 1, 2, 2)
"""Those of tenants."""
SELECTING = ("most", "weighted", "fair", "shares")


def first_late(jobs: Sequence[Job], free_at: Sequence[int]) -> int | None:
    """Up to FEW are laid on the lanes one by one, more as if all lanes were one."""
    if len(jobs) <= FEW:
        times = sorted(free_at)
        for at, job in enumerate(jobs):
            end = times[0] + job[WORK]
            if end > job[DEADLINE]:
                return at
            heapreplace(times, end)
        return None
    begin = sum(free_at)
    for at, job in enumerate(jobs):
        if begin > (job[DEADLINE] - job[WORK]) * len(free_at):
            return at
        begin += job[WORK]
    return None


def one_by_one(
    jobs: Sequence[Job], free_at: Sequence[int], values: SelectionValues
) -> tuple[list[tuple[Job, Job]], list[Job]]:
    """The rule as it is said: look for the first that is late, and take out the job up to it of the least value now."""
    left, victims = list(jobs), list[tuple[Job, Job]]()
    while (late := first_late(left, free_at)) is not None:
        for_job = left[late]
        among = [job for job in left[: late + 1] if job[RANK] == for_job[RANK]]
        gone = min(among, key=values.of)  # the first of equal ones
        values.lost(gone[OWNER])
        victims.append((gone, for_job))
        left.remove(gone)
    return victims, left


def drawn(random: Random, count: int) -> tuple[list[Job], list[int], list[float], list[float]]:
    """Jobs in the policy's order, when lanes are free, attainments and weights. Small numbers make many equal."""
    owners, lanes = random.randint(1, 9), random.randint(1, 4)
    works = [random.choice([3, 10, random.randint(1, 40)]) for _ in range(owners)]
    load = random.choice([0.1, 0.3, 0.6, 0.9])
    made: list[Job] = []
    for number in range(count):
        owner = random.randrange(owners)
        work = works[owner] * random.choice([1, 1, 2])
        deadline = work + random.randint(0, round(20 * count * load / lanes) + 1)
        rank = random.choice([1, 1, 2, 1 + DEFERRED]) if count % 2 else 1
        within = random.random() < 0.4
        made.append((rank, deadline, number, deadline, int(within), random.choice([1, 1, 3]), owner, work))
    fared = [random.choice([1.0, 0.5, random.uniform(0.05, 1)]) for _ in range(owners)]
    weights = [random.choice([1.0, 2.0, random.uniform(0.1, 9)]) for _ in range(owners)]
    return sorted(made), [random.randint(0, 30) for _ in range(lanes)], fared, weights


def selected(
    way: FewJobs | ManyJobs, value: Value, fared: list[float], weights: list[float], most: int = ALL
) -> object:
    return way.select(SelectionValues(value, [*fared], weights, RANKS), most)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("counts", [(1, 12), (13, FEW), (FEW + 1, 400)], ids=["few", "some", "many"])
def test_heaps_give_the_victims_that_a_search_one_by_one_gives(name: str, counts: tuple[int, int]) -> None:
    value, seen, most_seen = policy_class(name)(TWO_LANES).value, 0, 0
    for seed in range(40):
        random = Random(f"{name} {counts} {seed}")
        jobs, free_at, fared, weights = drawn(random, random.randint(*counts))
        wanted, left = one_by_one(jobs, free_at, SelectionValues(value, [*fared], weights, RANKS))
        seen, most_seen = seen + len(wanted), max(most_seen, len(wanted))
        many = ManyJobs(np.ascontiguousarray(np.array(jobs, np.int64).T), free_at, 0)
        assert selected(many, value, fared, weights) == wanted
        assert [tuple(row) for row in many.rows.T.tolist()] == left
        if len(jobs) <= FEW:
            few = FewJobs(jobs, free_at, 0)
            assert selected(few, value, fared, weights) == wanted
            assert few.jobs == left
        most = random.randint(1, len(wanted) + 1)
        again = ManyJobs(np.ascontiguousarray(np.array(jobs, np.int64).T), free_at, 0)
        assert selected(again, value, fared, weights, most) == wanted[:most], "a bound takes the first ones"
    assert seen > 40
    assert most_seen > counts[1] / 4, "so that heaps are needed"


def test_of_a_tenant_that_loses_others_are_spared() -> None:
    """Two equal tenants, all within their shares, of which half have to go: each loses as many, one or two apart."""
    jobs = sorted((1, 4000, number, 4000, 1, 1, number % 2, 10) for number in range(800))
    value = policy_class("shares")(TWO_LANES).value
    many = ManyJobs(np.ascontiguousarray(np.array(jobs, np.int64).T), [0], 0)
    gone = [victim[OWNER] for victim, _ in many.select(SelectionValues(value, [1.0, 1.0], [1.0, 1.0], RANKS), ALL)]
    assert len(gone) == 400
    assert abs(gone.count(0) - gone.count(1)) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_a_queue_that_is_kept_up_to_date_is_as_one_made_anew(seed: int) -> None:
    random, number = Random(seed), 0
    tenant = Tenant("a", 300 * MS, max_batch=4, max_queue=10**6)
    queue, virtual_deadlines = TenantQueue(tenant), dict[int, int]()
    exact = tables({"a": 7 * MS}, batch_slope=0.5)
    beliefs = [exact, exact.with_margin(SafetyMargin({"a": Spread(1.5, 5 * MS)}))]
    known: LongQueue | None = None
    for step in range(40):
        most = 400 if step == 0 else random.choice([0, 1, 1, 2, 30, 90])
        for _ in range(most):
            deadline = 300 * MS + random.randint(0, 99) * MS
            rank = random.choice([1, 2]) if seed % 2 else 1
            queue.push((rank, deadline, number), Query(number, "a", 0, deadline, rank, items=random.randint(1, 3)))
            if random.random() < 0.4:
                virtual_deadlines[number] = random.randint(0, deadline)
            number += 1
        where = random.choice(["front", "anywhere"])
        for _ in range(min(len(queue.keys) - 1, random.choice([0, 1, 3, 60, 250]))):
            at = 0 if where == "front" else random.randrange(len(queue.keys))
            queue.remove(queue.keys[at], queue.queries[at])
        predictor, owner = random.choice(beliefs), random.randrange(2)
        known, fresh = LongQueue(queue, virtual_deadlines, known), LongQueue(queue, virtual_deadlines)
        for each in (known, fresh):
            each.tell(queue, owner, predictor, lambda work, believed=predictor: believed.latency_ns(work, 1))
        assert np.array_equal(known.rows, fresh.rows), step
        assert known.rank == fresh.rank
        rows = known.rows.T.tolist()
        assert [tuple(row[:3]) for row in rows] == queue.keys
        assert [row[WORK] for row in rows] == [
            predictor.latency_ns(tenant.work(0, query.items), 1) for query in queue.queries
        ]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 31, 100])
def test_the_reserve_is_its_sum_and_the_same_for_one_and_for_many(count: int) -> None:
    random = Random(count)
    for _ in range(10):
        tenants = []
        for _ in range(count):
            within = random.choice([0.0, random.random()])
            more = random.choice([0.0, random.random()])
            slo, work = random.choice([40, random.randint(1, 10**9)]), random.choice([7, random.randint(1, 10**8)])
            tenants.append(ExpectedDemand(slo, work, within, within + more))
        asked = [
            (random.choice([40, 41, random.randint(-5, 10**9)]), random.choice([7, 8, random.randint(1, 10**8)]))
            for _ in range(40)
        ]
        reserve = Reserve.of(tenants, 0)
        found = [reserve.ahead_ns(left, work) for left, work in asked]
        lefts, works = np.array(asked, np.int64).T
        assert ahead_ns(reserve, lefts, works).tolist() == found
        for (left, work), ahead in zip(asked, found, strict=True):
            first = [each for each in tenants if each.slo_ns < left]
            lanes = [(each.demand if each.work_ns < work else each.in_quota, each.slo_ns) for each in first]
            assert ahead == pytest.approx(sum(each * (left - slo) for each, slo in lanes), abs=0.1)
