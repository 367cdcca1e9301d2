"""Conversions between the protocol and the core: request to query, outcome to answer, counters to statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from cotenant.core.actions import Respond
from cotenant.core.engine import Engine
from cotenant.core.events import QueryRefused
from cotenant.execute.protocol import Tensors
from cotenant.serve.engine.clock import Clock
from cotenant.serve.engine.counters import Counters, Sum, TenantCounters
from cotenant.serve.engine.driver import Driver
from cotenant.serve.models.served_application import ServedApplication
from cotenant.serve.models.served_models import QueryForm, ServedModel
from cotenant.types import Query, priority_rank
from cotenant.wire.api import (
    Duration,
    InferRequest,
    InferResult,
    ModelStatistics,
    ServeError,
    Status,
    unanswered,
)

Done = Callable[[InferResult], None]


class EngineFigures(NamedTuple):
    """Engine figures for the metrics page.

    `faults`: faults of the policy and of fallbacks, by policy name and call. `falls_back`: the fallback serves now.
    `rated_part`: share of all lanes that guaranteed rates need. `lags`, `lag_ns`: decision lags by bucket of
    LAG_BUCKETS_NS, and their total in ns.
    """

    faults: Mapping[tuple[str, str], int] = MappingProxyType({})
    falls_back: bool = False
    rated_part: float = 0.0
    lags: tuple[int, ...] = ()
    lag_ns: int = 0


def arrival_of(request: InferRequest, now_ns: int) -> int:
    """Arrival time of a request: when its first byte was readable, if the front-end knows it; else now."""
    return min(request.arrival_ns, now_ns) if request.arrival_ns else now_ns


def query_of(
    served: ServedModel | ServedApplication,
    form: QueryForm,
    request: InferRequest,
    counters: Counters,
    number: int,
    now_ns: int,
) -> Query:
    """Build the query of a request. Its deadline is the shorter of SLO and time-out. Raises as `still_served` does."""
    tenant, timeout_ns = served.still_served(), request.timeout_ns
    slo = tenant.slo_ns if timeout_ns is None else min(tenant.slo_ns, timeout_ns)
    arrival_ns = arrival_of(request, now_ns)
    if request.arrival_ns:
        counters.expect_reply(number)
    return Query(
        id=number,
        tenant=tenant.name,
        arrival_ns=arrival_ns,
        deadline_ns=arrival_ns + slo,
        rank=priority_rank(request.priority),
        items=form.items,
        shape=form.shape,
        merge_key=form.merge_key,
        expiry_ns=None if timeout_ns is None else arrival_ns + timeout_ns,
    )


def answer(done: Done, served: ServedModel, clock: Clock, respond: Respond, outputs: Tensors | None) -> None:
    """Pass the outcome and outputs of a query to its front-end."""
    version = served.version_of(respond.query)
    if outputs is not None:
        done(InferResult(respond.outcome, respond.query, version, outputs, ended_ns=clock.now_ns()))
    else:
        done(unanswered(respond.outcome, respond.query, version, respond.reason, respond.cause))


def tell_refused(driver: Driver | None, clock: Clock, arrival_ns: int, tenant: str | None, error: ServeError) -> None:
    """Count a request that was refused for load or availability; `tenant` is None for an unknown one. Other errors are
    the client's and do not count."""
    if driver is not None and tenant is not None and error.status in (Status.UNAVAILABLE, Status.TOO_MANY):
        driver.post(QueryRefused(tenant, arrival_ns or clock.now_ns(), error.cause, error.message))


def waiting_of(driver: Driver | None) -> Mapping[str, int]:
    """Queries waiting for their first launch, by tenant; empty before the start."""
    if driver is None:
        return {}
    return driver.read(lambda engine: {each.name: engine.waiting(each.name) for each in engine.tenants})


def figures_of(driver: Driver | None) -> EngineFigures:
    """Engine figures for the metrics page; zeros before the start."""
    if driver is None:
        return EngineFigures()

    def look(engine: Engine) -> EngineFigures:
        lags = tuple(driver.lags), driver.lag_ns
        return EngineFigures(dict(engine.guard.faults), engine.guard.falls_back, engine.rated_part, *lags)

    return driver.read(look)


def statistics_of(name: str, version: str, known: TenantCounters | None) -> ModelStatistics:
    """Statistics of a model in the form of the protocol's statistics extension."""
    counted = known or TenantCounters(slo_ns=1)
    return ModelStatistics(
        name=name,
        version=version,
        last_inference_ms=counted.last_ms,
        inference_count=counted.rows,
        execution_count=counted.launches,
        success=_duration(counted.success),
        fail=_duration(counted.fail),
        queue=_duration(counted.queue),
        compute_input=_duration(counted.compute_input),
        compute_infer=_duration(counted.compute_infer),
        compute_output=_duration(counted.compute_output),
    )


def _duration(total: Sum) -> Duration:
    return Duration(total.count, total.ns)
