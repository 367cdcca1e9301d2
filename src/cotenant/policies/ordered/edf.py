"""Earliest deadline first within a priority level (Liu and Layland, 1973)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.policies.desk import Key
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.types import Query, Tenant, priority_rank


@dataclass(frozen=True, slots=True)
class Edf(ListPolicy):
    """Serve the query whose deadline comes first; with `preempt`, also at the boundaries inside a running batch."""

    preempt: bool = True

    name: ClassVar[str] = "edf"

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, deadline, arrival)."""
        return (query.rank, query.deadline_ns, query.id)

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """The deadline that it would get now."""
        return (priority_rank(tenant.priority), now_ns + tenant.slo_ns)
