"""State of the controller: plans sent to nodes, and plans that nodes report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cotenant.cluster.interfaces import Change
from cotenant.cluster.types import Address, Node, NodePlan, NodeReport, RoutingTable
from cotenant.techniques.partitions.plan.follow import RunningPlan
from cotenant.techniques.partitions.plan.types import DevicePlan

_CHANGES_KEPT = 50
_MOST_SENT = 1024
"""Maximum number of remembered plans."""


@dataclass(slots=True)
class ClusterState:
    """Cluster state, guarded by the controller's lock. `parts`, `addresses`: of the nodes in the routing table."""

    members: dict[str, Node] = field(default_factory=dict)
    parts: dict[str, NodePlan] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)
    reports: dict[str, NodeReport] = field(default_factory=dict)
    sent: dict[str, DevicePlan] = field(default_factory=dict)
    """Plans sent to nodes by digest, oldest first; nodes report only digests."""
    gone: dict[str, str] = field(default_factory=dict)
    table: RoutingTable = field(default_factory=lambda: RoutingTable(0, (), {}))
    held: RunningPlan | None = None
    lost: bool = False
    breaks: str = ""
    changes: tuple[Change, ...] = ()

    def lose(self, node: str, reason: str) -> None:
        """Remove a lost node."""
        self.lost = self.lost or node in self.parts
        for known in (self.members, self.parts, self.addresses, self.reports):
            known.pop(node, None)
        self.gone[node] = reason

    def changed(self, change: Change) -> None:
        """Record a change of the plan."""
        self.breaks = change.detail
        self.changes = (*self.changes, change)[-_CHANGES_KEPT:]

    def remember(self, plan: DevicePlan) -> None:
        """Remember a plan before it is sent to a node."""
        self.sent.pop(plan.digest, None)
        self.sent[plan.digest] = plan
        if len(self.sent) > _MOST_SENT:
            del self.sent[next(iter(self.sent))]

    def running(self) -> dict[str, NodePlan]:
        """Parts by node, each with the plan that its node reports, if any."""
        plans = {node: self.sent.get(self._reported(node), part.plan) for node, part in self.parts.items()}
        return {node: replace(part, plan=plans[node]) for node, part in self.parts.items()}

    def deviating(self) -> dict[str, NodePlan | None]:
        """Nodes that do not run their part, with that part; None for a server that should stop."""
        wrong: dict[str, NodePlan | None] = {
            node: part for node, part in self.parts.items() if self._reported(node) not in ("", part.plan.digest)
        }
        for node, report in self.reports.items():
            if node not in self.parts and report.address is not None:
                wrong[node] = None
        return wrong

    def record_plan(self, node: str, plan: DevicePlan | None) -> None:
        """Record the plan that a node now runs; None if its server has stopped."""
        if plan is None:
            self.reports.pop(node, None)
        elif node in self.reports:
            self.reports[node] = replace(self.reports[node], plan=plan.digest)

    def _reported(self, node: str) -> str:
        report = self.reports.get(node)
        return report.plan if report else ""
