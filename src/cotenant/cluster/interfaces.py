"""What the controller is given, and what it needs of the fleet and of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotenant.cluster.detector import DetectorSettings
from cotenant.cluster.types import GatewayReport, Node, PlannedApplication, RoutingTable
from cotenant.techniques.partitions.plan.follow import FollowSettings
from cotenant.techniques.partitions.plan.types import Costs, DeviceType, Load, Planner


class Fleet(Protocol):
    """The nodes and their agents. Thread-safe."""

    def nodes(self) -> tuple[Node, ...]:
        """The machines that are there, with an agent or without. Raises what `check` raises."""
        ...

    def join(self, node: Node) -> None:
        """Start an agent. Raises ClusterError."""
        ...

    def drop(self, node: str) -> None:
        """End an agent at once, if it is still there."""
        ...

    def check(self) -> None:
        """Look whether the head of Ray is there. Raises ClusterError where it refuses a connection, TimeoutError."""
        ...

    def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of an agent. Raises NodeLostError when it is gone, TimeoutError, and what the agent raised."""
        ...


class GatewayLink(Protocol):
    """The gateway as the controller sees it: see `Gateway`. Only `report` waits for a gateway that does not answer."""

    def set_table(self, table: RoutingTable, lost: tuple[str, ...] = ()) -> None:
        """Have queries sent by this table. A gateway that does not answer takes it when it goes on."""
        ...

    def set_status(self, status: bytes) -> None: ...  # noqa: D102

    def report(self) -> GatewayReport:
        """What it counted. Raises ClusterError without a gateway, TimeoutError where it does not answer."""
        ...

    def drop(self) -> None:
        """End a gateway that does not answer; the next call starts another one."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What the cluster is for. `kinds` are device types by name; `models` directories of the repository by tenant.

    `applications` are those of the repository whose models are all among these.
    """

    loads: tuple[Load, ...]
    kinds: Mapping[str, DeviceType]
    models: Mapping[str, str]
    costs: Costs
    planner: Planner
    applications: tuple[PlannedApplication, ...] = ()


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Rates are looked at every `period_s`; `drain_s` is the longest wait for queries before a model is let go.

    A change of the plan on one node may take `change_s`, its end `stop_s`.
    """

    period_s: float = 20.0
    drain_s: float = 30.0
    change_s: float = 300.0
    stop_s: float = 30.0
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    follow: FollowSettings = field(default_factory=FollowSettings)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the plan: when, why, how long it took, and how many nodes serve since."""

    at: str
    reason: str
    took_s: float
    nodes: int
    share: float
    left_out: tuple[str, ...] = ()
    detail: str = ""
