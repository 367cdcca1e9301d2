"""Goodput beyond capacity: four tenants under edf, fcfs and MLServer, at 1.2 and 2 times what the machine can do.

ResNet-50, MiniLM, text recognition and magika of the quick-start repository with its SLOs, one query a request, over
HTTP; open loop, Poisson arrivals, each tenant asking for the same share of work. All contenders run the same ONNX files
with onnxruntime, one thread a call and no spinning, and get the same clients, samples, arrivals and seeds, in turns.
Capacity is measured: the highest rate at which fcfs answers this mix in a closed loop (16 queries always inside) with
the client on the same cores, so it includes the front-end and the client. Attainment = answered within the SLO, as a
share of what was offered, all tenants together; the rows have each tenant's. docs/benchmarks.md says more.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench._registry import BenchError
from bench._server import cache_folder, serving
from bench.peers import mlserver_process as mlserver
from cotenant.config import NS_PER_MS, load_model_config, load_server_config
from cotenant.load import run_load_process
from cotenant.load.clients import HttpClient
from cotenant.load.encode import http_request
from cotenant.load.http import HttpPool
from cotenant.profile.measure import Effort
from cotenant.profile.sweep import profile_repository
from cotenant.repository import SERVER_FILE
from cotenant.types import Outcome
from cotenant.workload import Poisson, TenantLoad, Workload, for_capacity
from cotenant.zoo import build_repository, sample_inputs

MODELS = ("resnet50", "minilm", "ocr_recognition", "magika")
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
FACTORS, QUICK_FACTORS = (1.2, 2.0), (1.2,)
SECONDS, QUICK_SECONDS = 20.0, 5.0
WARM_UP_S, QUICK_WARM_UP_S = 3.0, 1.0
SATURATE_S, QUICK_SATURATE_S = 10.0, 2.0
SATURATIONS, QUICK_SATURATIONS = 3, 2
INSIDE = 16
"""Queries always inside while capacity is measured: enough that no core waits for the client."""
SAMPLES = 4
"""Different inputs per tenant."""
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


def run(quick: bool, data_dir: Path | None) -> dict[str, object]:
    """Measure. `data_dir` is not used; models and the peer's environment are kept in the user's cache folder."""
    console = Console()
    seeds, factors = (QUICK_SEEDS, QUICK_FACTORS) if quick else (SEEDS, FACTORS)
    root, service_ns = _repository(cache_folder() / "goodput", quick, "single")
    inputs = _inputs(root)
    share = for_capacity(service_ns, 1, 1.0)
    mix = {model: rate / sum(share.values()) for model, rate in share.items()}
    fcfs = _ours("fcfs", root, "--policy", "fcfs", "--drop", "none")
    contenders = [_ours("edf", root, "--policy", "edf", "--drop", "hopeless"), fcfs]
    capacity = _saturation(fcfs, mix, inputs, quick)
    console.print(f"capacity: {capacity:.1f} queries/s of the mix {_mix_text(mix)}")
    peer, peer_rows, missing = _peer(root, mix, inputs, quick)
    for row in peer_rows:
        console.print(f"mlserver, {row['contender']}: {row['saturation_per_s']:.1f} queries/s at saturation")
    contenders += peer
    if not quick:
        wide, _ = _repository(cache_folder() / "goodput-all", quick, "all")
        contenders.append(_ours("fcfs_drop", root, "--policy", "fcfs", "--drop", "hopeless"))
        contenders.append(_ours("sjf", root, "--policy", "sjf", "--drop", "hopeless"))
        contenders.append(
            _ours("edf_all", wide, "--policy", "edf", "--drop", "hopeless", "--lanes", "all")
        )  # one lane of all cores instead of a lane a core
    rows = [
        row
        for seed in seeds
        for factor in factors
        for row in _turn(contenders, root, mix, inputs, factor * capacity, factor, seed, quick)
    ]
    summary = _summary(rows, [each.name for each in contenders], factors, QUICK_SECONDS if quick else SECONDS)
    summary["capacity_per_s"] = capacity
    _show(console, rows, contenders, factors)
    if missing:
        console.print(missing)
    if quick:
        console.print(
            "quick: one seed, 5 s a run, a coarser profile; left out: load 2.0, fcfs with drops, sjf, edf on one lane"
        )
    versions = mlserver.packages() if peer else {}
    return {"summary": summary, "rows": [*peer_rows, *rows], "seeds": seeds, "versions": versions}


# --- models and load --------------------------------------------------------------------------------------------------


def _repository(root: Path, quick: bool, lanes: str) -> tuple[Path, dict[str, float]]:
    """The four models, profiled at the one shape that is sent; a full run measures afresh. Core time of one query."""
    build_repository(root, models=MODELS)
    for model in MODELS:
        path = root / model / "config.toml"
        lines = path.read_text(encoding="utf-8").split("[[model.shapes]]")
        if len(lines) > 2:  # the first declared shape and what follows the last one
            tail = "\n[segments]" + lines[-1].split("[segments]")[1]
            path.write_text("[[model.shapes]]".join(lines[:2]) + tail, encoding="utf-8")
    (root / SERVER_FILE).write_text(f'[device]\nlanes = "{lanes}"\n', encoding="utf-8")
    settings = load_server_config(root / SERVER_FILE)
    effort = Effort(budget_s=0.05, min_runs=3) if quick else Effort()
    profile, errors = profile_repository(root, settings, effort, fresh=not quick, on_step=lambda *_: None)
    if errors:
        raise BenchError(f"cannot be profiled: {errors}")
    service = {}
    for model in MODELS:
        points = [point for point in profile.models[model].points if point.items == 1]
        service[model] = float(min(point.p50_ns * point.cores for point in points))
    return root, service


def _inputs(root: Path) -> Inputs:
    """Samples of the declared shape, the same for every contender."""
    found: Inputs = {}
    for model in MODELS:
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


def _workload(root: Path, prefix: str, rates: Mapping[str, float], seed: int, quick: bool) -> Workload:
    seconds, warm_up_s = (QUICK_SECONDS, QUICK_WARM_UP_S) if quick else (SECONDS, WARM_UP_S)
    tenants = []
    for model, rate in rates.items():
        slo_ms = load_model_config(root / model / "config.toml").tenant.slo_ms
        tenants.append(TenantLoad(model, prefix + model, Poisson(rate), slo_ns=round(slo_ms * NS_PER_MS)))
    duration_ns = round((seconds + warm_up_s) * 1e9)
    return Workload(tuple(tenants), duration_ns, seed=seed, warmup_ns=round(warm_up_s * 1e9))


# --- contenders -------------------------------------------------------------------------------------------------------


def _ours(name: str, root: Path, *options: str) -> Contender:
    @contextmanager
    def start() -> Iterator[str]:
        with serving(root, *options) as server:
            yield server.http_url

    return Contender(name, " ".join(options), start)


def _peer(
    root: Path, mix: Mapping[str, float], inputs: Inputs, quick: bool
) -> tuple[list[Contender], list[dict[str, Any]], str]:
    """MLServer with the tuning that answers most at saturation, what the others did, and why it is missing if it is."""
    if quick and not mlserver.is_installed():
        return [], [], "quick: MLServer is left out, since it is not installed yet; a full run installs it"
    try:
        mlserver.install()
    except BenchError as error:
        return [], [], f"left out: {error}"
    models = {model: root / model / "1" / "model.onnx" for model in MODELS}

    def contender(tuning: mlserver.Tuning) -> Contender:
        return Contender("peer", f"MLServer, {tuning}", lambda: mlserver.serving(models, tuning), mlserver.MODEL_PREFIX)

    tunings = mlserver.tunings(len(os.sched_getaffinity(0)))
    if quick:
        return [contender(tunings[0])], [], ""
    found: list[tuple[float, mlserver.Tuning]] = []
    failed = ""
    for tuning in tunings:
        try:
            found.append((_saturation(contender(tuning), mix, inputs, quick), tuning))
        except BenchError as error:
            failed += f"MLServer with {tuning} is left out: {error}\n"
    rows = [{"contender": str(tuning), "saturation_per_s": rate} for rate, tuning in found]
    if not found:
        return [], rows, failed
    best = max(found, key=lambda each: each[0])[1]
    return [contender(best)], rows, failed


# --- measuring --------------------------------------------------------------------------------------------------------


def _turn(
    contenders: Sequence[Contender],
    root: Path,
    mix: Mapping[str, float],
    inputs: Inputs,
    rate: float,
    factor: float,
    seed: int,
    quick: bool,
) -> Iterator[dict[str, Any]]:
    """One run of each contender with the same arrivals; who begins changes from seed to seed."""
    rates = {model: rate * part for model, part in mix.items()}
    at = seed % len(contenders)
    for contender in (*contenders[at:], *contenders[:at]):
        workload = _workload(root, contender.prefix, rates, seed, quick)
        named = {contender.prefix + model: samples for model, samples in inputs.items()}
        with contender.start() as url:
            asyncio.run(_warm_up(url, contender.prefix, inputs))
            result = run_load_process(workload, http_url=url, inputs=named)
        total = result.summary.total
        yield {
            "contender": contender.name,
            "options": contender.about,
            "load": factor,
            "seed": seed,
            "offered_per_s": total.offered_per_s,
            "attainment": total.attainment,
            "mean_attainment": result.summary.mean_attainment,
            "goodput_per_s": total.goodput_per_s,
            "p99_ms": total.p99_ms,
            "send_lag_p99_ms": result.lag.p99_ns / 1e6,
            **{f"attainment_{tenant.tenant}": tenant.attainment for tenant in result.summary.tenants},
            "failed": total.failed,
        }


def _saturation(contender: Contender, mix: Mapping[str, float], inputs: Inputs, quick: bool) -> float:
    """Queries/s of the mix in a closed loop: the most of several windows, since others can only lower it."""
    seconds = QUICK_SATURATE_S if quick else SATURATE_S
    with contender.start() as url:
        asyncio.run(_warm_up(url, contender.prefix, inputs))
        windows = [
            uvloop.run(_closed_loop(url, contender.prefix, mix, inputs, seconds))
            for _ in range(QUICK_SATURATIONS if quick else SATURATIONS)
        ]
    return max(windows)


async def _warm_up(url: str, prefix: str, inputs: Inputs) -> None:
    pool = HttpPool(url)
    try:
        for client in _clients(pool, prefix, inputs).values():
            for _ in range(3):
                _expect(await client.send(0, _PATIENCE_S))
    finally:
        pool.close()


async def _closed_loop(url: str, prefix: str, mix: Mapping[str, float], inputs: Inputs, seconds: float) -> float:
    """Keep INSIDE queries inside, drawn from the mix."""
    rng = np.random.default_rng(0)
    names = list(mix)
    pool = HttpPool(url)
    clients = _clients(pool, prefix, inputs)
    began = time.monotonic()
    answered = 0

    async def caller() -> None:
        nonlocal answered
        while time.monotonic() - began < seconds:
            model = names[rng.choice(len(names), p=list(mix.values()))]
            _expect(await clients[model].send(int(rng.integers(SAMPLES)), _PATIENCE_S))
            if time.monotonic() - began < seconds:
                answered += 1

    try:
        await asyncio.gather(*(caller() for _ in range(INSIDE)))
    finally:
        pool.close()
    return answered / seconds


def _clients(pool: HttpPool, prefix: str, inputs: Inputs) -> dict[str, HttpClient]:
    return {
        model: HttpClient(pool, prefix + model, [http_request(sample, {}) for sample in samples])
        for model, samples in inputs.items()
    }


def _expect(reply: tuple[Outcome | None, str]) -> None:
    outcome, reason = reply
    if outcome is not None:
        raise BenchError(f"a query had no answer while nothing was at its limit: {reason}")


# --- results ----------------------------------------------------------------------------------------------------------


def _median(rows: Sequence[dict[str, Any]], contender: str, factor: float, key: str) -> float:
    """Over the seeds; nan where no run has a value (no query answered, say)."""
    values = [row[key] for row in rows if (row["contender"], row["load"]) == (contender, factor)]
    return statistics.median([value for value in values if value is not None] or [math.nan])


def _summary(
    rows: Sequence[dict[str, Any]], names: Sequence[str], factors: Sequence[float], seconds: float
) -> dict[str, float]:
    """Medians over the seeds. Who answered none in time counts as one query a run, so that a ratio is a lower bound."""
    least = 1.0 / seconds
    summary = {}
    for factor in factors:
        label = f"{factor:g}x".replace(".", "_")
        for name in names:
            summary[f"{name}_attainment_{label}"] = _median(rows, name, factor, "attainment")
        for other in ("fcfs", "peer"):
            if other in names:
                ours = _median(rows, "edf", factor, "goodput_per_s")
                theirs = _median(rows, other, factor, "goodput_per_s")
                summary[f"edf_over_{other}_goodput_{label}"] = ours / max(theirs, least)
    return summary


def _show(
    console: Console, rows: Sequence[dict[str, Any]], contenders: Sequence[Contender], factors: Sequence[float]
) -> None:
    table = Table("load", "contender", "attainment", "goodput/s", *MODELS, "p99 ms")
    table.title = "Answered within the SLO, as a share of what was offered; medians over the seeds"
    for factor in factors:
        for contender in contenders:
            keys = ["attainment", "goodput_per_s", *(f"attainment_{model}" for model in MODELS), "p99_ms"]
            values = [_median(rows, contender.name, factor, key) for key in keys]
            cells = [f"{values[0]:.3f}", f"{values[1]:.1f}", *(f"{v:.3f}" for v in values[2:-1]), f"{values[-1]:.0f}"]
            table.add_row(f"{factor:g} x", contender.name, *cells)
    console.print(table)
    for contender in contenders:
        console.print(f"{contender.name}: {contender.about}", highlight=False)


def _mix_text(mix: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {100 * part:.0f} %" for model, part in mix.items())
