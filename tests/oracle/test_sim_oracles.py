"""The simulator against results that others proved: queueing theory, and optimal schedules found by brute force.

Queues run with fixed seeds. How far a mean may be off is taken from the run itself, by batch means: 30 stretches of
1,000 waits are nearly independent, so that their spread gives the standard error. Four of those are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise, permutations
from random import Random

import numpy as np
import pytest

from cotenant.core.actions import Launch
from cotenant.core.snapshot import DropRule
from cotenant.policies import policy_class
from cotenant.policies.ordered.edf import Edf
from cotenant.policies.ordered.fcfs import Fcfs
from cotenant.policies.ordered.sjf import Sjf
from cotenant.predict.table import TablePredictor
from cotenant.sim.driver import simulate
from cotenant.types import Outcome, Query, Tenant
from cotenant.work import CPU, Machine, Share, Work
from cotenant.world.simulated import TableWorld, WorldEvent
from scenario import CORES, MS, ONE_LANE, TWO_LANES, play, tables
from strict_engine import StrictEngine as Engine

SERVICE_NS = 10 * MS
COUNT = 30_000
STRETCHES = 30
NEVER_NS = 10**15


class ExponentialWorld:
    """Launches take exponential times of one mean, whatever the tables say."""

    def __init__(self, mean_ns: int, seed: int) -> None:
        self._times = iter(np.random.default_rng(seed).exponential(mean_ns, 2 * COUNT).astype(np.int64).tolist())
        self._ends: list[tuple[int, int]] = []

    def start(self, launch: Launch, now_ns: int) -> None:
        heappush(self._ends, (now_ns + next(self._times), launch.id))

    def expand(self, launch: int, share: Share, now_ns: int) -> None:
        """See World: here launches keep the share that they began with."""

    def next_ns(self) -> int | None:
        return self._ends[0][0] if self._ends else None

    def pop(self) -> WorldEvent:
        return WorldEvent(heappop(self._ends)[1])


def poisson(load: float, seed: int, servers: int = 1) -> list[Query]:
    gaps = np.random.default_rng(seed).exponential(SERVICE_NS / load / servers, COUNT)
    times = np.cumsum(gaps).astype(np.int64).tolist()
    return [Query(number, "a", at, at + NEVER_NS) for number, at in enumerate(times)]


def mean_wait(
    queries: list[Query], world: ExponentialWorld | TableWorld, lanes: tuple[Share, ...]
) -> tuple[float, float]:
    """Mean time from arrival to launch in mean service times, and its standard error by batch means."""
    tenant = Tenant("a", NEVER_NS, max_queue=COUNT)
    engine = Engine([tenant], Fcfs(lanes, DropRule.NONE), tables({"a": SERVICE_NS}), Machine.cpu(CORES))
    begun = np.zeros(COUNT)

    class Timed:
        def start(self, launch: Launch, now_ns: int) -> None:
            begun[launch.queries[0]] = now_ns
            world.start(launch, now_ns)

        next_ns = staticmethod(world.next_ns)
        pop = staticmethod(world.pop)

    simulate(engine, Timed(), queries, lambda respond, now_ns: None)
    arrivals = np.array([query.arrival_ns for query in queries])
    waits = (begun - arrivals) / SERVICE_NS
    means = waits.reshape(STRETCHES, -1).mean(axis=1)
    return float(waits.mean()), float(means.std(ddof=1)) / math.sqrt(STRETCHES)


def check(measured: tuple[float, float], theory: float) -> None:
    mean, error = measured
    assert error < 0.07 * theory, "too few queries to tell anything"
    assert abs(mean - theory) < 4 * error


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_deterministic_service_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    made = mean_wait(poisson(load, seed=1), TableWorld(tables({"a": SERVICE_NS})), ONE_LANE)
    check(made, load / (2 * (1 - load)))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_exponential_service_waits_twice_as_long(load: float) -> None:
    made = mean_wait(poisson(load, seed=2), ExponentialWorld(SERVICE_NS, seed=3), ONE_LANE)
    check(made, load / (1 - load))


@pytest.mark.parametrize("load", [0.4, 0.75])
def test_two_lanes_wait_as_erlang_says(load: float) -> None:
    made = mean_wait(poisson(load, seed=4, servers=2), ExponentialWorld(SERVICE_NS, seed=5), TWO_LANES)
    offered = 2 * load
    must_wait = (offered**2 / 2 / (1 - load)) / (1 + offered + offered**2 / 2 / (1 - load))
    check(made, must_wait / (2 * (1 - load)))


def test_a_lane_is_never_idle_while_something_waits() -> None:
    """Work conservation: with one lane, all policies keep the device busy for exactly the same time."""
    rng = Random(6)
    latencies = {f"t{number}": rng.randint(1, 20) * MS for number in range(4)}
    tenants = [Tenant(name, rng.randint(20, 200) * MS, max_queue=999) for name in latencies]
    queries, now = [], 0
    for number in range(400):
        now += rng.randint(0, 20 * MS)
        tenant = rng.choice(tenants)
        queries.append(Query(number, tenant.name, now, now + tenant.slo_ns))
    ends = []
    for name in ("fcfs", "sjf", "edf"):
        made = play(policy_class(name)(ONE_LANE, DropRule.NONE), tenants, tables(latencies), queries)
        busy = [(at, at + launch.predicted_ns) for at, launch in made.launches]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(busy))
        ends.append(max(made.ended_ns.values()))
    assert len(set(ends)) == 1


# --- optimal schedules ------------------------------------------------------------------------------------------


def is_feasible(jobs: list[tuple[int, int, int]]) -> bool:
    """Whether unit-wise preemptive jobs (arrival, units, deadline) can all be in time, by search over all schedules."""
    seen = set()

    def search(now: int, left: tuple[int, ...]) -> bool:
        if not any(left):
            return True
        if (now, left) in seen or any(
            units and now + units > deadline for units, (_, _, deadline) in zip(left, jobs, strict=True)
        ):
            return False
        seen.add((now, left))
        ready = [at for at, units in enumerate(left) if units and jobs[at][0] <= now]
        if not ready:
            return search(now + 1, left)
        return any(search(now + 1, (*left[:at], left[at] - 1, *left[at + 1 :])) for at in ready)

    return search(0, tuple(units for _, units, _ in jobs))


def instances() -> Iterator[list[tuple[int, int, int]]]:
    """Sets of four jobs with distinct arrivals, in their order."""
    rng = Random(7)
    for _ in range(400):
        jobs = []
        for arrival in sorted(rng.sample(range(8), 4)):
            units = rng.randint(1, 4)
            jobs.append((arrival, units, arrival + units + rng.randint(0, 7)))
        yield jobs


def test_edf_meets_all_deadlines_whenever_any_schedule_does() -> None:
    feasible = 0
    for jobs in instances():
        if not is_feasible(jobs):
            continue
        feasible += 1
        tenants, queries = [], []
        for number, (arrival, units, deadline) in enumerate(jobs):
            tenants.append(Tenant(f"t{number}", (deadline - arrival) * MS, cuts=tuple(range(units + 1))))
            # A little before the instant, and each earlier than the one before it: the end of a unit at that instant
            # is a choice among all that has arrived by then.
            queries.append(Query(number, f"t{number}", arrival * MS + 10 - number, deadline * MS + 10))
        made = play(Edf(ONE_LANE, DropRule.NONE, slack_share=0.0), tenants, ExactUnits(), queries)
        assert set(made.outcomes.values()) == {Outcome.ANSWERED}, jobs
    assert 40 < feasible < 360, "the instances must be neither all easy nor all impossible"


class ExactUnits(TablePredictor):
    """Every unit takes one millisecond: no rounding between segments."""

    def __init__(self) -> None:
        super().__init__({})

    def latency_ns(self, work: Work, size: int, device: str = CPU) -> int:
        return (work.end - work.start) * MS


def test_sjf_waits_least_of_all_orders() -> None:
    rng = Random(8)
    for _ in range(20):
        latencies = {f"t{number}": rng.randint(1, 30) * MS for number in range(6)}
        tenants = [Tenant("block", 10**12), *[Tenant(name, 10**12) for name in latencies]]
        queries = [Query(0, "block", 0, 10**12)]
        queries += [Query(number, name, 1, 10**12) for number, name in enumerate(latencies, start=1)]
        made = play(Sjf(ONE_LANE, DropRule.NONE), tenants, tables({"block": MS, **latencies}), queries)
        total = sum(made.ended_ns[number] - MS for number in range(1, 7))
        best = min(sum(sum(order[: at + 1]) for at in range(6)) for order in permutations(latencies.values()))
        assert total == best


def test_weighted_sjf_has_the_least_weighted_completion_of_all_orders() -> None:
    """Smith's rule."""
    rng = Random(9)
    for _ in range(20):
        jobs = {f"t{number}": (rng.randint(1, 30) * MS, rng.choice([0.5, 1.0, 2.0, 5.0])) for number in range(5)}
        tenants = [
            Tenant("block", 10**12),
            *[Tenant(name, 10**12, weight=weight) for name, (_, weight) in jobs.items()],
        ]
        queries = [Query(0, "block", 0, 10**12)]
        queries += [Query(number, name, 1, 10**12) for number, name in enumerate(jobs, start=1)]
        predictor = tables({"block": MS, **{name: latency for name, (latency, _) in jobs.items()}})
        made = play(Sjf(ONE_LANE, DropRule.NONE), tenants, predictor, queries)
        total = sum(weight * (made.ended_ns[at] - MS) for at, (_, weight) in enumerate(jobs.values(), start=1))
        best = math.inf
        for order in permutations(jobs.values()):
            done, cost = 0, 0.0
            for latency, weight in order:
                done += latency
                cost += weight * done
            best = min(best, cost)
        assert total == pytest.approx(best, rel=1e-9)
