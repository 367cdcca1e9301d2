"""Elastic partitioning: Algorithm 1 of GPU-let (ATC 2022), section 4.3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.partial_plan import PartialPlan, diagnose, impossible_alone
from cotenant.techniques.partitions.plan.rounds import RoundCache, round_cache_of
from cotenant.techniques.partitions.plan.types import (
    Costs,
    DeviceType,
    Infeasible,
    Load,
    Plan,
    Planner,
    checked,
    padded,
)

MIN_GAIN = 1.05
"""Least ratio of the capacities of a partition size and the next smaller one: the artifact's constant."""
MOST_MODELS = 3
"""Most models in a partition: the artifact's constant."""
RETRIES = 5
_SERVED = 1e-9


@dataclass(frozen=True, slots=True)
class Elastic(Planner):
    """Elastic partitioning: chooses batch, partition size and time sharing together, load by load.

    For each load, in descending order of `rate * SLO`, until its whole rate is served:

    1. With `time_sharing`, put the rest of the rate into the fullest partition in use that stays feasible.
    2. Else let `p = min(p_eff, p_req)`: the most efficient size (`RoundCache.knee`), and the least size that serves the
       rest. Open the smallest free partition of at least `p`; an unused device is split.
    3. Without such a partition, the largest free one takes part of the rate (not defined in the paper).

    If a load does not fit, up to `retries` more attempts begin with that load; the artifact makes one attempt.

    With `with_interference` (gpu-let+int in the paper) every round stays feasible beside the others of its device.
    Rounds are adjusted when a neighbour is added, and `p_req` includes the mean slowdown beside the other loads. Later
    attempts reserve room for other loads' interference; the last ones leave devices undivided.

    `headroom`: share added to each rate. `rate_slack_per_s`: remaining rate that counts as served, 15 in the paper's
    artifact. `knee_only`: open partitions of the most efficient size alone.

    Raises InvalidValueError when a setting is out of its range.
    """

    with_interference: bool = False
    time_sharing: bool = True
    knee_only: bool = False
    headroom: float = 0.0
    rate_slack_per_s: float = 0.0
    retries: int = RETRIES
    min_gain: float = MIN_GAIN
    most_partitions: int = 2
    most_models: int = MOST_MODELS
    label: str = ""

    def __post_init__(self) -> None:
        if self.min_gain < 1:
            raise InvalidValueError("elastic planner", "min_gain", self.min_gain, "a ratio from 1")
        if self.retries < 0:
            raise InvalidValueError("elastic planner", "retries", self.retries, "a number from 0")
        if self.rate_slack_per_s < 0:
            raise InvalidValueError("elastic planner", "rate_slack_per_s", self.rate_slack_per_s, "a rate from 0")
        for field in ("most_partitions", "most_models"):
            if getattr(self, field) < 1:
                raise InvalidValueError("elastic planner", field, getattr(self, field), "at least 1")

    @property
    @override
    def name(self) -> str:
        return self.label or ("elastic_int" if self.with_interference else "elastic")

    @override
    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """A plan by elastic partitioning; `running` is ignored."""
        checked(loads, devices)
        cache = round_cache_of(costs)
        empty = self._partial(cache, devices, (), self.most_partitions)
        for load in loads:
            impossible = impossible_alone(empty, load)
            if impossible is not None:
                return impossible
        ordered = sorted(padded(loads, self.headroom), key=lambda load: (-load.rate_per_s * load.slo_ns, load.tenant))
        slowdowns = _slowdowns(ordered, empty) if self.with_interference else {}
        first: Infeasible | None = None
        for reserve, most_partitions in self._ways(ordered):
            order = list(ordered)
            for _ in range(1 + self.retries):
                partial = self._partial(cache, devices, reserve, most_partitions)
                partial.slowdowns = slowdowns
                failed = self._attempt(order, partial)
                if failed is None:
                    return partial.plan(self.name)
                load, left = failed
                if first is None:
                    first = diagnose(partial, load, left, lambda other, its, rest: self._step(its, rest, other) < rest)
                if order[0] is load:
                    break
                order.remove(load)
                order.insert(0, load)
        assert first is not None
        return first

    def _ways(self, loads: Sequence[Load]) -> tuple[tuple[Sequence[Load], int], ...]:
        """Settings of the attempts: the loads to reserve room for, and the most partitions of a device."""
        first: tuple[Sequence[Load], int] = ((), self.most_partitions)
        return (first, (loads, self.most_partitions), ((), 1)) if self.with_interference else (first,)

    def _partial(
        self, cache: RoundCache, devices: Sequence[DeviceType], reserve: Sequence[Load], most_partitions: int
    ) -> PartialPlan:
        return PartialPlan(
            cache,
            devices,
            interference=self.with_interference,
            reserve=reserve,
            most_partitions=most_partitions,
            most_models=self.most_models if self.time_sharing else 1,
        )

    def _attempt(self, loads: Sequence[Load], partial: PartialPlan) -> tuple[Load, float] | None:
        """Place all loads in this order; return the first that does not fit, and the unserved part of its rate."""
        for load in loads:
            left = self._serve(load, load.rate_per_s, partial)
            if left > 0:
                return load, left
        return None

    def _serve(self, load: Load, rate: float, partial: PartialPlan) -> float:
        """Place a load's rate step by step; return the unserved part, 0 if all is served."""
        least = max(load.rate_per_s * _SERVED, self.rate_slack_per_s)
        while rate > least:
            left = self._step(load, rate, partial)
            if left >= rate:
                return rate
            rate = left
        return 0.0

    def _step(self, load: Load, rate: float, partial: PartialPlan) -> float:
        """Place a rate, or a part of it, in one partition; return the unserved part."""
        if self.time_sharing and self._share(load, rate, partial):
            return 0.0
        ideals = {kind.name: self._ideal(load, rate, partial, kind) for kind in partial.types}
        fitting: list[tuple[float, int, int]] = []
        smaller: list[tuple[float, int, int]] = []
        fresh = partial.fresh()
        for device, kind in enumerate(partial.kinds):
            ideal = ideals[kind.name]
            if not ideal:
                continue
            if device in fresh:
                fitting.append((1.0, device, ideal))
            elif partial.made[device]:
                for size in partial.free_sizes(device):
                    option = (size / kind.whole, device, size)
                    if size >= ideal:
                        fitting.append(option)
                    else:
                        smaller.append(option)
        smaller.sort(key=lambda option: (-option[0], option[1]))
        for _, device, size in (*sorted(fitting), *smaller):
            served = min(rate, partial.room(load, device, size))
            if served > rate * _SERVED:
                opened = partial.opened(device, size, load, served)
                if opened is not None:
                    partial.made[device] = opened
                    return rate - served
        return rate

    def _share(self, load: Load, rate: float, partial: PartialPlan) -> bool:
        """Put a whole rate into the partition in use that then bears the smallest slowdown; whether one fits."""
        best: tuple[float, int, int] | None = None
        for device, made in enumerate(partial.made):
            for index in range(len(made)):
                merged = partial.merged(device, index, load, rate)
                if merged is not None:
                    bears = merged[index].round.bears
                    if best is None or bears < best[0]:
                        best = (bears, device, index)
                        chosen = merged
        if best is not None:
            partial.made[best[1]] = chosen
        return best is not None

    def _ideal(self, load: Load, rate: float, partial: PartialPlan, kind: DeviceType) -> int:
        """The partition size to search, `min(p_eff, p_req)`; 0 if this type of device cannot serve the model."""
        if partial.most_partitions == 1:
            return kind.whole if partial.cache.capacity(load.model, load.slo_ns, kind.whole, kind.name) > 0 else 0
        efficient = partial.cache.knee(load.model, load.slo_ns, kind, self.min_gain)
        if self.knee_only or not efficient:
            return efficient
        for size in kind.sizes:
            if size >= efficient:
                break
            capacity = partial.cache.capacity(load.model, load.slo_ns, size, kind.name)
            if capacity >= rate * partial.slowdowns.get((load.tenant, kind.name, size), 1.0):
                return size
        return efficient


def _slowdowns(loads: Sequence[Load], partial: PartialPlan) -> dict[tuple[str, str, int], float]:
    """Expected slowdown of each load by tenant, device type and size: the mean over single other loads beside it."""
    cache = partial.cache
    found = {}
    for kind in partial.types:
        for size in kind.sizes:
            beside = partial.beside(kind, size)
            if not beside:
                continue
            batches = [
                (load.model, cache.best_batch(load.model, load.slo_ns, beside, kind.name), beside) for load in loads
            ]
            for load in loads:
                own = cache.best_batch(load.model, load.slo_ns, size, kind.name)
                factors = [
                    cache.costs.factor(load.model, own, size, (other,), kind.name)
                    for there, other in zip(loads, batches, strict=True)
                    if own and other[1] and there is not load
                ]
                if factors:
                    found[load.tenant, kind.name, size] = sum(factors) / len(factors)
    return found
