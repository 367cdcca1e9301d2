"""Types of the cluster: nodes, node plans, routing table, counts and reports.

All types are frozen, since they cross processes. Rates are rows per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from cotenant.errors import CotenantError
from cotenant.repository.application_spec import ApplicationSpec
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load
from cotenant.types import Outcome


class ClusterError(CotenantError):
    """The cluster cannot be started, reached or changed; the message names the cause and the remedy."""


class NodeLostError(ClusterError):
    """A node has failed or does not answer."""


@dataclass(frozen=True, slots=True)
class Node:
    """Member of the cluster: one device of type `device`. `key`: its ID in Ray."""

    name: str
    device: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server."""

    host: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Part of the plan for one node. `models`: repository directories that it serves, sorted.

    `loads`: loads of its tenants with the rates for this node. `backfilled`: unplanned tenants; they run in slots that
    planned tenants leave unused.
    """

    plan: DevicePlan
    kind: DeviceType
    loads: tuple[Load, ...]
    models: tuple[str, ...]
    backfilled: tuple[str, ...] = ()

    @property
    def tenants(self) -> tuple[str, ...]:
        """Planned tenants, sorted."""
        return tuple(load.tenant for load in self.loads)


@dataclass(frozen=True, slots=True)
class Route:
    """Nodes that serve a tenant's model, with planned rates. No retry starts after `slo_ns`."""

    tenant: str
    model: str
    slo_ns: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PlannedApplication:
    """Application with a route for the model of each stage.

    `shares_ns`: stage budgets of the plan in ns, by stage; empty for an unplanned application.
    """

    spec: ApplicationSpec
    shares_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """Routing table of the gateway: one route per tenant, and the addresses of the nodes in the routes."""

    version: int
    routes: tuple[Route, ...]
    addresses: Mapping[str, Address]
    applications: tuple[PlannedApplication, ...] = ()

    def without(self, lost: tuple[str, ...]) -> RoutingTable:
        """Copy of the table without these nodes; routes may become empty."""
        return RoutingTable(
            self.version + 1,
            tuple(
                Route(each.tenant, each.model, each.slo_ns, tuple(s for s in each.shares if s[0] not in lost))
                for each in self.routes
            ),
            {node: address for node, address in self.addresses.items() if node not in lost},
            self.applications,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """Inferred rows and answered queries of a model since the node's server started."""

    rows: int
    queries: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of an agent. `address`: None while no server runs; `problem`: the reason.

    `ended`: the server process has ended. `served`: by model. `pid`: of the server; `agent_pid`: of the agent. `plan`:
    digest of the plan that the server reports, "" if unknown.
    """

    address: Address | None
    problem: str = ""
    ended: bool = False
    served: Mapping[str, Served] = field(default_factory=dict)
    pid: int = 0
    agent_pid: int = 0
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """Query counts of one tenant; each ended query is in exactly one of the next five fields.

    `in_time`: answered within the SLO, as measured at the gateway; `late`: answered after it. `refused`: rejected or
    dropped. `failed`: any other error, or lost with its node. `cancelled`: withdrawn by the client. `retried`: attempts
    after the first; `repeated`: retries after an attempt that may have run the query.
    """

    offered: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    repeated: int = 0

    @property
    def ended(self) -> int:
        """Number of queries with an outcome."""
        return self.in_time + self.late + self.refused + self.failed + self.cancelled

    def plus(self, other: Counts) -> Counts:
        """Sum of both counts."""
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


COUNTED = {
    Outcome.ANSWERED: "in_time",
    Outcome.LATE: "late",
    Outcome.REJECTED: "refused",
    Outcome.DROPPED: "refused",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}
"""Field of `Counts` by outcome."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Counts by tenant, outstanding queries by (node, model), and nodes with refused or broken connections.

    `gateway` identifies the gateway process, which counts from 0.
    """

    counts: Mapping[str, Counts]
    outstanding: Mapping[tuple[str, str], int]
    suspects: tuple[str, ...]
    version: int
    gateway: str = ""
