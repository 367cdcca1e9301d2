"""Prometheus metrics page: figures per tenant, and Triton-compatible metrics (`nv_inference_*`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cotenant import shortages
from cotenant.execute.protocol import ModelExecutor, WorkerStatus
from cotenant.serve.engine.counters import LATENCY_BUCKETS_S, TenantCounters
from cotenant.serve.engine.driver import LAG_BUCKETS_NS
from cotenant.serve.engine.queries import EngineFigures
from cotenant.serve.processor_time import ProcessorTime
from cotenant.shortages import Resource
from cotenant.types import LossCause, Outcome

Waiting = Callable[[], Mapping[str, int]]
PlanMetrics = Callable[[], Iterator[Metric]]
Lost = Mapping[str, Mapping[LossCause, int]]
MergeChecks = Mapping[str, Mapping[str, int]]


class _Families(Collector):
    """Builds the metric families at each scrape."""

    def __init__(
        self,
        counters: Mapping[str, TenantCounters],
        waiting: Waiting,
        executor: ModelExecutor,
        plan: PlanMetrics,
        lost: Lost,
        merge_checks: MergeChecks,
        engine: Callable[[], EngineFigures],
        processes: ProcessorTime | None,
    ) -> None:
        self._processes = processes
        self._counters = counters
        self._merge_checks = merge_checks
        self._engine = engine
        self._lost = lost
        self._plan = plan
        self._waiting = waiting
        self._executor = executor

    def describe(self) -> Iterable[Metric]:
        """No families before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        counters = sorted(self._counters.items())
        yield from _own(counters)
        yield _lost(counters, self._lost)
        checks = CounterMetricFamily(
            "cotenant_merge_checks",
            "Merged queries run again alone as a check, by whether both answers were the same.",
            labels=["tenant", "result"],
        )
        for tenant, results in sorted(self._merge_checks.items()):
            for result in ("same", "different"):
                checks.add_metric([tenant, result], results.get(result, 0))
        yield checks
        queued = GaugeMetricFamily(
            "cotenant_queue_length", "Queries waiting for their first launch.", labels=["tenant"]
        )
        for tenant, waiting in sorted(self._waiting().items()):
            queued.add_metric([tenant], waiting)
        yield queued
        yield from _of_engine(self._engine())
        yield from _of_workers(self._executor.workers())
        if self._processes is not None:
            yield from _of_processes(self._processes)
        short = CounterMetricFamily(
            "cotenant_shortages",
            "Resources that the operating system refused to give.",
            labels=["resource"],
        )
        for resource in Resource:
            short.add_metric([resource.value], shortages.counts()[resource])
        yield short
        launches = CounterMetricFamily("cotenant_gpu_launches", "Launches by how they ran on a GPU.", labels=["how"])
        for how, count in self._executor.launch_counts().items():
            launches.add_metric([how], count)
        yield launches
        yield from self._plan()
        yield from _triton(counters)


def _own(counters: list[tuple[str, TenantCounters]]) -> Iterator[Metric]:
    queries = CounterMetricFamily("cotenant_queries", "Queries by outcome.", labels=["tenant", "outcome"])
    excluded = CounterMetricFamily(
        "cotenant_apart_queries",
        "Queries left out of attainment: clients allowed less than the SLO, or withdrew them before it had passed.",
        labels=["tenant", "outcome"],
    )
    slo = GaugeMetricFamily("cotenant_slo_seconds", "Latency target.", labels=["tenant"])
    attainment = GaugeMetricFamily(
        "cotenant_slo_attainment_ratio",
        "Share of the last 1000 queries answered within the SLO; excluded queries do not count.",
        labels=["tenant"],
    )
    headroom = GaugeMetricFamily(
        "cotenant_headroom_seconds",
        "At the last launch: time to the deadline minus the predicted latency of that launch.",
        labels=["tenant"],
    )
    latency = HistogramMetricFamily(
        "cotenant_latency_seconds",
        "From the first byte of a request to its written answer; unanswered queries count in the last bucket only.",
        labels=["tenant"],
    )
    reruns = CounterMetricFamily(
        "cotenant_query_reruns", "Queries run again after their batch had failed.", labels=["tenant"]
    )
    placed = CounterMetricFamily(
        "cotenant_placed_launches", "Launches that ran as several tasks of a placement.", labels=["tenant"]
    )
    probes = CounterMetricFamily(
        "cotenant_probe_queries",
        "Queries run although the predicted latency of their model exceeds its SLO.",
        labels=["tenant"],
    )
    factor = GaugeMetricFamily(
        "cotenant_latency_factor_ratio", "Ratio of observed to profiled latency, current estimate.", labels=["tenant"]
    )
    for tenant, counted in counters:
        placed.add_metric([tenant], counted.placed_launches)
        probes.add_metric([tenant], counted.probes)
        factor.add_metric([tenant], counted.latency_factor)
        for outcome in Outcome:
            queries.add_metric([tenant, outcome.value], counted.outcomes[outcome])
            excluded.add_metric([tenant, outcome.value], counted.excluded[outcome])
        reruns.add_metric([tenant], counted.reruns)
        slo.add_metric([tenant], counted.slo_ns / 1e9)
        if (share := counted.attainment) is not None:
            attainment.add_metric([tenant], share)
        if (headroom_ns := counted.headroom_ns) is not None:
            headroom.add_metric([tenant], headroom_ns / 1e9)
        buckets = _summed([*map(str, LATENCY_BUCKETS_S), "+Inf"], counted.latency_buckets)
        latency.add_metric([tenant], buckets, counted.latency_ns / 1e9)
    return iter([queries, excluded, reruns, placed, probes, factor, slo, attainment, headroom, latency])


def _summed(bounds: Sequence[str], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative histogram buckets from the counts between bounds."""
    return list(zip(bounds, map(float, accumulate(counts)), strict=True))


def _lost(counters: list[tuple[str, TenantCounters]], lost: Lost) -> Metric:
    made = CounterMetricFamily(
        "cotenant_lost", "Queries that were not answered in time, by cause.", labels=["tenant", "cause"]
    )
    for tenant, _ in counters:
        causes = lost.get(tenant, {})
        for cause in LossCause:
            made.add_metric([tenant, cause.value], causes.get(cause, 0))
    return made


def _of_engine(figures: EngineFigures) -> Iterator[Metric]:
    made = CounterMetricFamily(
        "cotenant_policy_faults", "Policy calls that raised or violated the policy contract.", labels=["policy", "call"]
    )
    for place, count in sorted(figures.faults.items()):
        made.add_metric(list(place), count)
    fallback = GaugeMetricFamily("cotenant_policy_fallback", "1 while the fallback policy replaces the configured one.")
    fallback.add_metric([], int(figures.falls_back))
    rated = GaugeMetricFamily(
        "cotenant_guaranteed_rates_ratio",
        "Share of all lanes that guaranteed rates (tenant.rate) need; above 1 the rates are scaled down.",
    )
    rated.add_metric([], figures.rated_part)
    lag = HistogramMetricFamily(
        "cotenant_decision_lag_seconds",
        "From the time when an event was readable (request, end of a launch, timer) until its actions were started.",
    )
    bounds = [*[str(bound / 1e9) for bound in LAG_BUCKETS_NS], "+Inf"]
    lag.add_metric([], _summed(bounds, figures.lags or [0] * len(bounds)), figures.lag_ns / 1e9)
    return iter([made, fallback, rated, lag])


def _of_workers(workers: Sequence[WorkerStatus]) -> Iterator[Metric]:
    restarts = CounterMetricFamily(
        "cotenant_worker_restarts", "Worker processes lost, by reason.", labels=["tenant", "reason"]
    )
    resident = GaugeMetricFamily("cotenant_worker_resident_bytes", "Memory of the worker.", labels=["tenant"])
    start = GaugeMetricFamily("cotenant_worker_start_seconds", "Start time of the last worker.", labels=["tenant"])
    load = GaugeMetricFamily("cotenant_worker_load_seconds", "Model load time of the last worker.", labels=["tenant"])
    cpu = CounterMetricFamily(
        "cotenant_tenant_cpu_seconds", "Processor time of the tenant's worker.", labels=["tenant"]
    )
    for worker in sorted(workers, key=lambda each: each.tenant):
        for reason, count in sorted(worker.restarts.items()):
            restarts.add_metric([worker.tenant, reason], count)
        resident.add_metric([worker.tenant], worker.resident_bytes)
        start.add_metric([worker.tenant], worker.start_ns / 1e9)
        load.add_metric([worker.tenant], worker.load_ns / 1e9)
        cpu.add_metric([worker.tenant], worker.cpu_s)
    return iter([restarts, resident, start, load, cpu])


def _of_processes(time: ProcessorTime) -> Iterator[Metric]:
    own = CounterMetricFamily(
        "cotenant_server_cpu_seconds",
        "Processor time of the server's processes: engine, front_end, worker, loader.",
        labels=["process"],
    )
    for kind, used_s in time.seconds().items():
        own.add_metric([kind], used_s)
    cores_s, others_s = time.others.read()
    cores = CounterMetricFamily("cotenant_core_seconds", "Time of all cores of the server, idle or not.", cores_s)
    others = "Time that processes outside of the server, without load generators, and the host took from its cores."
    return iter([own, cores, CounterMetricFamily("cotenant_other_processes_cpu_seconds", others, others_s)])


def _triton(counters: list[tuple[str, TenantCounters]]) -> Iterator[Metric]:
    def counter(name: str, text: str, value: Callable[[TenantCounters], float]) -> Metric:
        # Triton's names have no `_total`, which a counter family would append
        family = Metric(name, text, "unknown")
        for tenant, counted in counters:
            family.add_sample(name, {"model": tenant}, value(counted))
        return family

    yield counter("nv_inference_request_success", "Requests answered.", lambda a: a.success.count)
    yield counter("nv_inference_request_failure", "Requests not answered.", lambda a: a.fail.count)
    yield counter("nv_inference_count", "Rows inferred.", lambda a: a.rows)
    yield counter("nv_inference_exec_count", "Batches executed.", lambda a: a.launches)
    yield counter(
        "nv_inference_pending_request_count",
        "Requests that have not ended.",
        lambda a: a.arrived - sum(a.outcomes.values()),
    )
    yield counter("nv_inference_request_duration_us", "Time of answered requests.", lambda a: a.success.ns // 1000)
    yield counter("nv_inference_queue_duration_us", "Time in the queue.", lambda a: a.queue.ns // 1000)
    yield counter("nv_inference_compute_input_duration_us", "Gathering inputs.", lambda a: a.compute_input.ns // 1000)
    yield counter("nv_inference_compute_infer_duration_us", "Inferring.", lambda a: a.compute_infer.ns // 1000)
    yield counter(
        "nv_inference_compute_output_duration_us", "Splitting outputs.", lambda a: a.compute_output.ns // 1000
    )


class MetricsPage:
    """Renders the metrics page from counters and from the current queue lengths."""

    def __init__(
        self,
        counters: Mapping[str, TenantCounters],
        waiting: Waiting,
        executor: ModelExecutor,
        plan: PlanMetrics = lambda: iter(()),
        lost: Lost = MappingProxyType({}),
        merge_checks: MergeChecks = MappingProxyType({}),
        engine: Callable[[], EngineFigures] = EngineFigures,
        processes: ProcessorTime | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(counters, waiting, executor, plan, lost, merge_checks, engine, processes))

    def render(self) -> bytes:
        """The page in the Prometheus text format."""
        return generate_latest(self._registry)
