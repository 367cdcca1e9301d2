"""The nouns of the cluster: nodes, what each has of the plan, the table by which queries are sent, and reports.

Everything here is frozen: it crosses processes. Rates are rows a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from cotenant.errors import CotenantError
from cotenant.repository.application_spec import ApplicationSpec
from cotenant.techniques.partitions.plan.types import DevicePlan, DeviceType, Load
from cotenant.types import Outcome


class ClusterError(CotenantError):
    """The cluster cannot be started, reached or changed: names the thing and what was expected."""


class NodeLostError(ClusterError):
    """A node does not answer any more."""


@dataclass(frozen=True, slots=True)
class Node:
    """A member of the cluster: one device of the named type. `key` is what Ray calls it."""

    name: str
    device: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    http_port: int
    grpc_port: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node has of the plan. `models` are the directories of the repository that it serves, sorted.

    `loads` are those of its tenants with the rates that this node is to serve. `guests` are tenants for whom no plan
    has room: they get the turns that nobody in the plan uses.
    """

    plan: DevicePlan
    kind: DeviceType
    loads: tuple[Load, ...]
    models: tuple[str, ...]
    guests: tuple[str, ...] = ()

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whom it serves, sorted."""
        return tuple(load.tenant for load in self.loads)


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that serve a tenant's model, each with the rate planned there. `slo_ns` bounds a retry."""

    tenant: str
    model: str
    slo_ns: int
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PlannedApplication:
    """An application whose stages are queries of the models that have routes.

    `shares_ns` is how the plan divides its SLO, by stage; empty where it was not planned for.
    """

    spec: ApplicationSpec
    shares_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """How the gateway sends queries: one route a tenant, and where each node that is named in one listens."""

    version: int
    routes: tuple[Route, ...]
    addresses: Mapping[str, Address]
    applications: tuple[PlannedApplication, ...] = ()

    def without(self, lost: tuple[str, ...]) -> RoutingTable:
        """The table with no way to these nodes; routes may be left empty."""
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
    """What a node did for a model since its server started: rows inferred, and queries answered with them."""

    rows: int
    queries: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What an agent says of its node. `address` is None while no server runs; `problem` is why it does not.

    `ended` says that the server was there and is no more. `served` is by model; `pid` is that of the server,
    `agent_pid` that of the agent. `plan` is the digest of the one that the server says it runs, "" where that is not
    known.
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
    """Queries of one tenant since somebody began to count. Each one that has ended is in one of the next five.

    `in_time` were answered within the SLO as the gateway saw it, `late` after it; `refused` were rejected or dropped,
    `failed` ended with any other error or were lost with their node, `cancelled` were withdrawn by their clients.
    `retried` are attempts after the first, `repeated` those of them where the one before may have run.
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
        """Queries that have an outcome."""
        return self.in_time + self.late + self.refused + self.failed + self.cancelled

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


COUNTED = {
    Outcome.ANSWERED: "in_time",
    Outcome.LATE: "late",
    Outcome.REJECTED: "refused",
    Outcome.DROPPED: "refused",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}
"""The field of `Counts` for each outcome."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Counts by tenant, queries under way by (node, model), and nodes whose connections were refused or broke.

    `gateway` tells gateways apart: each counts from 0.
    """

    counts: Mapping[str, Counts]
    outstanding: Mapping[tuple[str, str], int]
    suspects: tuple[str, ...]
    version: int
    gateway: str = ""
