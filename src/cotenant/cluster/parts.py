"""From a plan to the parts of the nodes and the routes of the gateway. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cotenant.cluster.types import Address, Node, Part, Planned, Route, Table
from cotenant.plan.types import DevicePlan, DeviceType, Load, Plan, PlanError


def assign(plan: Plan, nodes: Sequence[Node], running: Mapping[str, DevicePlan]) -> dict[str, DevicePlan]:
    """Which node takes which device of the plan: as many tenants as possible stay where they run.

    An exact assignment per device type; where it is all the same, nodes in their order take devices in theirs, and a
    node that runs something goes before one that runs nothing. Raises PlanError for more devices of a type than nodes.
    """
    placed: dict[str, DevicePlan] = {}
    for kind in dict.fromkeys(device.device for device in plan.devices):
        wanted = [device for device in plan.devices if device.device == kind]
        there = [node.name for node in nodes if node.device == kind]
        if len(wanted) > len(there):
            raise PlanError(f"the plan has {len(wanted)} devices of type {kind!r}, expected at most {len(there)} nodes")
        there.sort(key=lambda name: name not in running)
        gain = [[_kept(device, running.get(node)) for node in there] for device in wanted]
        for device, column in zip(wanted, best_columns(gain), strict=True):
            placed[there[column]] = device
    return {node.name: placed[node.name] for node in nodes if node.name in placed}


def tenants_of(plan: DevicePlan) -> tuple[str, ...]:
    """The tenants of a device, sorted."""
    return tuple(sorted({slot.tenant for partition in plan.partitions for slot in partition.slots}))


def _kept(device: DevicePlan, running: DevicePlan | None) -> int:
    """What is gained by a node that keeps its tenants; one that keeps the whole plan gains most."""
    if running is None:
        return 0
    there = tenants_of(running)
    return 2 * sum(tenant in there for tenant in tenants_of(device)) + (device == running)


def best_columns(gain: Sequence[Sequence[int]]) -> list[int]:
    """A column for each row, all different, of the largest total gain; there are at least as many columns as rows.

    The Hungarian method with potentials, which takes rows² x columns steps.
    """
    rows = len(gain)
    columns = len(gain[0]) if rows else 0
    row_price = [0] * (rows + 1)
    column_price = [0] * (columns + 1)
    row_at = [0] * (columns + 1)
    for row in range(1, rows + 1):
        row_at[0] = row
        column = 0
        least: list[float] = [float("inf")] * (columns + 1)
        before = [0] * (columns + 1)
        seen = [False] * (columns + 1)
        while row_at[column]:
            seen[column] = True
            at = row_at[column]
            step, chosen = float("inf"), 0
            for other in range(1, columns + 1):
                if seen[other]:
                    continue
                cost = -gain[at - 1][other - 1] - row_price[at] - column_price[other]
                if cost < least[other]:
                    least[other], before[other] = cost, column
                if least[other] < step:
                    step, chosen = least[other], other
            for other in range(columns + 1):
                if seen[other]:
                    row_price[row_at[other]] += int(step)
                    column_price[other] -= int(step)
                else:
                    least[other] -= step
            column = chosen
        while column:
            row_at[column], column = row_at[before[column]], before[column]
    found = [0] * rows
    for column in range(1, columns + 1):
        if row_at[column]:
            found[row_at[column] - 1] = column - 1
    return found


def parts_of(
    placed: Mapping[str, DevicePlan],
    loads: Sequence[Load],
    kinds: Mapping[str, DeviceType],
    models: Mapping[str, str],
    guests: Mapping[str, str] | None = None,
) -> dict[str, Part]:
    """The part of each node. `models` gives the directory in the repository by tenant, `guests` nodes by tenant."""
    known = {load.tenant: load for load in loads}
    parts = {}
    for node, device in placed.items():
        rates = _rates(device)
        names = sorted(rates)
        more = tuple(sorted(tenant for tenant, place in (guests or {}).items() if place == node))
        parts[node] = Part(
            device,
            kinds[device.device],
            tuple(replace(known[name], rate_per_s=rates[name]) for name in names),
            tuple(sorted({models[name] for name in (*names, *more)})),
            more,
        )
    return parts


def place_guests(
    left_out: Sequence[str], placed: Mapping[str, DevicePlan], running: Mapping[str, Part]
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


def table_of(
    version: int,
    parts: Mapping[str, Part],
    loads: Iterable[Load],
    models: Mapping[str, str],
    addresses: Mapping[str, Address],
    applications: tuple[Planned, ...] = (),
) -> Table:
    """The table of the gateway: every load has a route, an empty one where no node serves it."""
    routes = []
    for load in loads:
        shares = []
        for node, part in parts.items():
            rate = load.rate_per_s if load.tenant in part.guests else _rates(part.plan).get(load.tenant, 0.0)
            if rate > 0:
                shares.append((node, rate))
        routes.append(Route(load.tenant, models[load.tenant], load.slo_ns, tuple(shares)))
    used = {node: addresses[node] for node in parts}
    return Table(version, tuple(routes), used, applications)


def gains(new: Part, old: Part | None) -> bool:
    """Whether a node must take its new part before queries are sent by the new table: somebody gets more there."""
    if old is None or any(tenant not in (*old.tenants, *old.guests) for tenant in new.guests):
        return True
    before, after = _rates(old.plan), _rates(new.plan)
    return any(rate > before.get(tenant, 0.0) * (1 + 1e-9) for tenant, rate in after.items())


def served_rates(plan: Plan) -> dict[str, float]:
    """Rows a second that a plan serves, by tenant."""
    total: dict[str, float] = {}
    for device in plan.devices:
        for tenant, rate in _rates(device).items():
            total[tenant] = total.get(tenant, 0.0) + rate
    return total


def _rates(device: DevicePlan) -> dict[str, float]:
    rates: dict[str, float] = {}
    for partition in device.partitions:
        for slot in partition.slots:
            rates[slot.tenant] = rates.get(slot.tenant, 0.0) + slot.rate_per_s
    return rates
