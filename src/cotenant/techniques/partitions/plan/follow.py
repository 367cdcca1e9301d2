"""Dynamic reorganiser: follows devices and rates, and decides which plan to run next (GPU-let, section 4.6). Pure.

The caller counts rows in windows of time and gives the counts to a `Tracker`. Every period it asks for the next step,
carries the step out (make before break), and keeps the returned state. A server does so for its one device, a cluster
for its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from msgspec import structs

from cotenant.techniques.partitions.plan.scaling import Scaled, ScalingSettings, least_devices, rescale
from cotenant.techniques.partitions.plan.tracking import RateVerdict, TrackingSettings, compare_rates
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Infeasible, Load, Plan, Planner

LEAST_SHARE = 0.1
"""Least share of its declared rate for which a tenant is planned, so that a tenant that returns is served until the
next check. The cost is small: unused slots are skipped or backfilled."""
STEPS = 7
"""Steps of the bisection: the fitting share is found to within 1 %."""
_TRIED_LEAVES = 8
"""Most tenants of which each is tried as the one to leave out; with more, the one that breaks first is left out."""


class Reason(StrEnum):
    """Reason for another plan."""

    FIRST = "the first plan"
    LOST = "nodes were lost"
    GROW = "rates grew"
    SHRINK = "rates fell"
    MORE = "there are more nodes for rates that did not fit"
    KEEP = "nothing changed"


@dataclass(frozen=True, slots=True)
class FollowSettings:
    """When to search another plan, and for which rates.

    `floor`: least share of its declared rate for which a tenant is planned. `leave_out`: leave tenants out of the plan
    if no common share of all rates fits; without it there is no plan then.
    """

    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    floor: float = LEAST_SHARE
    leave_out: bool = True


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The running plan, the devices held for it, and the share of the rates that it serves.

    `sought_per_s`: rates of the last search, successful or not; `left_out`: tenants without a slot. `calm` and `spare`:
    consecutive checks that found the plan too large, and the devices too many.
    """

    plan: Plan
    devices: int = 1
    share: float = 1.0
    left_out: tuple[str, ...] = ()
    sought_per_s: Mapping[str, float] = field(default_factory=dict)
    calm: int = 0
    spare: int = 0

    @property
    def whole(self) -> bool:
        """Whether the plan serves the whole demand."""
        return self.share >= 1.0 and not self.left_out


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a check: `held.plan` is the plan to run, the old one if `reason` is KEEP; None if no plan fits.

    `breaks`: the broken constraint, if less than the whole demand is served.
    """

    held: RunningPlan | None
    reason: Reason
    breaks: Infeasible | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan for `share` of every rate; None if no share fits. `breaks`: the constraint that prevents a larger one."""

    plan: Plan | None
    share: float
    breaks: Infeasible | None = None


def demanded_loads(declared: Sequence[Load], tracked: Mapping[str, float], floor: float) -> tuple[Load, ...]:
    """The declared loads at their tracked rates, if there are some, at least at `floor` of the declared rates."""
    return tuple(
        structs.replace(load, rate_per_s=max(tracked[load.tenant], floor * load.rate_per_s))
        if load.tenant in tracked
        else load
        for load in declared
    )


def compare(
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    held: RunningPlan,
    tracking: TrackingSettings,
    lost: bool = False,
) -> tuple[Reason, RunningPlan]:
    """Whether devices and rates need another plan, and the state after this check.

    `lost`: a device of the plan is gone. Rates that did not fit are not tried again until the rates or the number of
    devices change.
    """
    demand = {load.tenant: load.rate_per_s for load in loads}
    there = Counter(device.name for device in inventory)
    if lost or Counter(device.device for device in held.plan.devices) - there:
        return Reason.LOST, replace(held, calm=0, sought_per_s=demand)
    if not held.whole and len(inventory) > held.devices:
        return Reason.MORE, replace(held, calm=0, sought_per_s=demand)
    served = held.plan.rates_per_s
    for tenant, rate in held.sought_per_s.items():
        served[tenant] = max(served.get(tenant, 0.0), rate * (1 + tracking.headroom))
    seen, calm = compare_rates(demand, served, tracking, held.calm)
    if seen is RateVerdict.KEEP:
        return Reason.KEEP, replace(held, calm=calm)
    return Reason.GROW if seen is RateVerdict.GROW else Reason.SHRINK, replace(held, calm=0, sought_per_s=demand)


@dataclass(frozen=True, slots=True)
class PlanFollower:
    """Searches plans with one planner, on devices in the inventory's order. Raises what the planner raises."""

    planner: Planner
    inventory: Sequence[DeviceType]
    costs: Costs
    settings: FollowSettings

    def next_step(self, loads: Sequence[Load], held: RunningPlan | None, lost: bool = False) -> Step:
        """Check devices and rates, and search another plan if needed (`compare`, then `seek`)."""
        reason = Reason.FIRST
        if held is not None:
            reason, held = compare(loads, self.inventory, held, self.settings.tracking, lost)
        return Step(held, reason) if reason is Reason.KEEP else self.seek(loads, held, reason)

    def seek(self, loads: Sequence[Load], held: RunningPlan | None, reason: Reason) -> Step:
        """Search another plan, for the reason of `compare`.

        If the rates do not fit onto all devices, the plan is for the largest common share of the rates that fits.
        `held` of the result is None if no share fits.
        """
        if not self.inventory:
            return Step(None, reason)
        given = self.planner, loads, self.inventory, self.costs
        running = held.plan if held else None
        if held is None or reason is Reason.LOST:
            scaled = least_devices(*given, running)
        else:
            # `compare` has already waited `patience` checks before it reports a fall
            patience = 1 if reason is Reason.SHRINK else self.settings.scaling.patience
            last = Scaled(held.plan, held.devices, held.spare)
            scaled = rescale(*given, last, replace(self.settings.scaling, patience=patience))
        sought = {load.tenant: load.rate_per_s for load in loads}
        if isinstance(scaled.plan, Plan):
            return Step(RunningPlan(scaled.plan, scaled.devices, sought_per_s=sought, spare=scaled.calm), reason)
        fitted, left_out = self._fit_some(loads, running)
        if fitted.plan is None:
            return Step(None, reason, fitted.breaks)
        found = RunningPlan(fitted.plan, len(self.inventory), fitted.share, left_out, sought)
        return Step(found, reason, scaled.plan if left_out else fitted.breaks)

    def _fit_some(self, loads: Sequence[Load], running: Plan | None) -> tuple[Fitted, tuple[str, ...]]:
        """The largest share that fits, and the tenants left out: those by which the share of the rest gains most."""

        def fit(some: Sequence[Load]) -> Fitted:
            return largest_fit(self.planner, some, self.inventory, self.costs, running)

        kept = list(loads)
        left_out: list[str] = []
        while True:
            fitted = fit(kept)
            if fitted.plan is not None or len(kept) == 1 or not self.settings.leave_out:
                return fitted, tuple(left_out)
            leaves = kept if len(kept) <= _TRIED_LEAVES else []
            tried = [(fit([each for each in kept if each is not load]), load) for load in leaves]
            best, load = max(tried, key=lambda each: each[0].share, default=(fitted, kept[-1]))
            if best.plan is not None:
                return best, (*left_out, load.tenant)
            first = fitted.breaks.tenant if fitted.breaks else ""
            load = next((each for each in kept if each.tenant == first), kept[-1])
            kept.remove(load)
            left_out.append(load.tenant)


def largest_fit(
    planner: Planner, loads: Sequence[Load], devices: Sequence[DeviceType], costs: Costs, running: Plan | None = None
) -> Fitted:
    """Plan for the loads, or for the largest common share of their rates for which the planner finds a plan.

    Bisection on the share. As planners need not be monotone, a larger share may exist. Raises what the planner raises.
    """
    made = planner.plan(loads, devices, costs, running)
    if isinstance(made, Plan):
        return Fitted(made, 1.0)
    low, high, best, breaks = 0.0, 1.0, None, made
    for _ in range(STEPS):
        share = (low + high) / 2
        part = [structs.replace(load, rate_per_s=load.rate_per_s * share) for load in loads]
        made = planner.plan(part, devices, costs, running)
        if isinstance(made, Plan):
            low, best = share, made
        else:
            high, breaks = share, made
    return Fitted(best, low, breaks)
