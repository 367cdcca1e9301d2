"""Load monitor of the controller: tracked rates and attainment by time windows. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cotenant.cluster.types import Counts, GatewayReport, NodeReport, Served
from cotenant.techniques.partitions.plan.tracking import TrackedRate, Tracker, TrackingSettings
from cotenant.techniques.partitions.plan.types import Load


class LoadMonitor:
    """Counts of gateway and nodes, combined.

    Rate of a tenant in rows per second: the gateway's query rate times the rows per query at the nodes. So the demand
    includes refused queries.
    """

    def __init__(self, loads: Sequence[Load], models: Mapping[str, str], settings: TrackingSettings) -> None:
        self._models = {load.tenant: models[load.tenant] for load in loads}
        self._tracker = Tracker(settings)
        self._counts: dict[str, Counts] = {}
        self._gateway = ""
        self._before: dict[str, Counts] = {}
        """Counts of the previous gateways."""
        self._window: dict[str, Counts] = {}
        self._began_ns: int | None = None
        self._served: dict[str, Served] = {}
        self._rows: dict[str, float] = {}
        self.attainment: dict[str, float | None] = {}
        """Share of the queries ended in the last window that were answered in time; None without any."""

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Counts of this gateway and its predecessors, by tenant. Queries inside an ended gateway count as failed."""
        return self._counts

    @property
    def rates(self) -> Mapping[str, TrackedRate]:
        """Tracked rates by tenant."""
        return self._tracker.rates

    def demand(self) -> dict[str, float]:
        """Demand of each tenant in rows per second; empty before the end of the first window."""
        return self._tracker.demand()

    def observe(self, report: GatewayReport, nodes: Mapping[str, NodeReport]) -> None:
        """Update from the total counts of gateway and nodes."""
        if report.gateway != self._gateway:
            self._gateway = report.gateway
            self._before = {
                tenant: replace(counts, failed=counts.failed + counts.offered - counts.ended)
                for tenant, counts in self._counts.items()
            }
        tenants = dict.fromkeys((*self._before, *report.counts))
        self._counts = {
            tenant: self._before.get(tenant, Counts()).plus(report.counts.get(tenant, Counts())) for tenant in tenants
        }
        for node in nodes.values():
            for model, served in node.served.items():
                if served.queries:
                    self._rows[model] = served.rows / served.queries

    def close_window(self, now_ns: int) -> None:
        """End a window, update the rates, and begin the next window. The first call only begins one."""
        began_ns, last = self._began_ns, self._window
        if began_ns is not None and now_ns - began_ns < 1_000_000_000:
            return  # too short for a rate: planning was triggered by a lost node
        self._began_ns, self._window = now_ns, dict(self._counts)
        if began_ns is None:
            return
        rows: dict[str, int] = {}
        for tenant, model in self._models.items():
            before, after = last.get(tenant, Counts()), self._counts.get(tenant, Counts())
            rows[tenant] = round((after.offered - before.offered) * max(1.0, self._rows.get(model, 1.0)))
            ended = after.ended - before.ended
            self.attainment[tenant] = (after.in_time - before.in_time) / ended if ended else None
        self._tracker = self._tracker.after(rows, now_ns - began_ns)
