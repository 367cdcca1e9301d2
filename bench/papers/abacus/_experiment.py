"""One simulated run on the A100 of the released network: a load, a policy, and how its queries ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from bench._bisect import largest_rate
from bench.papers.abacus._a100 import A100, BATCHES
from bench.papers.abacus._group_world import GroupWorld
from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.predictor import GroupPredictor
from cotenant.core.snapshot import DropRule, Policy
from cotenant.metrics import percentile_ns
from cotenant.policies import policy_class
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.sim.driver import simulate
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.types import ANSWERS, Outcome, Query, Tenant
from cotenant.work import Machine, Share

NS_PER_MS = 1_000_000
RATES = 1.0, 1000.0
"""Queries a second between which largest rates are sought."""
NOISE = 0.045
"""Run-to-run deviation of a group's latency over its average: section 1 of the paper."""
DECISION_NS = 150_000
"""What a decision is charged in simulation: the goal for its 99th percentile; the paper reports 260 us."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its drop rule, and whether it merges queries of a tenant up to the largest batch of the device."""

    policy: str
    drop: DropRule
    merges: bool

    def make(self, slots: int) -> Policy:
        """Groups may have `slots` members; other policies run one launch at a time on the whole device."""
        lanes = tuple(Share((slot,), "a100") for slot in range(slots))
        if self.policy == Overlap.name:
            return Overlap(lanes, self.drop, repeat=False)  # the network was made for distinct models
        cls = policy_class(self.policy)
        assert issubclass(cls, ListPolicy)
        return cls((Share(tuple(range(slots)), "a100"),), self.drop, tail_aware=False)  # as published


@dataclass(frozen=True, slots=True)
class Result:
    """How the queries of a run ended. `p99_ms` is of those that were answered, in time or late."""

    offered: int
    answered: int
    p99_ms: float
    seconds: float

    @property
    def attainment(self) -> float:
        """Answered within their targets, as a share of all offered."""
        return self.answered / self.offered


@dataclass(frozen=True, slots=True)
class Setting:
    """Models that share the device, their target, and the world and the belief in it."""

    world: A100
    predictor: GroupPredictor
    models: tuple[str, ...]
    target_ms: float
    noise: float = NOISE

    def queries(self, rate: float, count: int, seed: int) -> Iterator[Query]:
        """Poisson arrivals; model, batch and sequence length of each query are drawn evenly, as in section 7.1."""
        random = Random(seed)
        known = {model.name: model for model in self.world.models}
        now = 0
        for number in range(count):
            now += int(random.expovariate(rate) * 1e9)
            model = known[self.draw(random)]
            shape = random.randrange(len(model.lengths)) if model.lengths else 0
            deadline = now + int(self.target_ms * NS_PER_MS)
            yield Query(number, model.name, now, deadline, items=random.choice(BATCHES), shape=shape, merge_key=shape)

    def draw(self, random: Random) -> str:
        """The model of the next query."""
        return random.choice(self.models)

    def run(self, contender: Contender, rate: float, count: int, seed: int) -> Result:
        """Simulate `count` queries at `rate` a second; the seed is that of arrivals and of the noise."""
        slots = self.world.most(self.models)
        policy = contender.make(slots)
        cuts = policy.spec.grouped
        tenants = [self._tenant(name, contender.merges, cuts) for name in self.models]
        engine = Engine(tenants, policy, self.predictor, Machine.of({"a100": range(slots)}))
        world = GroupWorld(self.world.latency_ns, noise=self.noise, seed=seed)
        sent: dict[int, int] = {}
        latencies: list[int] = []
        offered = answered = 0

        def source() -> Iterator[Query]:
            nonlocal offered
            for query in self.queries(rate, count, seed):
                offered += 1
                sent[query.id] = query.arrival_ns
                yield query

        def responded(respond: Respond, now_ns: int) -> None:
            nonlocal answered
            if respond.outcome in ANSWERS:
                latencies.append(now_ns - sent[respond.query])
                answered += respond.outcome is Outcome.ANSWERED

        end = simulate(engine, world, source(), responded, decision_ns=DECISION_NS)
        p99 = percentile_ns(latencies, 99)
        return Result(offered, answered, math.nan if p99 is None else p99 / NS_PER_MS, end / 1e9)

    def max_rate(self, contender: Contender, count: int, seeds: Sequence[int], step: float = 1.01) -> float:
        """The largest rate, to a factor of `step`, at which 99 % are answered in time over all seeds."""
        return largest_rate(
            lambda rate: is_held([self.run(contender, rate, count, seed) for seed in seeds]), *RATES, step
        )

    def _tenant(self, name: str, merges: bool, cuts: bool) -> Tenant:
        operators = self.world.operators(name)
        inner = tuple(range(operators + 1)) if cuts else (0, operators)
        return Tenant(
            name,
            int(self.target_ms * NS_PER_MS),
            inner,
            max_batch=BATCHES[-1] if merges else 1,
            max_queue=1 << 30,
        )


def is_held(runs: Sequence[Result]) -> bool:
    """Whether 99 % are answered in time over all runs."""
    return sum(run.answered for run in runs) >= 0.99 * sum(run.offered for run in runs)
