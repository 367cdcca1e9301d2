"""From a plan to the plans of the nodes and the routes of the gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from cotenant.cluster.types import Address, Node, NodePlan, PlannedApplication, Route, RoutingTable
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.match import match
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, Plan


def inventory_of(nodes: Sequence[Node], running: Mapping[str, object], kinds: Mapping[str, DeviceType]) -> list[Node]:
    """The nodes as an inventory: those that run something first, so that scaling down keeps them."""
    known = [node for node in nodes if node.device in kinds]
    return sorted(known, key=lambda node: (node.name not in running, node.name))


def assign(plan: Plan, nodes: Sequence[Node], running: Mapping[str, DevicePlan]) -> dict[str, DevicePlan]:
    """Which node takes which device of the plan: first those of which most tenants stay where they run.

    Where it is all the same, nodes in their order take devices in theirs, and a node that runs something goes before
    one that runs nothing. Raises PlanError for more devices of a type than nodes.
    """
    placed: dict[str, DevicePlan] = {}
    for kind in dict.fromkeys(device.device for device in plan.devices):
        wanted = [device for device in plan.devices if device.device == kind]
        there = [node.name for node in nodes if node.device == kind]
        if len(wanted) > len(there):
            raise PlanError(f"the plan has {len(wanted)} devices of type {kind!r}, expected at most {len(there)} nodes")
        there.sort(key=lambda name: name not in running)
        places = match(
            (_kept(device, running.get(node)), number, column)
            for number, device in enumerate(wanted)
            for column, node in enumerate(there)
        )
        placed |= {there[column]: wanted[number] for number, column in places.items()}
    return {node.name: placed[node.name] for node in nodes if node.name in placed}


def tenants_of(plan: DevicePlan) -> tuple[str, ...]:
    """The tenants of a device, sorted."""
    return tuple(sorted(plan.rates_per_s))


def _kept(device: DevicePlan, running: DevicePlan | None) -> int:
    """What is gained by a node that keeps its tenants; one that keeps the whole plan gains most."""
    if running is None:
        return 0
    there = tenants_of(running)
    return 2 * sum(tenant in there for tenant in tenants_of(device)) + (device == running)


def node_plans_of(
    placed: Mapping[str, DevicePlan],
    loads: Sequence[Load],
    kinds: Mapping[str, DeviceType],
    models: Mapping[str, str],
    guests: Mapping[str, str] | None = None,
) -> dict[str, NodePlan]:
    """The part of each node. `models` gives the directory in the repository by tenant, `guests` nodes by tenant."""
    known = {load.tenant: load for load in loads}
    parts = {}
    for node, device in placed.items():
        rates = device.rates_per_s
        names = sorted(rates)
        more = tuple(sorted(tenant for tenant, place in (guests or {}).items() if place == node))
        parts[node] = NodePlan(
            device,
            kinds[device.device],
            tuple(replace(known[name], rate_per_s=rates[name]) for name in names),
            tuple(sorted({models[name] for name in (*names, *more)})),
            more,
        )
    return parts


def place_guests(
    left_out: Sequence[str], placed: Mapping[str, DevicePlan], running: Mapping[str, NodePlan]
) -> dict[str, str]:
    """A node for each tenant that no plan has room for: where it runs, else the one with the fewest tenants."""
    found: dict[str, str] = {}
    crowd = {node: len(tenants_of(device)) for node, device in placed.items()}
    for tenant in left_out:
        there = [node for node, part in running.items() if node in placed and tenant in (*part.tenants, *part.guests)]
        node = there[0] if there else min(crowd, key=lambda name: crowd[name])
        found[tenant] = node
        crowd[node] += 1
    return found


def routing_table_of(
    version: int,
    parts: Mapping[str, NodePlan],
    loads: Iterable[Load],
    models: Mapping[str, str],
    addresses: Mapping[str, Address],
    applications: tuple[PlannedApplication, ...] = (),
) -> RoutingTable:
    """The table of the gateway: every load has a route, an empty one where no node serves it."""
    routes = []
    for load in loads:
        shares = []
        for node, part in parts.items():
            rate = load.rate_per_s if load.tenant in part.guests else part.plan.rates_per_s.get(load.tenant, 0.0)
            if rate > 0:
                shares.append((node, rate))
        routes.append(Route(load.tenant, models[load.tenant], load.slo_ns, tuple(shares)))
    used = {node: addresses[node] for node in parts}
    return RoutingTable(version, tuple(routes), used, applications)


def gains(new: NodePlan, old: NodePlan | None) -> bool:
    """Whether a node must take its new part before queries are sent by the new table: somebody gets more there."""
    if old is None or any(tenant not in (*old.tenants, *old.guests) for tenant in new.guests):
        return True
    before, after = old.plan.rates_per_s, new.plan.rates_per_s
    return any(rate > before.get(tenant, 0.0) * (1 + 1e-9) for tenant, rate in after.items())


def lets_go(old: NodePlan, new: NodePlan | None) -> tuple[str, ...]:
    """The models that a node stops serving."""
    return tuple(model for model in old.models if new is None or model not in new.models)
