"""Measures what a server needs for a request besides the model: real requests to a real server, by each protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from cotenant.config import ServerConfig
from cotenant.errors import CotenantError
from cotenant.linux import IS_LINUX
from cotenant.load.clients import Client, GrpcClient, HttpClient
from cotenant.load.generator import run_load
from cotenant.load.http import HttpPool
from cotenant.profiles.profile_file import Profile, save_profile
from cotenant.profiles.server_cost import (
    ENGINE,
    FRONT_END,
    GRPC,
    HTTP,
    JSON,
    PROCESSES,
    PROTOCOLS,
    WORKER,
    ProcessCost,
    RateFactors,
    RequestCost,
    ServerCost,
)
from cotenant.repository import profile_path
from cotenant.serve.processor_time import ProcessorTime
from cotenant.serve.server_process import RunningServer, running
from cotenant.types import Outcome
from cotenant.wire.encode import grpc_request, http_request
from cotenant.workload import TenantLoad, Uniform, Workload

if TYPE_CHECKING:
    from cotenant.measure.campaign import OnStep

SMALL, LARGE = 16, 150_000
"""Numbers (FP32) in a small and in a large tensor: 64 bytes and 600 kB."""
_SINGLE, _MERGED, _READ, _WRITE = "single", "merged", "read", "write"
_MODELS = {_SINGLE: (1, SMALL, SMALL), _MERGED: (8, SMALL, SMALL), _READ: (1, LARGE, SMALL), _WRITE: (1, SMALL, LARGE)}
"""Models that do next to nothing, by name: most rows of a launch, numbers in, numbers out."""
_IN_FLIGHT, _MANY = 8, 32
_REQUESTS, _ALONE, _LARGE_REQUESTS = 1500, 300, 60
_WARM_UP = 200
_TIMEOUT_S = 30.0
_HASTY = {"timeout": 1}
"""Parameters of requests that are refused: one microsecond to the deadline."""
_REFUSED = (Outcome.REJECTED, Outcome.DROPPED)
_SIZE_KIB = (LARGE - SMALL) * 4 / 1024
_log = logging.getLogger("cotenant.profile")
_RATES_PER_S, _RATE_S = (250.0, 1000.0, 4000.0), 2.0
STEPS = 4 * len(PROTOCOLS) + 1 + len(_RATES_PER_S)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Mean of a request: processor time by process, launches, time of the model and latency, times in ns."""

    cpu_ns: Mapping[str, float]
    launches: float
    model_ns: float
    latency_ns: float


def measure_server_cost(settings: ServerConfig, on_step: OnStep) -> ServerCost:
    """Measure the cost of requests on this machine with the front-end processes and the isolation of `settings`.

    Starts a server of small models on free ports, for about 15 s. Raises CotenantError when it cannot be started or
    does not answer.
    """
    with TemporaryDirectory(prefix="cotenant-cost-") as name, ExitStack() as stack:
        root = Path(name) / "models"
        for model, (max_batch, taken, given) in _MODELS.items():
            _write(root / model, max_batch, taken, given)
        options = ("--set", f'device.isolation="{settings.device.isolation}"')
        front_ends = settings.server.frontends
        words = "serve", str(root), "--frontends", str(front_ends), "--policy", "edf", *options
        server = stack.enter_context(running(*words, log=Path(name) / "log"))
        return asyncio.run(_measured(server, front_ends, on_step))


def with_server_cost(root: Path, settings: ServerConfig, profile: Profile, on_step: OnStep) -> Profile:
    """The profile of a repository with the cost of requests to a server of these settings, measured if it is missing.

    The result is saved. Where nothing can be measured, the log says so, and the profile is as before.
    """
    if not IS_LINUX or (profile.server is not UNSET and profile.server.front_ends == settings.server.frontends):
        return profile
    try:
        profile = replace(profile, server=measure_server_cost(settings, on_step))
    except CotenantError as error:
        _log.warning("the cost of requests is not measured: %s", error)
        return profile
    save_profile(profile_path(root), profile)
    return profile


def _write(folder: Path, max_batch: int, taken: int, given: int) -> None:
    from cotenant.zoo.graph import GraphWriter

    folder.mkdir(parents=True)
    config = f"[tenant]\nslo_ms = 10000\n[model]\nmax_batch = {max_batch}\n[[model.shapes]]\nx = [1, {taken}]\n"
    (folder / "config.toml").write_text(config, encoding="utf-8")
    graph = GraphWriter(folder.name)
    value = graph.input("x", np.float32, ("batch", taken))
    if given < taken:
        value = graph.op("Slice", [value, graph.int64(0), graph.int64(given), graph.int64(1)], "first")
    elif given > taken:
        value = graph.op("Tile", [value, graph.int64(1, given // taken)], "repeated")
    graph.output("y", ("batch", given), value)
    graph.write(folder / "1" / "model.onnx", {})


async def _measured(server: RunningServer, front_ends: int, on_step: OnStep) -> ServerCost:
    pool = HttpPool(server.http_url)
    used = ProcessorTime(server.process.pid)
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        on_step(done, STEPS, f"server: {what}")

    async def spent(
        protocol: str, model: str, count: int, in_flight: int = _IN_FLIGHT, *, refused: bool = False
    ) -> _Spent:
        client = _client(protocol, server, pool, model, _HASTY if refused else {})
        await _send(client, min(_WARM_UP, count), in_flight, refused=refused)
        found = await spent_by(lambda: _send(client, count, in_flight, refused=refused), count)
        await client.close()
        return found

    async def spent_by(send: Callable[[], Awaitable[object]], count: int) -> _Spent:
        before, seconds = await _counted(pool), used.seconds()
        await send()
        later, after = used.seconds(), await _counted(pool)
        cpu = {process: (later[process] - seconds[process]) * 1e9 / count for process in PROCESSES}
        return _Spent(cpu, *((new - old) / count for old, new in zip(before, after, strict=True)))

    async def spent_at(rate_per_s: float) -> _Spent:
        count = max(1, round(rate_per_s * _RATE_S))
        load = TenantLoad("load", _MERGED, Uniform(rate_per_s))
        workload = Workload((load,), round(_RATE_S * 1e9))
        return await spent_by(lambda: run_load(workload, http_url=server.http_url), count)

    try:
        requests = {}
        single: dict[str, _Spent] = {}
        for protocol in PROTOCOLS:
            small = single[protocol] = await spent(protocol, _SINGLE, _REQUESTS)
            alone = await spent(protocol, _SINGLE, _ALONE, 1)
            step(f"{protocol}, {_REQUESTS} requests of {SMALL * 4} bytes")
            read = await spent(protocol, _READ, _LARGE_REQUESTS, 1)
            step(f"{protocol}, {_LARGE_REQUESTS} requests of {LARGE * 4 // 1000} kB")
            write = await spent(protocol, _WRITE, _LARGE_REQUESTS, 1)
            step(f"{protocol}, {_LARGE_REQUESTS} answers of {LARGE * 4 // 1000} kB")
            refused = await spent(protocol, _SINGLE, _REQUESTS // 2, refused=True)
            step(f"{protocol}, {_REQUESTS // 2} requests that are refused")
            model_ns = alone.model_ns
            requests[protocol] = _cost(small, alone, read, write, refused)
        begun_s = time.monotonic()
        merged = await spent(HTTP, _MERGED, _REQUESTS, _MANY)
        by_rate = {(_REQUESTS + _WARM_UP) / (time.monotonic() - begun_s): merged}
        step("launches of several requests")
        for rate in _RATES_PER_S:
            by_rate[rate] = await spent_at(rate)
            step(f"{rate:g} requests/s")
    finally:
        pool.close()
    cost = _with_launches(front_ends, requests, single[HTTP], merged, model_ns)
    return replace(cost, by_rate=tuple(_factors(cost, rate, seen, model_ns) for rate, seen in sorted(by_rate.items())))


def _client(protocol: str, server: RunningServer, pool: HttpPool, model: str, parameters: Mapping[str, int]) -> Client:
    """A client that sends one request to a model again and again."""
    inputs = {"x": np.ones((1, _MODELS[model][1]), np.float32)}
    if protocol == GRPC:
        return GrpcClient(server.grpc_url, [grpc_request(model, inputs, parameters)])
    if protocol == JSON:
        tensors = [
            {"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
            for name, array in inputs.items()
        ]
        body = json.dumps({"inputs": tensors, "parameters": dict(parameters)}).encode()
        return HttpClient(pool, model, [(body, {"Content-Type": "application/json"})])
    return HttpClient(pool, model, [http_request(inputs, parameters)])


async def _send(client: Client, count: int, in_flight: int, *, refused: bool) -> None:
    """Send requests, so many at a time. Raises CotenantError when one has another ending than expected."""
    left = iter(range(count))

    async def send_some() -> None:
        for _ in left:
            reply = await client.send(0, _TIMEOUT_S)
            if reply.outcome not in (_REFUSED if refused else (None,)):
                raise CotenantError(f"the server that is measured gave another answer than expected: {reply}")

    await asyncio.gather(*(send_some() for _ in range(in_flight)))


async def _counted(pool: HttpPool) -> tuple[float, float, float]:
    """Launches of all models so far, and the time of models and the latency of all requests, in ns."""
    page = (await pool.request(pool.prepare("GET", "/metrics"), _TIMEOUT_S)).body.decode()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE))

    model_ns = total("nv_inference_compute_infer_duration_us") * 1e3
    return total("nv_inference_exec_count"), model_ns, total("cotenant_latency_seconds_sum") * 1e9


def _cost(small: _Spent, alone: _Spent, read: _Spent, write: _Spent, refused: _Spent) -> RequestCost:
    """The cost of requests of one protocol, launches included.

    The time of a model is that of runs with one request in flight: then it is processor time.
    """

    def process(name: str) -> ProcessCost:
        models = [alone, alone, read, write] if name == WORKER else []
        busy, base, *large = (
            max(0.0, each.cpu_ns[name] - (model.model_ns if model else 0.0))
            for each, model in zip_longest((small, alone, read, write), models)
        )
        return ProcessCost(round(busy), *(round(max(0.0, each - base) / _SIZE_KIB, 2) for each in large))

    return RequestCost(
        process(FRONT_END),
        process(ENGINE),
        process(WORKER),
        refused_front_end_ns=round(refused.cpu_ns[FRONT_END]),
        refused_engine_ns=round(refused.cpu_ns[ENGINE]),
        alone_ns=round(max(0.0, alone.latency_ns - alone.model_ns)),
    )


def _with_launches(
    front_ends: int, requests: Mapping[str, RequestCost], single: _Spent, merged: _Spent, model_ns: float
) -> ServerCost:
    """Divide the cost of engine and worker between requests and launches, by runs with more and fewer launches.

    `model_ns`: time of the model in a launch.
    """
    fewer = max(single.launches - merged.launches, 1e-9)

    def of_launch(name: str) -> int:
        spent_ns = (single.cpu_ns[name] - merged.cpu_ns[name]) / fewer
        return round(max(0.0, spent_ns - (model_ns if name == WORKER else 0.0)))

    engine_ns, worker_ns = of_launch(ENGINE), of_launch(WORKER)

    def less(cost: ProcessCost, ns: int) -> ProcessCost:
        return replace(cost, ns=max(0, cost.ns - ns))

    found = {
        name: replace(each, engine=less(each.engine, engine_ns), worker=less(each.worker, worker_ns))
        for name, each in requests.items()
    }
    return ServerCost(front_ends, found, engine_ns, worker_ns)


def _factors(cost: ServerCost, rate_per_s: float, seen: _Spent, model_ns: float) -> RateFactors:
    """Processor times of small requests at a rate over those of the busy runs, launches included."""
    launches = {FRONT_END: 0, ENGINE: cost.launch_engine_ns, WORKER: cost.launch_worker_ns}
    found = {}
    for process, launch_ns in launches.items():
        expected = getattr(cost.requests[HTTP], process).ns + seen.launches * launch_ns
        spent = seen.cpu_ns[process] - (seen.launches * model_ns if process == WORKER else 0.0)
        found[process] = round(max(0.0, spent) / expected, 3) if expected else 1.0
    return RateFactors(round(rate_per_s, 1), **found)
