"""First come, first served: the order of arrival within a priority level of tenants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.policies.decision_context import NEVER_NS, Key
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.types import Query, Tenant


@dataclass(frozen=True, slots=True)
class Fcfs(ListPolicy):
    """Key: (priority, number), so the order of arrival. Weights have no effect."""

    tail_aware: bool = False

    name: ClassVar[str] = "fcfs"

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, number)."""
        return (tenant.rank, query.id)

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """After all present queries of the same priority."""
        return (tenant.rank, NEVER_NS)
