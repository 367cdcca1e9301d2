"""Open-loop load generator: sends each query at its scheduled time, independent of earlier responses.

Latency counts from the scheduled time. So neither a stalled server nor a late generator hides queueing delay (no
coordinated omission).
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import numpy as np

from cotenant.linux import raise_open_file_limit
from cotenant.load.answer_check import AnswerCheck
from cotenant.load.clients import (
    Client,
    GrpcClient,
    HttpClient,
    ModelInfo,
    Reply,
    describe_grpc,
    describe_http,
)
from cotenant.load.errors import LoadError
from cotenant.load.http import HttpPool
from cotenant.load.request_samples import Sample, sample_pool, slo_of
from cotenant.load.result import Lag, LiveStats, LoadResult, TenantInfo, TenantLive
from cotenant.load.timer import PreciseTimer
from cotenant.measure.busy import LEAST_RUN_S, CoreTime, others_share
from cotenant.metrics import OutcomeLog, percentile_ns
from cotenant.types import ANSWERS, Outcome
from cotenant.wire.encode import Parameters, grpc_request, http_request
from cotenant.workload import TenantLoad, Workload, arrival_blocks

Inputs = Mapping[str, Sequence[Sample]]
"""Samples to send, by model."""

POOL = 8
"""Number of samples for each tenant; queries use them in rotation."""
LIMIT_SLOS = 10
LIMIT_NS = 10_000_000_000
"""A query without a response after `LIMIT_SLOS` times its SLO plus this counts as failed."""
LEAD_IN_NS = 50_000_000
"""Time from the end of the preparations to time 0 of the run."""
_RECENT = 2000
_BURST = 32
"""Queries sent in a row, when many are due, before the loop may write them."""
_REASONS = 20
_METRICS_S = 2.0
"""Seconds to wait for the metrics page."""
_CORE_METRICS = ("cotenant_core_seconds_total", "cotenant_other_processes_cpu_seconds_total")
_CORE_TIMES = re.compile(rf"^({'|'.join(_CORE_METRICS)}) ([0-9.e+]+)$", re.MULTILINE)
_TRIES = 5


async def run_load(
    workload: Workload,
    *,
    http_url: str | None = None,
    grpc_url: str | None = None,
    inputs: Inputs | None = None,
    on_tick: Callable[[LiveStats], None] | None = None,
    tick_s: float = 0.5,
    stop: asyncio.Event | None = None,
    check: bool = False,
) -> LoadResult:
    """Send the workload to a server, and wait for all responses.

    `http_url` is like `http://host:8000`, `grpc_url` like `host:8001`. Each is needed if a tenant uses it. `inputs` has
    samples by model. Other samples are from the zoo, or random by the metadata of the model. `on_tick` is called every
    `tick_s` on the loop: keep it short. Setting `stop` ends sending early. With `check`, each sample is sent alone
    beforehand, and a response that differs from that one counts as failed.

    Raises LoadError when the server or a model cannot be used.
    """
    raise_open_file_limit()
    pool = HttpPool(http_url) if http_url is not None else None
    tenants: list[_Tenant] = []
    try:
        for load in workload.tenants:
            tenants.append(await _prepare(load, workload.seed, pool, grpc_url, inputs or {}, check))  # noqa: PERF401 (closed below)
        run, before = _Run(workload, tenants), await _core_time(pool)
        await run.go(on_tick, tick_s, stop or asyncio.Event())
        after = await _core_time(pool)
    finally:
        for tenant in tenants:
            await tenant.client.close()
        if pool is not None:
            pool.close()
    return run.result(tuple(url for url in (http_url, grpc_url) if url), before, after)


async def _core_time(pool: HttpPool | None) -> CoreTime | None:
    """What the server tells of the time of its cores; None where it tells nothing."""
    try:
        page = (await pool.request(pool.prepare("GET", "/metrics"), _METRICS_S)).body.decode() if pool else ""
    except (OSError, ValueError):  # TimeoutError is an OSError
        return None
    found = dict(_CORE_TIMES.findall(page))
    return CoreTime(*(float(found[name]) for name in _CORE_METRICS)) if len(found) == len(_CORE_METRICS) else None


class _Tenant:
    """State of one tenant during a run."""

    def __init__(self, load: TenantLoad, slo_ns: int, client: Client, requests: int) -> None:
        self.load = load
        self.slo_ns = slo_ns
        self.limit_ns = LIMIT_SLOS * slo_ns + LIMIT_NS
        self.client = client
        self.requests = requests
        self.sent = 0
        self.in_flight = 0
        self.counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.recent_ns: deque[int] = deque(maxlen=_RECENT)
        self.reasons: defaultdict[Outcome, Counter[str]] = defaultdict(Counter)
        self.wrong = 0

    def note(self, outcome: Outcome, reason: str) -> None:
        # Numbers differ between queries: without them equal reasons have equal texts.
        masked = re.sub(r"\d+(\.\d+)?", "N", reason)[:200]
        reasons = self.reasons[outcome]
        if masked in reasons or len(reasons) < _REASONS:
            reasons[masked] += 1
        else:
            reasons["(other reasons)"] += 1

    def live(self, counted_s: float) -> TenantLive:
        recent = list(self.recent_ns)
        return TenantLive(
            name=self.load.name,
            slo_ns=self.slo_ns,
            sent=self.sent,
            in_flight=self.in_flight,
            counts=dict(self.counts),
            p50_ns=percentile_ns(recent, 50),
            p99_ns=percentile_ns(recent, 99),
            goodput_per_s=self.counts[Outcome.ANSWERED] / counted_s if counted_s > 0 else 0.0,
            timeout_ns=self.load.timeout_ns,
        )


async def _prepare(
    load: TenantLoad,
    seed: int,
    http: HttpPool | None,
    grpc_url: str | None,
    inputs: Inputs,
    check: bool,
) -> _Tenant:
    """Find the SLO and the samples of a tenant, and encode its requests; with `check`, send each once."""
    if load.protocol == "http" and http is None:
        raise LoadError(f"tenant {load.name!r} uses HTTP, but no HTTP address was given")
    if load.protocol == "grpc" and grpc_url is None:
        raise LoadError(f"tenant {load.name!r} uses gRPC, but no gRPC address was given")
    info: ModelInfo | None = None
    if load.slo_ns is None or load.model not in inputs:
        if http is not None:
            info = await describe_http(http, load.model)
        elif grpc_url is not None:
            info = await describe_grpc(grpc_url, load.model)
    slo_ns = slo_of(load, info)
    pool: Sequence[Sample]
    if load.model in inputs:
        pool = inputs[load.model]
        if not pool:
            raise LoadError(f"tenant {load.name!r}: inputs for model {load.model!r} are empty, expected some samples")
    else:
        assert info is not None
        pool = sample_pool(load, info, np.random.default_rng((seed, len(load.name), *load.name.encode())), POOL)
    parameters: dict[str, int] = {}
    if load.timeout_ns is not None:
        parameters["timeout"] = max(1, load.timeout_ns // 1000)
    if load.priority:
        parameters["priority"] = load.priority
    client = _client(load, pool, parameters, http, grpc_url, AnswerCheck() if check else None)
    for number in range(len(pool) if check else 0):
        await _send_alone(load, client, number)
    return _Tenant(load, slo_ns, client, len(pool))


def _client(
    load: TenantLoad,
    pool: Sequence[Sample],
    parameters: Parameters,
    http: HttpPool | None,
    grpc_url: str | None,
    check: AnswerCheck | None,
) -> Client:
    if load.protocol == "grpc":
        return GrpcClient(grpc_url or "", [grpc_request(load.model, sample, parameters) for sample in pool], check)
    assert http is not None
    return HttpClient(http, load.model, [http_request(sample, parameters) for sample in pool], check)


async def _send_alone(load: TenantLoad, client: Client, number: int) -> None:
    """Send a sample while no other query is pending. Raises LoadError if it fails several times."""
    for _ in range(_TRIES):
        reply = await client.send(number, LIMIT_NS / 1e9)
        if reply.outcome is None:
            return
    raise LoadError(f"tenant {load.name!r}: a sample failed alone, so responses cannot be checked: {reply.reason}")


class _Run:
    """One run: schedule, pending queries, and outcomes."""

    def __init__(self, workload: Workload, tenants: Sequence[_Tenant]) -> None:
        self._workload = workload
        self._tenants = tenants
        self._blocks = list(arrival_blocks(workload))
        self._log = OutcomeLog(tenant.load.name for tenant in tenants)
        self._lags_ns = array("q")
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_ns = 0
        self._sent_until_ns = workload.duration_ns
        self._sending = True
        self._started_at = ""

    async def go(self, on_tick: Callable[[LiveStats], None] | None, tick_s: float, stop: asyncio.Event) -> None:
        """Send all queries, then wait for all responses."""
        loop = asyncio.get_running_loop()
        timer = PreciseTimer(loop)
        self._start_ns = time.monotonic_ns() + LEAD_IN_NS
        self._started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        helpers = [loop.create_task(_interrupt_on(stop, timer))]
        if on_tick is not None:
            helpers.append(loop.create_task(self._tick(on_tick, tick_s)))
        try:
            await self._send_all(timer, stop)
            self._sending = False
            while self._tasks:
                await asyncio.wait(self._tasks)
            if on_tick is not None:
                on_tick(self._live())
        finally:
            for task in (*helpers, *self._tasks):
                task.cancel()
            for helper in helpers:
                with suppress(asyncio.CancelledError):
                    await helper
            timer.close()

    async def _send_all(self, timer: PreciseTimer, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        burst = 0
        for time_ns, index, seq in self._schedule():
            due_ns = self._start_ns + time_ns
            if due_ns > time.monotonic_ns():
                await timer.wait_until(due_ns)
                burst = 0
            elif (burst := burst + 1) % _BURST == 0:
                await asyncio.sleep(0)
            if stop.is_set():
                elapsed_ns = time.monotonic_ns() - self._start_ns
                self._sent_until_ns = max(0, min(elapsed_ns, time_ns, self._workload.duration_ns))
                return
            task = loop.create_task(self._query(self._tenants[index], time_ns, seq))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await timer.wait_until(self._start_ns + self._workload.duration_ns)
        if stop.is_set():
            elapsed_ns = time.monotonic_ns() - self._start_ns
            self._sent_until_ns = max(0, min(elapsed_ns, self._workload.duration_ns))

    def _schedule(self) -> Iterator[tuple[int, int, int]]:
        for block in self._blocks:
            for at in range(
                0, block.time_ns.size, 256
            ):  # in small steps, since conversion to Python integers blocks the loop
                part = slice(at, at + 256)
                yield from zip(
                    block.time_ns[part].tolist(), block.tenant[part].tolist(), block.seq[part].tolist(), strict=True
                )

    async def _query(self, tenant: _Tenant, scheduled_ns: int, seq: int) -> None:
        counted = scheduled_ns >= self._workload.warmup_ns
        tenant.sent += counted
        tenant.in_flight += 1
        lag_ns = time.monotonic_ns() - self._start_ns - scheduled_ns
        self._lags_ns.append(lag_ns)
        timeout_s = max(0.001, (tenant.limit_ns - lag_ns) / 1e9)
        try:
            reply = await tenant.client.send(seq % tenant.requests, timeout_s)
        except Exception as error:
            # Each query has one outcome, even after an error of the client library.
            reply = Reply(Outcome.FAILED, f"{type(error).__name__}: {error}")
        ended_ns = time.monotonic_ns() - self._start_ns
        latency_ns = ended_ns - scheduled_ns
        outcome = reply.outcome
        if outcome is None:
            outcome = Outcome.ANSWERED if latency_ns <= tenant.slo_ns else Outcome.LATE
        else:
            tenant.note(outcome, reply.reason)
            tenant.wrong += reply.is_wrong
        tenant.in_flight -= 1
        self._log.add(tenant.load.name, scheduled_ns, ended_ns, outcome)
        if counted:
            tenant.counts[outcome] += 1
            if outcome in ANSWERS:
                tenant.recent_ns.append(latency_ns)

    async def _tick(self, on_tick: Callable[[LiveStats], None], tick_s: float) -> None:
        while True:
            await asyncio.sleep(tick_s)
            on_tick(self._live())

    def _live(self) -> LiveStats:
        elapsed_ns = max(0, time.monotonic_ns() - self._start_ns)
        counted_s = (min(elapsed_ns, self._sent_until_ns) - self._workload.warmup_ns) / 1e9
        return LiveStats(
            elapsed_ns=elapsed_ns,
            duration_ns=self._workload.duration_ns,
            tenants=tuple(tenant.live(counted_s) for tenant in self._tenants),
            lag_p99_ns=percentile_ns(self._lags_ns[-_RECENT:], 99) or 0,
            sending=self._sending,
        )

    def result(self, servers: tuple[str, ...], before: CoreTime | None, after: CoreTime | None) -> LoadResult:
        """Result of the finished run."""
        return LoadResult(
            tenants=tuple(
                TenantInfo(
                    name=tenant.load.name,
                    model=tenant.load.model,
                    protocol=tenant.load.protocol,
                    slo_ns=tenant.slo_ns,
                    mean_rate=tenant.load.process.mean_rate,
                    items=tenant.load.items,
                    shape=tenant.load.shape,
                    reasons={outcome.value: dict(said.most_common()) for outcome, said in tenant.reasons.items()},
                    wrong_answers=tenant.wrong,
                    timeout_ns=tenant.load.timeout_ns,
                )
                for tenant in self._tenants
            ),
            log=self._log,
            duration_ns=self._workload.duration_ns,
            warmup_ns=self._workload.warmup_ns,
            sent_until_ns=self._sent_until_ns,
            seed=self._workload.seed,
            started_at=self._started_at,
            lag=Lag.of(self._lags_ns),
            servers=servers,
            others_share=others_share(before, after) if before and after and self._is_long else None,
        )

    @property
    def _is_long(self) -> bool:
        return self._sent_until_ns >= LEAST_RUN_S * 1e9


async def _interrupt_on(stop: asyncio.Event, timer: PreciseTimer) -> None:
    await stop.wait()
    timer.interrupt()
