"""Status of a cluster: the JSON of `GET /v2/cotenant/cluster`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cotenant.cluster.types import Address, Counts, Node, NodePlan, NodeReport, PlannedApplication, RoutingTable
from cotenant.techniques.partitions.plan.file import plan_tables
from cotenant.techniques.partitions.plan.types import Load

if TYPE_CHECKING:
    from cotenant.cluster.load_monitor import LoadMonitor
    from cotenant.cluster.state import ClusterState


def status_of(loads: Sequence[Load], state: ClusterState, monitor: LoadMonitor, planner: str) -> dict[str, Any]:
    """Build the status: nodes, tenants with rates and attainment, applications, and changes of the plan."""
    held, table, running = state.held, state.table, state.running()
    served = held.plan.rates_per_s if held else {}
    return {
        "planner": planner,
        "table": table.version,
        "share": held.share if held else 0.0,
        "left_out": list(held.left_out) if held else [],
        "breaks": state.breaks,
        "nodes": [
            _node(node, running.get(name), state.reports.get(name), table.addresses.get(name))
            for name, node in sorted(state.members.items())
        ]
        + [{"node": name, "state": "lost", "reason": reason} for name, reason in sorted(state.gone.items())],
        "tenants": [_tenant(load, served.get(load.tenant, 0.0), table, monitor) for load in loads],
        "applications": [_application(each, table, monitor) for each in table.applications],
        "changes": [asdict(change) for change in state.changes],
    }


def _node(node: Node, part: NodePlan | None, report: NodeReport | None, address: Address | None) -> dict[str, Any]:
    return {
        "node": node.name,
        "device": node.device,
        "state": "serving" if part else "idle",
        "http": f"{address.host}:{address.http_port}" if address else "",
        "grpc": f"{address.host}:{address.grpc_port}" if address else "",
        "pid": report.pid if report else 0,
        "agent_pid": report.agent_pid if report else 0,
        "partitions": plan_tables((part.plan,))[0]["partition"] if part else [],
        "guests": list(part.backfilled) if part else [],
    }


def _application(planned: PlannedApplication, table: RoutingTable, monitor: LoadMonitor) -> dict[str, Any]:
    spec = planned.spec
    nodes = {route.model: [node for node, _ in route.shares] for route in table.routes}
    return {
        "application": spec.name,
        "slo_ms": spec.slo_ns / 1e6,
        "stages": [
            {
                "stage": stage.name,
                "model": stage.model,
                "share_ms": planned.shares_ns[stage.name] / 1e6 if stage.name in planned.shares_ns else None,
                "nodes": nodes.get(stage.model, []),
            }
            for stage in spec.stages
        ],
        "queries": asdict(monitor.counts.get(spec.name, Counts())),
    }


def _tenant(load: Load, served: float, table: RoutingTable, monitor: LoadMonitor) -> dict[str, Any]:
    rate = monitor.rates.get(load.tenant)
    return {
        "tenant": load.tenant,
        "model": load.model,
        "slo_ms": load.slo_ns / 1e6,
        "declared_rate": load.rate_per_s,
        "tracked_rate": rate.demand_per_s if rate else None,
        "planned_rate": served,
        "nodes": [node for route in table.routes if route.tenant == load.tenant for node, _ in route.shares],
        "attainment": monitor.attainment.get(load.tenant),
        "queries": asdict(monitor.counts.get(load.tenant, Counts())),
    }
