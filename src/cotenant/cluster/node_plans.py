"""Split of a plan into node plans and routes of the gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from cotenant.cluster.types import Address, Node, NodePlan, PlannedApplication, Route, RoutingTable
from cotenant.errors import PlanError
from cotenant.techniques.partitions.plan.match import match
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load, Plan


def inventory_of(nodes: Sequence[Node], running: Mapping[str, object], kinds: Mapping[str, DeviceType]) -> list[Node]:
    """Nodes as an inventory: running nodes first, so that scaling down keeps them."""
    known = [node for node in nodes if node.device in kinds]
    return sorted(known, key=lambda node: (node.name not in running, node.name))


def assign(plan: Plan, nodes: Sequence[Node], running: Mapping[str, DevicePlan]) -> dict[str, DevicePlan]:
    """Assign devices of the plan to nodes by a matching that keeps most tenants where they run. Ties keep the order of
    nodes and devices, with running nodes first. Raises PlanError for more devices of a type than nodes."""
    placed: dict[str, DevicePlan] = {}
    for kind in dict.fromkeys(device.device for device in plan.devices):
        wanted = [device for device in plan.devices if device.device == kind]
        there = [node.name for node in nodes if node.device == kind]
        if len(wanted) > len(there):
            raise PlanError(f"the plan has {len(wanted)} devices of type {kind!r}, expected at most {len(there)} nodes")
        there.sort(key=lambda name: name not in running)
        places = match(
            (_kept_value(device, running.get(node)), number, column)
            for number, device in enumerate(wanted)
            for column, node in enumerate(there)
        )
        placed |= {there[column]: wanted[number] for number, column in places.items()}
    return {node.name: placed[node.name] for node in nodes if node.name in placed}


def tenants_of(plan: DevicePlan) -> tuple[str, ...]:
    """Tenants of a device, sorted."""
    return tuple(sorted(plan.rates_per_s))


def _kept_value(device: DevicePlan, running: DevicePlan | None) -> int:
    """Value of keeping tenants on their node: 2 per tenant, plus 1 for an unchanged plan."""
    if running is None:
        return 0
    there = tenants_of(running)
    return 2 * sum(tenant in there for tenant in tenants_of(device)) + (device == running)


def node_plans_of(
    placed: Mapping[str, DevicePlan],
    loads: Sequence[Load],
    kinds: Mapping[str, DeviceType],
    models: Mapping[str, str],
    backfilled: Mapping[str, str] | None = None,
) -> dict[str, NodePlan]:
    """Build the part of each node. `models`: repository directory by tenant; `backfilled`: node by tenant."""
    known = {load.tenant: load for load in loads}
    parts = {}
    for node, device in placed.items():
        rates = device.rates_per_s
        names = sorted(rates)
        more = tuple(sorted(tenant for tenant, place in (backfilled or {}).items() if place == node))
        parts[node] = NodePlan(
            device,
            kinds[device.device],
            tuple(replace(known[name], rate_per_s=rates[name]) for name in names),
            tuple(sorted({models[name] for name in (*names, *more)})),
            more,
        )
    return parts


def place_backfilled(
    left_out: Sequence[str], placed: Mapping[str, DevicePlan], running: Mapping[str, NodePlan]
) -> dict[str, str]:
    """Choose a node for each tenant outside the plan: where it runs, else the node with the fewest tenants."""
    found: dict[str, str] = {}
    crowd = {node: len(tenants_of(device)) for node, device in placed.items()}
    for tenant in left_out:
        there = [
            node for node, part in running.items() if node in placed and tenant in (*part.tenants, *part.backfilled)
        ]
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
    """Build the routing table: every load has a route, an empty one if no node serves it."""
    routes = []
    for load in loads:
        shares = []
        for node, part in parts.items():
            rate = load.rate_per_s if load.tenant in part.backfilled else part.plan.rates_per_s.get(load.tenant, 0.0)
            if rate > 0:
                shares.append((node, rate))
        routes.append(Route(load.tenant, models[load.tenant], load.slo_ns, tuple(shares)))
    used = {node: addresses[node] for node in parts}
    return RoutingTable(version, tuple(routes), used, applications)


def has_higher_rates(new: NodePlan, old: NodePlan | None) -> bool:
    """Whether a node serves a tenant at a higher rate than before, and so needs its new part before the new table."""
    if old is None or any(tenant not in (*old.tenants, *old.backfilled) for tenant in new.backfilled):
        return True
    before, after = old.plan.rates_per_s, new.plan.rates_per_s
    return any(rate > before.get(tenant, 0.0) * (1 + 1e-9) for tenant, rate in after.items())


def dropped_models(old: NodePlan, new: NodePlan | None) -> tuple[str, ...]:
    """Models that a node stops serving."""
    return tuple(model for model in old.models if new is None or model not in new.models)
