"""Weights under overload: who stands back."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from cotenant.policies import policy_class
from cotenant.policies.shedding.deferral import WeightedJob, deferred
from cotenant.predict.table import TablePredictor
from cotenant.profiles.latency_table import LatencyRow, LatencyTable
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import Machine, Share
from cotenant.world.simulated import TableWorld
from strict_engine import StrictEngine as Engine

MS = 1_000_000


def job(number: int, work_ms: int, deadline_ms: int, weight: float) -> WeightedJob:
    return WeightedJob((deadline_ms, number), work_ms * MS, deadline_ms * MS, weight, (number,))


def is_feasible(jobs: list[WeightedJob]) -> bool:
    end = 0
    for each in sorted(jobs):
        end += each.work_ns
        if end > each.deadline_ns:
            return False
    return True


def best_weight(jobs: list[WeightedJob]) -> float:
    """Brute force: the largest weight of any set of jobs that can all be in time on one lane."""
    sets = (chosen for size in range(len(jobs) + 1) for chosen in combinations(jobs, size))
    return max(sum(each.weight for each in chosen) for chosen in sets if is_feasible(list(chosen)))


def kept(jobs: list[WeightedJob]) -> list[WeightedJob]:
    out = deferred(jobs, 1, 0, 0)
    return [each for each in jobs if each.queries[0] not in out]


def random_jobs(random: Random, works_ms: tuple[int, ...]) -> list[WeightedJob]:
    works = [random.choice(works_ms) for _ in range(9)]
    return [
        job(number, work, random.randint(work, 60), random.choice((1.0, 2.0, 5.0))) for number, work in enumerate(works)
    ]


def test_nobody_stands_back_when_all_can_be_in_time() -> None:
    assert deferred([job(0, 10, 10, 1.0), job(1, 10, 20, 9.0), job(2, 10, 30, 1.0)], 1, 0, 0) == frozenset()


def test_the_lightest_stands_back() -> None:
    jobs = [job(0, 10, 10, 1.0), job(1, 10, 15, 9.0), job(2, 10, 30, 5.0)]
    assert deferred(jobs, 1, 0, 0) == {0}


def test_time_that_is_taken_already_counts() -> None:
    jobs = [job(0, 10, 20, 1.0), job(1, 10, 20, 2.0)]
    assert deferred(jobs, 1, 0, 0) == frozenset()
    assert deferred(jobs, 1, 0, 5 * MS) == {0}
    assert deferred(jobs, 2, 0, 10 * MS) == frozenset()


@pytest.mark.parametrize("seed", range(30))
def test_equal_work_gives_the_heaviest_set_there_is(seed: int) -> None:
    jobs = random_jobs(Random(seed), (10,))
    chosen = kept(jobs)
    assert is_feasible(chosen)
    assert sum(each.weight for each in chosen) == best_weight(jobs)


def test_unequal_work_comes_close_to_the_heaviest_set() -> None:
    reached = possible = 0.0
    for seed in range(60):
        jobs = random_jobs(Random(seed), (5, 10, 25))
        chosen = kept(jobs)
        assert is_feasible(chosen)
        reached += sum(each.weight for each in chosen)
        possible += best_weight(jobs)
    assert reached / possible > 0.9


def answered(policy: str, weights: tuple[float, float], preempt: bool) -> list[float]:
    """Attainment of two equal tenants at 1.6 times what one lane can do."""
    tenants = [Tenant(f"t{at}", 100 * MS, (0, 1, 2), weight=weight) for at, weight in enumerate(weights)]
    predictor = TablePredictor({each.name: LatencyTable((LatencyRow(0, 1, 1, 10 * MS),), (1, 1)) for each in tenants})
    made = policy_class(policy)((Share((0,)),), preempt=preempt)
    random, now, queries = Random(3), 0, []
    for number in range(4000):
        now += round(random.expovariate(160) * 1e9)
        tenant = tenants[random.randrange(2)]
        queries.append(Query(number, tenant.name, now, now + tenant.slo_ns))
    ends: list[list[Outcome]] = [[], []]
    owners = [int(query.tenant[1]) for query in queries]
    simulate(
        Engine(tenants, made, predictor, Machine.cpu((0,))),
        TableWorld(predictor),
        queries,
        lambda respond, _: ends[owners[respond.query]].append(respond.outcome),
    )
    return [outcomes.count(Outcome.ANSWERED) / len(outcomes) for outcomes in ends]


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "edf", "sjf"])
def test_weights_say_who_is_served_under_overload(policy: str, preempt: bool) -> None:
    equal = answered(policy, (1.0, 1.0), preempt)
    heavy, light = answered(policy, (4.0, 1.0), preempt)
    assert abs(equal[0] - equal[1]) < 0.05
    assert heavy > 0.97
    assert light < 0.4
    assert heavy + light > 0.95 * sum(equal), "weights move service from one tenant to another; they do not waste it"
