"""Shortest job first, weighted: the smallest predicted work per weight (Smith's rule, 1956)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import BatchView
from cotenant.policies.decision_context import Key
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.types import Query, Tenant


@dataclass(frozen=True, slots=True)
class Sjf(ListPolicy):
    """Key: (priority, predicted latency / weight, number); with `preempt`, the remaining latency."""

    tail_aware: bool = False

    name: ClassVar[str] = "sjf"

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, predicted latency / weight, number)."""
        return (tenant.rank, self._work(tenant, query.shape, query.items, 0, predictor), query.id)

    def batch_key(self, batch: BatchView, predictor: Predictor) -> Key:
        """(priority, predicted remaining latency / weight, number of the first query)."""
        work = self._work(batch.tenant, batch.shape, batch.items, batch.next_unit, predictor)
        return (batch.tenant.rank, work, batch.queries[0].id)

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """The key of a query with one row of the first declared shape, without its number."""
        return (tenant.rank, self._work(tenant, 0, 1, 0, predictor))

    def _work(self, tenant: Tenant, shape: int, items: int, start: int, predictor: Predictor) -> int:
        latency = predictor.latency_ns(tenant.work(shape, items, start), self.lanes[0].size)
        return latency if tenant.weight == 1 else int(latency / tenant.weight)
