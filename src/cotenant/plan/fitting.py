"""The largest share of given rates that a plan can serve, where all of them are too much for the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotenant.plan.types import Costs, DeviceType, Infeasible, Load, Plan, Planner

STEPS = 7
"""Halvings of the interval: the share is found to within 1 %."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan for `share` of every rate, or None where no share was found to fit; why not more, if that is below 1."""

    plan: Plan | None
    share: float
    breaks: Infeasible | None = None


def largest_fit(
    planner: Planner,
    loads: Sequence[Load],
    devices: Sequence[DeviceType],
    costs: Costs,
    running: Plan | None = None,
    steps: int = STEPS,
) -> Fitted:
    """Plan for the loads, or for the largest common share of their rates for which the planner finds a plan.

    Bisection on the share; planners need not be monotone in it, so it is the largest that was found. Raises what the
    planner raises.
    """
    made = planner.plan(loads, devices, costs, running)
    if isinstance(made, Plan):
        return Fitted(made, 1.0)
    low, high, best, breaks = 0.0, 1.0, None, made
    for _ in range(steps):
        share = (low + high) / 2
        part = [replace(load, rate_per_s=load.rate_per_s * share) for load in loads]
        made = planner.plan(part, devices, costs, running)
        if isinstance(made, Plan):
            low, best = share, made
        else:
            high, breaks = share, made
    return Fitted(best, low, breaks)
