"""Scaling the number of devices: GPU-let (ATC 2022), section 4.5, Algorithm 2.

1. `n = the least number of devices, from the held number on, with a plan for the rates`: scale up at once.
2. If fewer devices have a plan for the rates plus a margin in `patience` consecutive checks, scale down to those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.errors import InvalidValueError
from cotenant.techniques.partitions.plan.rounds import most_members, round_cache_of
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


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """When to scale down: after `patience` consecutive checks in which fewer devices serve the rates plus `margin`.

    Raises InvalidValueError when a value is out of its range.
    """

    margin: float = 0.1
    patience: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise InvalidValueError("scaling", "margin", self.margin, "a share from 0")
        if self.patience < 1:
            raise InvalidValueError("scaling", "patience", self.patience, "at least 1")


@dataclass(frozen=True, slots=True)
class Scaled:
    """Number of held devices, and their plan. `calm`: consecutive checks in which fewer devices would have sufficed."""

    plan: Plan | Infeasible
    devices: int
    calm: int = 0


def least_devices(
    planner: Planner, loads: Sequence[Load], inventory: Sequence[DeviceType], costs: Costs, running: Plan | None = None
) -> Scaled:
    """A plan on the fewest devices of the inventory, taken in its order, for which the planner finds one.

    If the whole inventory is too small, the result is the planner's answer for it. Raises what the planner raises.
    """
    return _smallest_fit(planner, loads, inventory, costs, _bound(loads, inventory, costs), running)


def rescale(
    planner: Planner,
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    costs: Costs,
    last: Scaled,
    settings: ScalingSettings | None = None,
) -> Scaled:
    """One step of Algorithm 2 from the result `last` of the step before. Raises what the planner raises."""
    settings = settings or ScalingSettings()
    running = last.plan if isinstance(last.plan, Plan) else None
    held = _smallest_fit(planner, loads, inventory, costs, max(1, last.devices), running)
    if isinstance(held.plan, Infeasible) or held.devices > last.devices:
        return held
    if held.devices == 1:
        return held
    more = padded(loads, settings.margin)
    fewer = least_devices(planner, more, inventory[: held.devices - 1], costs, running)
    if isinstance(fewer.plan, Infeasible):
        return held
    if last.calm + 1 < settings.patience:
        return Scaled(held.plan, held.devices, last.calm + 1)
    plan = planner.plan(loads, inventory[: fewer.devices], costs, running)
    return Scaled(plan if isinstance(plan, Plan) else fewer.plan, fewer.devices)


def _smallest_fit(
    planner: Planner,
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    costs: Costs,
    least: int,
    running: Plan | None,
) -> Scaled:
    """The plan on the first number of devices, from `least` on, for which there is one."""
    for count in range(min(least, len(inventory)), len(inventory)):
        plan = planner.plan(loads, inventory[:count], costs, running)
        if isinstance(plan, Plan):
            return Scaled(plan, count)
    return Scaled(planner.plan(loads, inventory, costs, running), len(inventory))


def _bound(loads: Sequence[Load], inventory: Sequence[DeviceType], costs: Costs) -> int:
    """Lower bound of the number of devices, for every planner."""
    kinds = list(checked(loads, inventory).values())
    cache = round_cache_of(costs)
    shares = [min((cache.least_share(load, kind) for kind in kinds), default=math.inf) for load in loads]
    sizes = [(kind, size) for kind in kinds for size in kind.sizes]
    most = max((most_members(costs, kind, size, len(loads)) for kind, size in sizes), default=1)
    needed = sum(shares) / most  # a group ends no earlier than its longest member alone
    return max(1, len(inventory) if needed == math.inf else math.ceil(needed * (1 - 1e-9)))
