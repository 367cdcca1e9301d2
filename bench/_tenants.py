"""Tenants under load for benchmarks: models prepared and sampled, servers to send to, and what they can do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench._disturbed import core_time, disturbed
from bench._registry import BenchError
from bench._server import serving
from cotenant.config import NS_PER_MS, load_model_config, load_server_config
from cotenant.load import run_load_process
from cotenant.load.clients import HttpClient, Reply
from cotenant.load.http import HttpPool
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import Profile
from cotenant.repository import SERVER_FILE
from cotenant.wire.encode import http_request
from cotenant.workload import Poisson, TenantLoad, Workload
from cotenant.zoo import build_repository, sample_inputs
from cotenant.zoo.catalogue import ENTRIES

SATURATE_S, QUICK_SATURATE_S = 10.0, 2.0
SATURATIONS, QUICK_SATURATIONS = 3, 2
INSIDE = 16
"""Queries always inside while capacity is measured: enough that no core waits for the client."""
SAMPLES = 4
"""Different inputs per tenant."""
QUICK_EFFORT = Effort(budget_s=0.05, min_runs=3)
WARM_UPS = 3
"""Queries of each model before anything is measured."""
ALONE_MS = {
    "ocr_detection": (21.0, 47.0, 107.0),
    "ocr_orientation": (0.9,),
    "ocr_recognition": (20.0, 52.0, 87.0),
    "magika": (6.4,),
    "silero_vad": (0.09,),
    "minilm": (5.8, 24.0),
    "resnet50": (55.0,),
}
"""Latency alone on one core of the machine that the SLOs of the quick start were chosen on, at each declared shape
(docs/models.md)."""
LEAST_SLO_MS = 20
"""SLO of models that take next to nothing (docs/models.md)."""
_SAMPLE_TRIES = 64
_PATIENCE_S = 60.0

Inputs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of serving. `start` gives the URL of a fresh server; `prefix` stands before its models' names."""

    name: str
    about: str
    start: Callable[[], AbstractContextManager[str]]
    prefix: str = ""


def prepare(
    root: Path, models: Sequence[str], server: str, quick: bool, shape: int = 0
) -> tuple[Path, dict[str, float]]:
    """Quick-start models profiled at the one shape that is sent, afresh in a full run; the core time of one query.

    `server` is the configuration of the server, `shape` numbers the declared shape as an index does. The SLOs are those
    of the quick start, times what the models take here over what they took where these were chosen.
    """
    build_repository(root, models=models)
    for model in models:
        path = root / model / "config.toml"
        head, *shapes = path.read_text(encoding="utf-8").split("[[model.shapes]]")
        if len(shapes) > 1:
            tail = shapes[-1].partition("[segments]")[2]
            path.write_text(f"{head}[[model.shapes]]{shapes[shape].partition('[segments]')[0]}[segments]{tail}")
    (root / SERVER_FILE).write_text(server, encoding="utf-8")
    service_ns = core_times(root, models, quick)
    for model, slo_ms in scaled_slos_ms(service_ns, shape).items():
        set_slo(root, model, slo_ms)
    return root, service_ns


def scaled_slos_ms(service_ns: Mapping[str, float], shape: int = 0) -> dict[str, int]:
    """SLOs of the quick start, scaled to the models' latencies alone on one core here, at a declared shape.

    The smallest SLOs do not depend on the models, and stay.
    """
    usual = {model: ENTRIES[model].slo_ms for model in service_ns}
    return {
        model: max(1, round(slo_ms * service_ns[model] / NS_PER_MS / ALONE_MS[model][shape]))
        if slo_ms > LEAST_SLO_MS
        else slo_ms
        for model, slo_ms in usual.items()
    }


def set_slo(root: Path, model: str, slo_ms: int) -> None:
    """Give a model of a repository another SLO."""
    path = root / model / "config.toml"
    text = re.sub(r"(?m)^slo_ms = \d+", f"slo_ms = {slo_ms}", path.read_text(encoding="utf-8"), count=1)
    path.write_text(text, encoding="utf-8")


def core_times(root: Path, models: Sequence[str], quick: bool) -> dict[str, float]:
    """Profile a repository, afresh in a full run; the core time in ns of one query of each model at its first shape."""
    profile = profiled(root, QUICK_EFFORT if quick else Effort(), fresh=not quick)
    service = {}
    for model in models:
        points = [point for point in profile.models[model].points if point.items == 1 and point.shape == 0]
        service[model] = float(min(point.p50_ns * point.cores for point in points))
    return service


def profiled(root: Path, effort: Effort, *, fresh: bool = True) -> Profile:
    """Profile all models of a repository, without a word. Raises BenchError when one cannot be."""
    settings = load_server_config(root / SERVER_FILE)
    profile, errors = profile_repository(root, settings, effort, fresh=fresh, on_step=lambda *_: None)
    if errors:
        raise BenchError(f"cannot be profiled: {errors}")
    return profile


def sample_all(root: Path, models: Sequence[str]) -> Inputs:
    """Samples of the declared shape, the same for every contender."""
    found: Inputs = {}
    for model in models:
        rng = np.random.default_rng((1, *model.encode()))
        shape = load_model_config(root / model / "config.toml").model.shapes[0]
        samples = []
        for _ in range(_SAMPLE_TRIES * SAMPLES):
            sample = sample_inputs(model, rng)
            if all(sample[name].shape == dims for name, dims in shape.items()):
                samples.append(sample)
            if len(samples) == SAMPLES:
                break
        else:
            raise BenchError(f"the zoo gave too few samples of {model} at shape {shape}")
        found[model] = samples
    return found


def workload(
    root: Path, prefix: str, rates: Mapping[str, float], seed: int, seconds: float, warm_up_s: float
) -> Workload:
    """Poisson arrivals at `rates`, with the SLOs of the repository, for `seconds` after warming up."""
    tenants = []
    for model, rate in rates.items():
        slo_ms = load_model_config(root / model / "config.toml").tenant.slo_ms
        tenants.append(TenantLoad(model, prefix + model, Poisson(rate), slo_ns=round(slo_ms * NS_PER_MS)))
    duration_ns = round((seconds + warm_up_s) * 1e9)
    return Workload(tuple(tenants), duration_ns, seed=seed, warmup_ns=round(warm_up_s * 1e9))


def send_load(
    root: Path,
    contender: Contender,
    url: str,
    rates: Mapping[str, float],
    inputs: Inputs,
    seed: int,
    seconds: float,
    warm_up_s: float,
) -> dict[str, Any]:
    """Send Poisson arrivals at `rates` to a contender that is up; what became of them, as a row of results."""
    load = workload(root, contender.prefix, rates, seed, seconds, warm_up_s)
    named = {contender.prefix + model: samples for model, samples in inputs.items()}
    before = core_time()
    result = run_load_process(load, http_url=url, inputs=named)
    total = result.summary.total
    return {
        "contender": contender.name,
        "offered_per_s": total.offered_per_s,
        "attainment": total.attainment or 0.0,
        "goodput_per_s": total.goodput_per_s,
        "late": total.late / max(1, total.answered + total.late),
        "p99_ms": total.p99_ms,
        "failed": total.failed,
        "send_lag_p99_ms": result.lag.p99_ns / 1e6,
        **disturbed(before),
        **{f"attainment_{each.tenant}": each.attainment for each in result.summary.tenants},
    }


def ours(name: str, root: Path, *options: str) -> Contender:
    """A fresh `cotenant serve` with these options."""

    @contextmanager
    def start() -> Iterator[str]:
        with serving(root, *options) as server:
            yield server.http_url

    return Contender(name, " ".join(options), start)


def saturation(contender: Contender, mix: Mapping[str, float], inputs: Inputs, quick: bool) -> float:
    """Queries/s of the mix in a closed loop: the most of several windows, since others can only lower it."""
    seconds = QUICK_SATURATE_S if quick else SATURATE_S
    with contender.start() as url:
        asyncio.run(warm_up(url, contender.prefix, inputs))
        windows = [
            uvloop.run(closed_loop(url, contender.prefix, mix, inputs, seconds))
            for _ in range(QUICK_SATURATIONS if quick else SATURATIONS)
        ]
    return max(windows)


async def warm_up(url: str, prefix: str, inputs: Inputs, *, strict: bool = True) -> None:
    """Send WARM_UPS queries of each model, one after the other.

    Raises BenchError when one is not answered, unless `strict` is off: a server that drops may drop one here.
    """
    pool = HttpPool(url)
    try:
        for client in clients(pool, prefix, inputs).values():
            for _ in range(WARM_UPS):
                reply = await client.send(0, _PATIENCE_S)
                if strict:
                    _expect(reply)
    finally:
        pool.close()


async def closed_loop(url: str, prefix: str, mix: Mapping[str, float], inputs: Inputs, seconds: float) -> float:
    """Queries a second that are answered while INSIDE queries, drawn from the mix, are always inside."""
    rng = np.random.default_rng(0)
    names = list(mix)
    pool = HttpPool(url)
    by_model = clients(pool, prefix, inputs)
    began = time.monotonic()
    answered = 0

    async def caller() -> None:
        nonlocal answered
        while time.monotonic() - began < seconds:
            model = names[rng.choice(len(names), p=list(mix.values()))]
            _expect(await by_model[model].send(int(rng.integers(SAMPLES)), _PATIENCE_S))
            if time.monotonic() - began < seconds:
                answered += 1

    try:
        await asyncio.gather(*(caller() for _ in range(INSIDE)))
    finally:
        pool.close()
    return answered / seconds


def clients(pool: HttpPool, prefix: str, inputs: Inputs) -> dict[str, HttpClient]:
    """One client a model, over the connections of the pool."""
    return {
        model: HttpClient(pool, prefix + model, [http_request(sample, {}) for sample in samples])
        for model, samples in inputs.items()
    }


def _expect(reply: Reply) -> None:
    if reply.outcome is not None:
        raise BenchError(f"a query had no answer while nothing was at its limit: {reply.reason}")
