"""Status of the running plan: the JSON of `GET /v2/cotenant/plan`, and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cotenant.serve.engine.counters import TenantCounters
from cotenant.techniques.partitions.plan.file import plan_tables
from cotenant.techniques.partitions.plan.tracking import TrackedRate
from cotenant.techniques.partitions.plan.types import DevicePlan
from cotenant.work import PlanLanes


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of the running plan: its number (from 1), and the number of changes.

    `share`: the least share, over tenants, of the planned or arriving rate that the plan serves. Unless `is_followed`,
    the policy runs the partitions of the plan without its rounds.
    """

    version: int
    changes: int
    share: float
    rates: Mapping[str, TrackedRate]
    is_followed: bool = True


def plan_status(
    plan: DevicePlan,
    lanes: PlanLanes,
    figures: PlanFigures,
    counters: Mapping[str, TenantCounters],
    breaks: str,
    policy: str,
) -> dict[str, Any]:
    """The JSON of the plan. `breaks`: the broken constraint if the rates do not fit, else empty.

    If the policy follows no rounds, partitions have no slots in the JSON.
    """
    tables = plan_tables((plan,))[0]["partition"]
    if not figures.is_followed:
        tables = [{"size": table["size"], "slots": []} for table in tables]
    partitions = [{**table, "cores": lane.cores} for table, lane in zip(tables, lanes.lanes, strict=False)]
    return {
        "version": figures.version,
        "changes": figures.changes,
        "digest": plan.digest,
        "policy": policy,
        "is_followed": figures.is_followed,
        "plan": {"device": plan.device, "partitions": partitions},
        "left_cores": [core for lane in lanes.lanes[len(partitions) :] for core in lane.cores],
        "share": figures.share if figures.is_followed else None,
        "breaks": breaks,
        "rates": {
            tenant: {"ewma": rate.ewma, "quantile": rate.quantile} for tenant, rate in sorted(figures.rates.items())
        },
        "attainment": {tenant: counted.attainment for tenant, counted in sorted(counters.items())},
    }


def plan_metrics(figures: PlanFigures) -> Iterator[Metric]:
    """Metric families of a server that runs a plan."""
    yield GaugeMetricFamily("cotenant_plan_version", "Number of the plan that runs.", value=figures.version)
    yield CounterMetricFamily("cotenant_plan_changes", "Changes of the plan since the start.", value=figures.changes)
    yield GaugeMetricFamily(
        "cotenant_plan_followed",
        "Whether the policy runs the rounds of the plan; else its partitions alone.",
        value=figures.is_followed,
    )
    if figures.is_followed:
        yield GaugeMetricFamily(
            "cotenant_plan_served_ratio",
            "Share of the rates that come, or were wanted, that the plan serves.",
            value=figures.share,
        )
    rates = GaugeMetricFamily(
        "cotenant_tenant_rate", "Rows a second that arrive: average, and quantile of windows.", labels=["tenant", "by"]
    )
    for tenant, rate in sorted(figures.rates.items()):
        rates.add_metric([tenant, "ewma"], rate.ewma)
        rates.add_metric([tenant, "quantile"], rate.quantile)
    yield rates
