"""A device in slices: how queries of a mix of models are served by them, and which division our planner would use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, cast

from bench._bisect import largest_rate
from bench.papers.abacus._a100 import A100, BATCHES, FOUR, NS_PER_MS, PaperModel
from bench.papers.abacus._bound import prices_ms
from bench.papers.abacus._experiment import RATES, Contender, Result, Setting, is_held
from bench.papers.abacus._slices import Slice
from cotenant.core.predictor import Group, GroupPredictor, Member
from cotenant.techniques.partitions.plan.search.optimal import Optimal
from cotenant.techniques.partitions.plan.types import CoRunner, Costs, DeviceType, Infeasible, Load, Plan
from cotenant.work import Work

_MEAN_ROWS = statistics.mean(BATCHES)
_MEMORY = 40 * 10**9
"""Of the whole device; models take little of it and are not what limits any division."""


@dataclass(frozen=True, slots=True)
class Mixed(Setting):
    """Models with queries in these shares."""

    weights: tuple[float, ...] = ()

    def draw(self, random: Random) -> str:
        """See Setting."""
        return random.choices(self.models, self.weights)[0]


@dataclass(frozen=True, slots=True)
class Divided:
    """A device in slices that do not touch each other, each with its share of the queries."""

    parts: tuple[tuple[Mixed, float], ...]

    def run(self, contender: Contender, rate: float, count: int, seed: int) -> list[Result]:
        """How queries at `rate` a second end, slice by slice; see Setting."""
        return [
            setting.run(contender, rate * share, max(20, round(count * share)), seed + 1000 * at)
            for at, (setting, share) in enumerate(self.parts)
        ]

    def max_rate(self, contender: Contender, count: int, seeds: Sequence[int], step: float) -> float:
        """The largest rate at which 99 % are in time over all slices and seeds."""

        def is_met(rate: float) -> bool:
            return is_held([result for seed in seeds for result in self.run(contender, rate, count, seed)])

        return largest_rate(is_met, *RATES, step)

    def capacity(self) -> float:
        """The rate at which the first slice is full, whatever the policy; models of a slice come evenly, whole queries.

        Infinite where they do not: the bound is of even shares.
        """
        if any(len(set(setting.weights)) > 1 for setting, _ in self.parts):
            return math.inf
        return min(prices_ms(setting.world, setting.models)[1] / share for setting, share in self.parts)


class World(NamedTuple):
    """The three slices, and the predictors fitted to samples of each.

    `alone_at` and `few_at` say where between the bounds 1g.5gb and groups of less than four on 4g.20gb are.
    """

    alone_at: float
    few_at: float
    slices: Mapping[int, Slice]
    believed: Mapping[int, GroupPredictor]


class Believed(NamedTuple):
    """The predicted latencies of a slice as a world to try a plan in."""

    of: Slice
    predictor: GroupPredictor

    @property
    def models(self) -> tuple[PaperModel, ...]:
        """See Slice."""
        return self.of.models

    def operators(self, model: str) -> int:
        """See Slice."""
        return self.of.operators(model)

    def most(self, models: Sequence[str]) -> int:
        """See Slice."""
        return self.of.most(models)

    def latency_ns(self, group: Group) -> float:
        """What a group is believed to take."""
        return float(self.predictor.group_ns([group])[0])


class SliceCosts(Costs):
    """What the planner believes: the fitted predictors of slices of 1, 2 and 4, at the quantile that they promise.

    A partition is a slice. Members of a group share it as MPS does: what they have of it is not looked at. BERT is as
    for its longest input, as its queries are planned for without knowing them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._shapes = {model.name: range(max(1, len(model.lengths))) for model in world.slices[1].models}

    def latency_ns(self, work: Work, size: int, device: str) -> int:
        """See Costs."""
        return self._slowest([(work.tenant, work.items, size)], size)

    def batches(self, model: str) -> Sequence[int]:
        """See Costs: those that were measured; the device pads others to them."""
        return BATCHES

    def memory_bytes(self, model: str) -> int:
        """See Costs."""
        return 1

    def factor(self, model: str, batch: int, size: int, others: Sequence[CoRunner], device: str) -> float:
        """See Costs: slices do not touch each other."""
        return 1.0

    def adds(self, model: str, batch: int, size: int, other: CoRunner, device: str) -> float:
        """See Costs."""
        return 0.0

    def divisions(self, size: int, members: int, device: str) -> Sequence[tuple[int, ...]]:
        """See Costs."""
        return ((1,) * members,) if 1 < members <= size else ()

    def group_ns(self, members: Sequence[CoRunner], size: int, device: str) -> int | None:
        """See Costs: never less than a member takes alone."""
        return max(self._slowest(members, size), *(self._slowest([each], size) for each in members))

    def _slowest(self, members: Sequence[CoRunner], size: int) -> int:
        groups: list[tuple[Member, ...]] = [()]
        for model, batch, _ in sorted(members):
            units = self._world.slices[size].operators(model)
            works = [Work(model, shape, batch, 0, units) for shape in self._shapes[model]]
            groups = [(*group, Member(work, 1)) for group in groups for work in works]
        return max(self._world.believed[size].group_ns(groups))


def part_of(world: World, size: int, rates: Mapping[str, float], targets: Mapping[int, float]) -> tuple[Mixed, float]:
    """A slice with these models, and the sum of their rates."""
    setting = Mixed(
        world.slices[size], world.believed[size], tuple(rates), targets[size], weights=tuple(rates.values())
    )
    return setting, sum(rates.values())


def planned(
    world: World, size: int, weights: Sequence[float], target_ms: float, step: float
) -> tuple[float, Plan | None]:
    """The largest rate, in queries a second, for which our planner finds a plan of slices of one size, and that plan.

    A query counts as the mean number of rows.
    """
    kind = DeviceType(f"a100-{size}g", ((size,),), _MEMORY * size // 8)
    costs, devices = SliceCosts(world), [kind] * (4 // size)
    planner = Optimal(most_slots=4, time_limit_s=0.2, saving_s=0.0)
    best: dict[float, Plan] = {}

    def is_met(rate: float) -> bool:
        loads = [
            Load(name, name, rate * weight * _MEAN_ROWS, round(target_ms * NS_PER_MS))
            for name, weight in zip(FOUR, weights, strict=True)
        ]
        found = planner.plan(loads, devices, costs)
        if isinstance(found, Infeasible):
            return False
        best[rate] = found
        return True

    rate = largest_rate(is_met, *RATES, step)
    return (rate, best[rate]) if rate in best else (0.0, None)


def as_planned(world: World, size: int, plan: Plan, targets: Mapping[int, float], is_believed: bool = False) -> Divided:
    """The slices of a plan, each with the tenants and the shares of queries that the plan gives it."""
    total = sum(plan.rates_per_s.values())
    parts = []
    for device in plan.devices:
        rates = device.rates_per_s
        setting, share = part_of(world, size, {name: rates[name] / total for name in FOUR if name in rates}, targets)
        if is_believed:
            setting = replace(setting, world=cast(A100, Believed(world.slices[size], world.believed[size])))
        parts.append((setting, share))
    return Divided(tuple(parts))
