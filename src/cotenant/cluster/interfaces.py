"""Interfaces and settings of the controller: specification, fleet, gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotenant.cluster.detector import DetectorSettings
from cotenant.cluster.types import GatewayReport, Node, PlannedApplication, RoutingTable
from cotenant.techniques.partitions.plan.follow import FollowSettings
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Load, Planner


class Fleet(Protocol):
    """Nodes of a cluster and their agents. Thread-safe."""

    def nodes(self) -> tuple[Node, ...]:
        """Present nodes, with or without an agent. Raises as `check` does."""
        ...

    def join(self, node: Node) -> None:
        """Start the agent of a node. Raises ClusterError."""
        ...

    def drop(self, node: str) -> None:
        """Kill the agent of a node, if it exists."""
        ...

    def check(self) -> None:
        """Check the head of Ray. Raises ClusterError if it refuses a connection, TimeoutError if it does not answer."""
        ...

    def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of an agent. Raises NodeLostError if it has ended, TimeoutError, and the agent's errors."""
        ...


class GatewayLink(Protocol):
    """`Gateway` as the controller uses it. Only `report` waits for a gateway that does not answer."""

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        """Set the routing table. A gateway that does not answer uses it when it continues."""
        ...

    def set_status(self, status: bytes) -> None: ...  # noqa: D102

    def report(self) -> GatewayReport:
        """Counters of the gateway. Raises ClusterError without a gateway, TimeoutError if it does not answer."""
        ...

    def drop(self) -> None:
        """Kill a gateway that does not answer; the next call starts another one."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Specification of a cluster. `kinds`: device types by name; `models`: repository directories by tenant.
    `applications`: applications of the repository that need only these models."""

    loads: tuple[Load, ...]
    kinds: Mapping[str, DeviceType]
    models: Mapping[str, str]
    costs: Costs
    planner: Planner
    applications: tuple[PlannedApplication, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Time limits of the controller, in seconds.

    `period_s`: between two checks of the rates. `drain_s`: longest wait for queries before a model is unloaded.
    `change_s`: change of the plan on one node. `stop_s`: stop of a node.
    """

    period_s: float = 20.0
    drain_s: float = 30.0
    change_s: float = 300.0
    stop_s: float = 30.0
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    follow: FollowSettings = field(default_factory=FollowSettings)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the plan: time, reason, duration in seconds, and number of nodes since then."""

    at: str
    reason: str
    took_s: float
    nodes: int
    share: float
    left_out: tuple[str, ...] = ()
    detail: str = ""
