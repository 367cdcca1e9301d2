"""Squishy bin packing: time sharing of undivided devices, as in Nexus (SOSP 2019), section 6.1 and Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.elastic import MOST_MODELS
from cotenant.techniques.partitions.plan.partial_plan import PartialPlan, diagnose, impossible_alone
from cotenant.techniques.partitions.plan.rounds import Demand, round_cache_of
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Infeasible, Load, Plan, checked, padded


@dataclass(frozen=True, slots=True)
class SquishyBinPacking:
    """Fills whole devices with one model each, then merges the rest of every load into rounds.

    A load takes as many whole devices as its rate saturates. The rest of it occupies a share of its duty cycle. The
    loads with the largest share come first. Each joins the device in use that then bears the least, or takes another.
    Merging tries every duty cycle, not only the shorter one, which makes it stronger than the paper's.
    At most `most_models` models share a device, as in the artifact of GPU-let. `headroom` is the share of each rate
    that is added.

    Raises InvalidValueError when a setting is out of its range.
    """

    headroom: float = 0.0
    most_models: int = MOST_MODELS

    def __post_init__(self) -> None:
        if self.most_models < 1:
            raise InvalidValueError("squishy bin packing", "most_models", self.most_models, "at least 1")

    @property
    def name(self) -> str:
        """See Planner."""
        return "sbp"

    def plan(
        self, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
    ) -> Plan | Infeasible:
        """See Planner. `running` is ignored."""
        checked(loads, devices)
        partial = PartialPlan(round_cache_of(costs), devices, most_partitions=1, most_models=self.most_models)
        asked = padded(loads, self.headroom)
        for load in asked:
            impossible = impossible_alone(partial, load, whole=True)
            if impossible is not None:
                return impossible
        rests: list[tuple[float, Load, float]] = []
        for load in sorted(asked, key=lambda load: (-load.rate_per_s * load.slo_ns, load.tenant)):
            rate = load.rate_per_s
            while rate > 0:
                left = _saturate(partial, load, rate)
                if left >= rate:
                    break
                rate = left
            if rate > load.rate_per_s * 1e-9:
                rests.append((_occupancy(partial, load, rate), load, rate))
        for _, load, rate in sorted(rests, key=lambda rest: (-rest[0], rest[1].tenant)):
            if not _join(partial, load, rate):
                return diagnose(partial, load, rate, _join)
        return partial.plan(self.name)


def _saturate(partial: PartialPlan, load: Load, rate: float) -> float:
    """Give a whole unused device to a rate that fills it, the best for its price; what is left of the rate."""
    full: list[tuple[float, int, float]] = []
    for device in partial.fresh():
        kind = partial.kinds[device]
        capacity = partial.room(load, device, kind.whole)
        if 0 < capacity <= rate:
            full.append((kind.price / capacity, device, capacity))
    for _, device, capacity in sorted(full):
        opened = partial.opened(device, partial.kinds[device].whole, load, capacity)
        if opened is not None:
            partial.made[device] = opened
            return rate - capacity
    return rate


def _occupancy(partial: PartialPlan, load: Load, rate: float) -> float:
    """The share of its duty cycle for which a rate keeps a device busy, on the device where that is least."""
    shares = [1.0]
    for kind in partial.types:
        demand = Demand(load.model, load.slo_ns, rate)
        made = partial.cache.fit((demand,), kind.whole, kind.name)
        if made is not None:
            busy = partial.cache.alone_ns(load.model, made.batches[0], kind.whole, kind.name)
            shares.append(busy / made.duty_ns)
    return min(shares)


def _join(partial: PartialPlan, load: Load, rate: float) -> bool:
    """Put a rate onto the device in use that then bears the least, else onto the cheapest unused one."""
    options = []
    for device, made in enumerate(partial.made):
        if made:
            merged = partial.merged(device, 0, load, rate)
            if merged is not None:
                options.append((0.0, merged[0].round.bears, device, merged))
    if not options:
        for device in partial.fresh():
            kind = partial.kinds[device]
            opened = partial.opened(device, kind.whole, load, rate)
            if opened is not None:
                options.append((kind.price, opened[0].round.bears, device, opened))
    if not options:
        return False
    _, _, device, chosen = min(options, key=lambda option: option[:3])
    partial.made[device] = chosen
    return True
