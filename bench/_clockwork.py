"""Policy `clockwork`: launches admitted by their predicted completion, as in Clockwork (Gujarati et al., OSDI'20).

Importing this module registers it. A server has no such policy: it is a baseline of benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

from msgspec import structs

from cotenant.core.predictor import Predictor
from cotenant.core.snapshot import Decision, Drop, DropRule, Snapshot, Start
from cotenant.policies.decision_context import MOST_AT_ONCE, Key
from cotenant.policies.ordered.listed import ListPolicy
from cotenant.policies.registry import register
from cotenant.types import Query, Tenant


@dataclass(frozen=True, slots=True)
class Clockwork(ListPolicy):
    """Least latest start first; queries that are predicted to be late behind those before them are refused at once.

    The prediction runs all waiting queries in this order, one behind the other. Batches form as under every policy of
    this family. A query of a tenant with batches is not refused ahead of time, as a batch may answer it in time.
    Launches run whole models.
    """

    tail_aware: bool = False

    name: ClassVar[str] = "clockwork"

    def queue_key(self, query: Query, tenant: Tenant, predictor: Predictor) -> Key:
        """(priority, latest start, arrival)."""
        return (tenant.rank, query.deadline_ns - self._needed_ns(query, tenant, predictor), query.id)

    def arrival_key(self, tenant: Tenant, now_ns: int, predictor: Predictor) -> Key:
        """The latest start that it would get now, with one row of the first declared shape."""
        needed = predictor.latency_ns(tenant.work(0, 1), self.lanes[0].size)
        return (tenant.rank, now_ns + tenant.slo_ns - needed)

    def decide(self, snapshot: Snapshot, memory: object) -> Decision:
        """Fill the free lanes, then refuse what will not be in time behind them."""
        decision = ListPolicy.decide(self, snapshot, memory)
        if self.drop is not DropRule.HOPELESS:
            return decision
        gone = {query.id for start in decision.starts for query in start.queries} | {
            drop.query for drop in decision.drops
        }
        predictor = snapshot.predictor
        free_at = self._free_at(snapshot, decision.starts)
        waiting = [
            (key, query, queue.tenant)
            for queue in snapshot.queues.values()
            for key, query in zip(queue.keys, queue.queries, strict=True)
            if query.id not in gone
        ]
        refused: list[Drop] = []
        for _, query, tenant in sorted(waiting, key=lambda entry: entry[0]):
            end, size = min(
                [(times[0] + self._needed_ns(query, tenant, predictor, size), size) for size, times in free_at.items()]
            )
            if end > query.deadline_ns:
                if tenant.max_batch == 1 and len(refused) < MOST_AT_ONCE:
                    over = (end - query.deadline_ns) / 1e6
                    refused.append(Drop(query.id, f"it would be late by {over:.1f} ms behind those before it"))
            else:
                heapreplace(free_at[size], end)
        return structs.replace(decision, drops=(*decision.drops, *refused))

    def _free_at(self, snapshot: Snapshot, starts: Sequence[Start]) -> dict[int, list[int]]:
        """When the lanes of each size are predicted to be free, as heaps."""
        now, busy = snapshot.now_ns, dict[int, int]()
        for run in snapshot.running.values():
            busy[run.launch.share.mask] = max(now, run.started_ns + run.launch.predicted_ns)
        for start in starts:
            busy[start.share.mask] = now + start.predicted_ns
        free_at: dict[int, list[int]] = {size: [] for size in self.sizes}
        for lane in self.lanes:
            end = busy.get(lane.mask)
            if end is None:  # free, but for launches of another policy before this one
                end = max([now, *[other for mask, other in busy.items() if mask & lane.mask]])
            free_at[lane.size].append(end)
        for times in free_at.values():
            heapify(times)
        return free_at

    def _needed_ns(self, query: Query, tenant: Tenant, predictor: Predictor, size: int = 0) -> int:
        """Predicted latency alone in a lane of that size, by default that of the first."""
        cores = size or self.sizes[0]
        return predictor.latency_ns(tenant.work(query.shape, query.items), cores)


register(Clockwork)
