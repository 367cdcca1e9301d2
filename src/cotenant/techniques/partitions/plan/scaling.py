"""The least number of devices for given rates, grown at once, given back late: Algorithm 2 of GPU-let (ATC 2022)."""

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
    """When devices are given back: once `patience` looks in a row found that fewer serve `margin` more than is asked.

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
    """How many devices are held, for how many looks in a row fewer would have done, and the plan for those held."""

    plan: Plan | Infeasible
    devices: int
    calm: int = 0


def least_devices(
    planner: Planner, loads: Sequence[Load], inventory: Sequence[DeviceType], costs: Costs, running: Plan | None = None
) -> Scaled:
    """A plan on as few devices as the planner can do with, taken from the inventory in its order.

    Where not even the whole inventory is enough, the answer is the planner's for all of it. Raises what the planner
    raises.
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
    """The next step from what is held: more devices as soon as the loads need them, fewer as the settings say.

    `last` is what the step before gave. Raises what the planner raises.
    """
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
    """The first number of devices from `least` on that is enough."""
    for count in range(min(least, len(inventory)), len(inventory)):
        plan = planner.plan(loads, inventory[:count], costs, running)
        if isinstance(plan, Plan):
            return Scaled(plan, count)
    return Scaled(planner.plan(loads, inventory, costs, running), len(inventory))


def _bound(loads: Sequence[Load], inventory: Sequence[DeviceType], costs: Costs) -> int:
    """So many devices at least, whatever the planner."""
    kinds = list(checked(loads, inventory).values())
    cache = round_cache_of(costs)
    shares = [min((cache.least_share(load, kind) for kind in kinds), default=math.inf) for load in loads]
    sizes = [(kind, size) for kind in kinds for size in kind.sizes]
    most = max((most_members(costs, kind, size, len(loads)) for kind, size in sizes), default=1)
    needed = sum(shares) / most  # a group ends no earlier than its longest member alone
    return max(1, len(inventory) if needed == math.inf else math.ceil(needed * (1 - 1e-9)))
