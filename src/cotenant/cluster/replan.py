"""What the cluster does next: keep its plan, or another one for other nodes or other rates. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cotenant.cluster.parts import served_rates
from cotenant.cluster.types import Node
from cotenant.plan.fitting import Fitted, largest_fit
from cotenant.plan.scaling import Scaled, ScalingSettings, least_devices, rescale
from cotenant.plan.tracking import Look, TrackingSettings, look
from cotenant.plan.types import Costs, DeviceType, Infeasible, Load, Plan, Planner

FLOOR = 0.1
"""A tenant is planned for at least this share of the rate that its file declares, so that it always has a place."""


_TRIED_LEAVES = 8
"""With so many tenants each is tried as the one to be left out; with more, the one that breaks first is."""


class Reason(StrEnum):
    """Why there is another plan."""

    FIRST = "the first plan"
    LOST = "nodes were lost"
    GROW = "rates grew"
    SHRINK = "rates fell"
    MORE = "there are more nodes for rates that did not fit"
    KEEP = "nothing changed"


@dataclass(frozen=True, slots=True)
class Held:
    """What the cluster runs: the devices held, the plan, the share of the rates it serves, and calm looks in a row.

    `left_out` are the tenants that have no place in the plan.
    """

    scaled: Scaled
    plan: Plan
    share: float = 1.0
    calm: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all that is asked for is served."""
        return self.share >= 1.0 and not self.left_out


@dataclass(frozen=True, slots=True)
class Step:
    """What to do: `held.plan` is the one to run; it is the old one where `reason` is KEEP.

    `breaks` says what does not fit where less than the whole of each rate is served.
    """

    held: Held | None
    reason: Reason
    breaks: Infeasible | None = None


def inventory_of(nodes: Sequence[Node], running: Mapping[str, object], kinds: Mapping[str, DeviceType]) -> list[Node]:
    """The nodes as an inventory: those that run something first, so that scaling down keeps them."""
    known = [node for node in nodes if node.device in kinds]
    return sorted(known, key=lambda node: (node.name not in running, node.name))


def asked_loads(declared: Sequence[Load], tracked: Mapping[str, float], floor: float = FLOOR) -> tuple[Load, ...]:
    """The declared loads with the tracked rates where there are some, but no less than `floor` of what is declared."""
    return tuple(
        replace(load, rate_per_s=max(tracked[load.tenant], floor * load.rate_per_s)) if load.tenant in tracked else load
        for load in declared
    )


def next_step(
    planner: Planner,
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    costs: Costs,
    held: Held | None,
    tracking: TrackingSettings,
    scaling: ScalingSettings,
    lost: bool = False,
) -> Step:
    """Look at the nodes that are there and at the rates that are asked for, and say what to run.

    `lost` says that a node of the plan is gone. Rises and losses are answered at once, falls as the settings say.
    Where the rates do not fit onto all nodes, the largest common share of them is planned for; where no share does,
    tenants are left out until one does. `held` in the answer is None where nothing fits. Raises what the planner
    raises.
    """
    reason, calm = _reason(loads, inventory, held, tracking, lost)
    if held is not None and reason is Reason.KEEP:
        return Step(replace(held, calm=calm), reason)
    if not inventory:
        return Step(None, reason)
    if held is None:
        scaled = least_devices(planner, loads, inventory, costs)
    elif reason is Reason.LOST:
        scaled = least_devices(planner, loads, inventory, costs, held.plan)
    else:
        # the look has been patient already: what it calls a fall is one
        patience = 1 if reason is Reason.SHRINK else scaling.patience
        scaled = rescale(planner, loads, inventory, costs, held.scaled, replace(scaling, patience=patience))
    if isinstance(scaled.plan, Plan):
        return Step(Held(scaled, scaled.plan), reason)
    fitted, left_out = _fit_some(planner, loads, inventory, costs, held.plan if held else None)
    if fitted.plan is None:
        return Step(None, reason, scaled.plan)
    found = Held(Scaled(fitted.plan, len(inventory)), fitted.plan, fitted.share, 0, left_out)
    return Step(found, reason, scaled.plan if left_out else fitted.breaks)


def _fit_some(
    planner: Planner, loads: Sequence[Load], inventory: Sequence[DeviceType], costs: Costs, running: Plan | None
) -> tuple[Fitted, tuple[str, ...]]:
    """The largest share that fits, and the tenants left out for it: those without whom most of the rest fits."""
    kept = list(loads)
    left_out: list[str] = []
    while True:
        fitted = largest_fit(planner, kept, inventory, costs, running)
        if fitted.plan is not None or len(kept) == 1:
            return fitted, tuple(left_out)
        leaves = kept if len(kept) <= _TRIED_LEAVES else []
        tried = [
            (largest_fit(planner, [each for each in kept if each is not load], inventory, costs, running), load)
            for load in leaves
        ]
        best = max(tried, key=lambda each: each[0].share if each[0].plan else -1.0, default=None)
        if best is not None and best[0].plan is not None:
            return best[0], (*left_out, best[1].tenant)
        who = fitted.breaks.tenant if fitted.breaks else ""
        load = next((each for each in kept if each.tenant == who), kept[-1])
        kept.remove(load)
        left_out.append(load.tenant)


def _reason(
    loads: Sequence[Load],
    inventory: Sequence[DeviceType],
    held: Held | None,
    tracking: TrackingSettings,
    lost: bool,
) -> tuple[Reason, int]:
    if held is None:
        return Reason.FIRST, 0
    there = Counter(device.name for device in inventory)
    if lost or Counter(device.device for device in held.plan.devices) - there:
        return Reason.LOST, 0
    if not held.whole and len(inventory) > held.scaled.devices:
        return Reason.MORE, 0
    asked = {load.tenant: load.rate_per_s for load in loads if load.tenant not in held.left_out}
    served = served_rates(held.plan)
    if held.share < 1.0:  # what was too much stays so until there are more nodes or lower rates
        served = {tenant: rate / held.share for tenant, rate in served.items()}
    found, calm = look(asked, served, tracking, held.calm)
    if found is Look.GROW:
        return Reason.GROW, 0
    if found is Look.SHRINK:
        return Reason.SHRINK, 0
    return Reason.KEEP, calm
