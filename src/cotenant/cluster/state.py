"""What the controller believes: what nodes were asked to run, and what they report that they run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cotenant.cluster.interfaces import Change
from cotenant.cluster.types import Address, Node, NodePlan, NodeReport, RoutingTable
from cotenant.techniques.partitions.plan.follow import RunningPlan
from cotenant.techniques.partitions.plan.types import DevicePlan

_CHANGES_KEPT = 50
_MOST_SENT = 1024
"""Plans that are remembered."""


@dataclass(slots=True)
class ClusterState:
    """Guarded by the controller's lock. `parts` and `addresses` are those of the nodes in the table."""

    members: dict[str, Node] = field(default_factory=dict)
    parts: dict[str, NodePlan] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)
    reports: dict[str, NodeReport] = field(default_factory=dict)
    sent: dict[str, DevicePlan] = field(default_factory=dict)
    """Plans that nodes were asked to run, by digest, the oldest first: nodes report digests alone."""
    gone: dict[str, str] = field(default_factory=dict)
    table: RoutingTable = field(default_factory=lambda: RoutingTable(0, (), {}))
    held: RunningPlan | None = None
    lost: bool = False
    breaks: str = ""
    changes: tuple[Change, ...] = ()

    def lose(self, node: str, reason: str) -> None:
        """Forget what a node had."""
        self.lost = self.lost or node in self.parts
        for known in (self.members, self.parts, self.addresses, self.reports):
            known.pop(node, None)
        self.gone[node] = reason

    def changed(self, change: Change) -> None:
        """Another plan runs."""
        self.breaks = change.detail
        self.changes = (*self.changes, change)[-_CHANGES_KEPT:]

    def sends(self, plan: DevicePlan) -> None:
        """A node is to be asked to run this."""
        self.sent.pop(plan.digest, None)
        self.sent[plan.digest] = plan
        if len(self.sent) > _MOST_SENT:
            del self.sent[next(iter(self.sent))]

    def running(self) -> dict[str, NodePlan]:
        """The parts, each with the plan that its node reports where it has reported one."""
        plans = {node: self.sent.get(self._reported(node), part.plan) for node, part in self.parts.items()}
        return {node: replace(part, plan=plans[node]) for node, part in self.parts.items()}

    def astray(self) -> dict[str, NodePlan | None]:
        """The nodes that do not run what they are to run, with that: a part, or None for a server without one."""
        wrong: dict[str, NodePlan | None] = {
            node: part for node, part in self.parts.items() if self._reported(node) not in ("", part.plan.digest)
        }
        for node, report in self.reports.items():
            if node not in self.parts and report.address is not None:
                wrong[node] = None
        return wrong

    def took(self, node: str, plan: DevicePlan | None) -> None:
        """A node has said that it runs this now; None when its server has stopped."""
        if plan is None:
            self.reports.pop(node, None)
        elif node in self.reports:
            self.reports[node] = replace(self.reports[node], plan=plan.digest)

    def _reported(self, node: str) -> str:
        report = self.reports.get(node)
        return report.plan if report else ""
