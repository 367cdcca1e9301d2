"""The most queries a second that a policy serves in a world, and the target at which it serves the most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import numpy as np

from bench.papers.veltair import _bound, _loop
from bench.papers.veltair._jit import loaded
from bench.papers.veltair._models import Model, rates_of
from bench.papers.veltair._play import Arrivals, Played, Stage, arrivals
from bench.papers.veltair._worlds import CORES
from cotenant.core.snapshot import DropRule
from cotenant.techniques.layer_blocks.policy.block_policy import BlockPolicy

WITHIN = 0.95
"""The part of the queries of *every* model that has to be in time."""
TARGETS = (0.6, 0.8, 0.4, 0.7, 0.5, 0.9, 0.3, 1.0, 0.2)
"""Targets that are tried, in this order."""
PAPER_TARGETS = (0.85, 0.9, 0.95, 1.0)
_TUNED_FROM = 1_000_000
"""Seeds of arrivals that policies are tuned on; reported ones are below."""
_FIRST_STEP = 1.1
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Effort:
    """How many arrivals are played: `seeds` times `queries` for reported figures, and for tuning."""

    queries: int = 4000
    seeds: int = 5
    tune_queries: int = 4000
    tune_seeds: int = 1
    targets: tuple[float, ...] = TARGETS
    grain: float = 0.015

    def reported(self, models: Sequence[Model]) -> list[Arrivals]:
        """What policies are judged on."""
        return [arrivals(seed, self.queries, rates_of(models)) for seed in range(self.seeds)]

    def tuned(self, models: Sequence[Model]) -> list[Arrivals]:
        """What targets are chosen on."""
        return [arrivals(_TUNED_FROM + seed, self.tune_queries, rates_of(models)) for seed in range(self.tune_seeds)]


@dataclass(frozen=True, slots=True)
class Capacity:
    """A rate that is borne at a target, and the results at it; no rate where none is."""

    qps: float
    target: float
    played: tuple[Played, ...] = ()


def borne(stage: Stage, policy: BlockPolicy, given: Sequence[Arrivals], rate: float) -> tuple[Played, ...] | None:
    """The results of arrivals at a rate if every model has WITHIN of its queries in time, taken together; else None."""
    ready = stage.cast(policy)
    counts = np.sum([each.counts for each in given], axis=0)
    allowed = np.floor(counts * (1 - WITHIN)).astype(np.int64)
    made = []
    for each in given:
        played = stage.play(ready, policy.drop, each.at(rate), allowed)
        if played.end_ns < 0:
            return None
        missed = np.bincount(each.who[played.outcomes != _loop.ANSWERED], minlength=len(allowed))
        allowed = allowed - missed
        if (allowed < 0).any():
            return None
        made.append(played)
    return tuple(made)


def most(check: Callable[[float], object], guess: float, grain: float) -> float:
    """The highest rate that passes a check, to within a grain, from a guess on; 0 where none near it does."""
    low = high = guess
    step = _FIRST_STEP
    if check(guess):
        while check(high := low * step):
            low, step = high, step**1.5
    else:
        while not check(low := high / step):
            high, step = low, step**1.5
            if high < guess * _LEAST:
                return 0.0
    while high > low * (1 + grain):
        middle = (low * high) ** 0.5
        if check(middle):
            low = middle
        else:
            high = middle
    return low


def tuned(stage: Stage, policy: BlockPolicy, given: Sequence[Arrivals], guess: float, effort: Effort) -> Capacity:
    """The target, of some, at which a policy bears most of what it is tuned on."""
    best = Capacity(0.0, policy.target)
    for target in effort.targets:
        tried = replace(policy, target=target)

        def check(rate: float, tried: BlockPolicy = tried) -> bool:
            return borne(stage, tried, given, rate) is not None

        if best.qps == 0:
            best = Capacity(most(check, guess, 2 * effort.grain), target)
        elif check(best.qps * (1 + 2 * effort.grain)):
            best = Capacity(most(check, best.qps * (1 + 2 * effort.grain), 2 * effort.grain), target)
    return best


def reported(stage: Stage, policy: BlockPolicy, given: Sequence[Arrivals], guess: float, grain: float) -> Capacity:
    """What a policy bears as it is."""
    last: dict[float, tuple[Played, ...]] = {}

    def check(rate: float) -> bool:
        played = borne(stage, policy, given, rate)
        if played is not None:
            last.clear()
            last[rate] = played
        return played is not None

    rate = most(check, guess, grain)
    return Capacity(rate, policy.target, last[rate] if rate in last else borne(stage, policy, given, rate) or ())


def clairvoyant(stage: Stage, given: Sequence[Arrivals], within: float, grain: float) -> float:
    """The rate at which the relaxation of `_bound` has this part of every model's queries in time."""
    bound = _compiled_bound()
    work = np.maximum(stage.least_work // CORES, 1)

    def check(rate: float) -> bool:
        met, counts = np.zeros(len(work), np.int64), np.zeros(len(work), np.int64)
        for each in given:
            bound.met_in_time(each.at(rate).times, each.who, stage.slo, work, met)
            counts += each.counts
        return bool((met >= within * counts).all())

    parts = np.array(rates_of([truth.model for truth in stage.truths]))
    return most(check, 1e9 / float(parts @ work), grain)


def alone_ns(stage: Stage, policy: BlockPolicy) -> list[int]:
    """Latency of a query of each tenant in an empty machine under a policy."""
    ready = stage.cast(policy)
    made = []
    for tenant in range(len(stage.slo)):
        one = Arrivals(np.zeros(1, np.int64), np.array([tenant], np.int64), np.ones(1, np.int64))
        played = stage.play(ready, DropRule.NONE, one)
        made.append(int(played.ends[0]))
    return made


@cache
def _compiled_bound() -> ModuleType:
    return loaded(_bound.__name__)
