"""Goodput beyond capacity: four tenants under edf, fcfs and MLServer, at 1.2 and 2 times what the machine can do.

The models are ResNet-50, MiniLM, text recognition and magika of the quick-start repository, one query a request, over
HTTP. Their SLOs are scaled to their latencies on this machine. Arrivals are open loop, Poisson; each tenant demands the
same share of work. All contenders run the same ONNX files with onnxruntime, one thread a call and no spinning. They
get the same clients, samples, arrivals and seeds, in turns.
Capacity is measured: the highest rate at which fcfs answers this mix in a closed loop (16 queries always inside). The
client is on the same cores, so it includes the front-end and the client. Attainment is the share of offered queries
that are answered within the SLO, all tenants together; the rows have each tenant's. docs/benchmarks.md says more.

A second part sets ResNet-50 and MiniLM (128 tokens) at 20 + 30 and 30 + 50 queries a second beside Triton. Triton runs
as it comes, and with dynamic batches and queues that reject. Of three such queues the one counts that answers most in
time at the lower rate. The rates are 1 and 1.6 times the capacity of two cores that take 55 and 30 ms for these models.
The rows have the ratio on this machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench._disturbed import core_time, disturbed, undisturbed
from bench._registry import BenchError
from bench._server import cache_folder
from bench._tenants import Contender, Inputs, ours, prepare, sample_all, saturation, warm_up, workload
from bench.peers import mlserver_process as mlserver
from bench.peers import triton_process as triton
from cotenant.config import NS_PER_MS, load_model_config
from cotenant.load import run_load_process
from cotenant.workload import for_capacity

MODELS = ("resnet50", "minilm", "ocr_recognition", "magika")
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
FACTORS, QUICK_FACTORS = (1.2, 2.0), (1.2,)
SECONDS, QUICK_SECONDS = 12.0, 5.0
WARM_UP_S, QUICK_WARM_UP_S = 2.0, 1.0
PAIR = ("resnet50", "minilm")
PAIR_RATES, QUICK_PAIR_RATES = ({"1x": (20.0, 30.0), "1_6x": (30.0, 50.0)}, {"1x": (20.0, 30.0)})
"""Queries a second of the pair."""
PAIR_METRICS = (
    ("over_triton_tuned", "shares", "triton_tuned"),
    ("edf_over_triton_tuned", "edf", "triton_tuned"),
    ("over_triton_default", "shares", "triton_default"),
)
"""The contender that is compared, and the one that it is compared with, by answers in time."""
_SERVER = '[device]\nlanes = "single"\n'


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models and the peer's environment are kept in the user's cache folder."""
    console = Console()
    seeds, factors = (QUICK_SEEDS, QUICK_FACTORS) if quick else (SEEDS, FACTORS)
    root, service_ns = prepare(cache_folder() / "goodput", MODELS, _SERVER, quick)
    inputs = sample_all(root, MODELS)
    share = for_capacity(service_ns, 1, 1.0)
    mix = {model: rate / sum(share.values()) for model, rate in share.items()}
    fcfs = ours("fcfs", root, "--policy", "fcfs", "--drop", "none")
    contenders = [ours("edf", root, "--policy", "edf", "--drop", "hopeless", "--no-tail-aware"), fcfs]
    capacity = saturation(fcfs, mix, inputs, quick)
    console.print(f"capacity: {capacity:.1f} queries/s of the mix {_mix_text(mix)}")
    peer, peer_rows, missing = _peer(root, mix, inputs, quick)
    for row in peer_rows:
        console.print(f"mlserver, {row['contender']}: {row['saturation_per_s']:.1f} queries/s at saturation")
    contenders += peer
    if not quick:
        contenders.append(ours("fcfs_drop", root, "--policy", "fcfs", "--drop", "hopeless"))
        contenders.append(ours("sjf", root, "--policy", "sjf", "--drop", "hopeless"))
        contenders.append(ours("edf_cautious", root, "--policy", "edf", "--drop", "hopeless", "--tail-aware"))
        contenders.append(ours("shares", root, "--policy", "shares", "--drop", "hopeless"))
    rows = [
        row
        for seed in seeds
        for factor in factors
        for row in _turn(contenders, root, mix, inputs, factor * capacity, factor, seed, quick)
    ]
    summary = _summary(rows, [each.name for each in contenders], factors, QUICK_SECONDS if quick else SECONDS)
    summary["capacity_per_s"] = capacity
    _show(console, rows, contenders, factors)
    pair_rows, absent = _beside_triton(console, seeds, quick)
    summary |= _pair_summary(pair_rows, QUICK_SECONDS if quick else SECONDS)
    for each in filter(None, (missing, absent)):
        console.print(each)
    if quick:
        console.print(
            "quick: one seed, 5 s a run, a coarser profile; left out: load 2.0, fcfs with drops, sjf, shares, and "
            "tail-aware edf; the higher rate beside Triton, Triton as it comes, and the choice of its queues"
        )
    versions = mlserver.ENVIRONMENT.versions("mlserver") if peer else {}
    versions |= triton.ENVIRONMENT.versions("nvidia-pytriton") if pair_rows else {}
    return {"summary": summary, "rows": [*peer_rows, *rows, *pair_rows], "seeds": seeds, "versions": versions}


# --- contenders -------------------------------------------------------------------------------------------------------


def _peer(
    root: Path, mix: Mapping[str, float], inputs: Inputs, quick: bool
) -> tuple[list[Contender], list[dict[str, Any]], str]:
    """MLServer with the tuning that answers most at saturation, what the others did, and why it is missing if it is."""
    if quick and not mlserver.ENVIRONMENT.is_installed:
        return [], [], "quick: MLServer is left out, since it is not installed yet; a full run installs it"
    try:
        mlserver.ENVIRONMENT.install()
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
            found.append((saturation(contender(tuning), mix, inputs, quick), tuning))
        except BenchError as error:
            failed += f"MLServer with {tuning} is left out: {error}\n"
    rows = [{"contender": str(tuning), "saturation_per_s": rate} for rate, tuning in found]
    if not found:
        return [], rows, failed
    best = max(found, key=lambda each: each[0])[1]
    return [contender(best)], rows, failed


# --- Triton -----------------------------------------------------------------------------------------------------------


def _beside_triton(console: Console, seeds: Sequence[int], quick: bool) -> tuple[list[dict[str, Any]], str]:
    """Runs of the pair at the largest shapes, all contenders in turns, and why Triton is missing if it is."""
    if quick and not triton.ENVIRONMENT.is_installed:
        return [], "quick: Triton is left out, since it is not installed yet; a full run installs it"
    try:
        triton.ENVIRONMENT.install()
    except BenchError as error:
        return [], f"Triton is left out: {error}"
    root, service_ns = prepare(cache_folder() / "goodput-pair", PAIR, _SERVER, quick, shape=-1)
    inputs = sample_all(root, PAIR)
    models = {}
    for model in PAIR:
        section = load_model_config(root / model / "config.toml")
        slo_ns = round(section.tenant.slo_ms * NS_PER_MS)
        path = root / model / "1" / "model.onnx"
        models[model] = triton.Served(path, section.model.max_batch, slo_ns, service_ns[model])

    def contender(name: str, tuning: triton.Tuning) -> Contender:
        @contextmanager
        def start() -> Iterator[str]:
            with triton.serving(models, tuning) as server:
                yield server.http_url

        return Contender(name, f"Triton, {tuning}", start)

    def turn(contenders: Sequence[Contender], at: str, seed: int) -> Iterator[dict[str, Any]]:
        rates = (QUICK_PAIR_RATES if quick else PAIR_RATES)[at]
        mix = dict(zip(PAIR, rates, strict=True))
        asked = sum(rate * service_ns[model] / 1e9 for model, rate in mix.items()) / len(os.sched_getaffinity(0))
        for row in _turn(contenders, root, mix, inputs, 1.0, 0.0, seed, quick):
            yield row | {"load": f"{rates[0]:g} + {rates[1]:g}", "pair": at, "asked_of_cores": asked}

    try:
        tuned = [contender(str(tuning), tuning) for tuning in (triton.TUNED[1:2] if quick else triton.TUNED)]
        tried = list(turn(tuned, "1x", 0)) if len(tuned) > 1 else []
    except BenchError as error:
        return [], f"Triton is left out: {error}"
    best = max(tried, key=lambda row: row["goodput_per_s"])["contender"] if tried else tuned[0].name
    tuning = next(each for each in triton.TUNED if str(each) == best)
    contenders = [
        ours("shares", root, "--policy", "shares", "--drop", "hopeless"),
        contender("triton_tuned", tuning),
    ]
    if not quick:
        contenders.append(ours("edf", root, "--policy", "edf", "--drop", "hopeless"))
        contenders.append(contender("triton_default", triton.Tuning()))
    rows = [
        row
        for seed in seeds
        for at in (QUICK_PAIR_RATES if quick else PAIR_RATES)
        for row in turn(contenders, at, seed)
    ]
    table = Table("queries/s", "contender", "attainment", "goodput/s", *PAIR, "p99 ms")
    table.title = "ResNet-50 and MiniLM beside Triton; medians over the seeds"
    for at, name in dict.fromkeys((row["pair"], row["contender"]) for row in rows):
        keys = ("attainment", "goodput_per_s", *(f"attainment_{model}" for model in PAIR), "p99_ms")
        values = [_median(rows, name, at, key, "pair") for key in keys]
        load = next(row["load"] for row in rows if row["pair"] == at)
        cells = [f"{values[0]:.3f}", f"{values[1]:.1f}", *(f"{value:.3f}" for value in values[2:4]), f"{values[4]:.0f}"]
        table.add_row(load, name, *cells)
    console.print(table)
    slos = ", ".join(f"{model} {each.slo_ns / NS_PER_MS:g} ms" for model, each in models.items())
    console.print(f"triton_tuned: {tuning}; SLOs: {slos}", highlight=False)
    return [*({**row, "pair": "tuning"} for row in tried), *rows], ""


def _pair_summary(rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Answers in time of ours over Triton's, medians over the seeds; a run without any counts as one query."""
    summary = {}
    there = {row["contender"] for row in rows}
    for at in dict.fromkeys(row["pair"] for row in rows if row["pair"] in PAIR_RATES):
        for label, mine, theirs in PAIR_METRICS:
            if {mine, theirs} <= there:
                ours_per_s, theirs_per_s = (_median(rows, name, at, "goodput_per_s", "pair") for name in (mine, theirs))
                summary[f"{label}_{at}"] = ours_per_s / max(theirs_per_s, 1 / seconds)
    return summary


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
    """One run of each contender with the same arrivals; the order changes from seed to seed."""
    rates = {model: rate * part for model, part in mix.items()}
    at = seed % len(contenders)
    for contender in (*contenders[at:], *contenders[:at]):
        spans = (QUICK_SECONDS, QUICK_WARM_UP_S) if quick else (SECONDS, WARM_UP_S)
        load = workload(root, contender.prefix, rates, seed, *spans)
        named = {contender.prefix + model: samples for model, samples in inputs.items()}
        with contender.start() as url:
            asyncio.run(warm_up(url, contender.prefix, inputs, strict=False))
            before = core_time()
            result = run_load_process(load, http_url=url, inputs=named)
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
            **disturbed(before),
            **{f"attainment_{tenant.tenant}": tenant.attainment for tenant in result.summary.tenants},
            "failed": total.failed,
        }


# --- results ----------------------------------------------------------------------------------------------------------


def _median(rows: Sequence[dict[str, Any]], contender: str, at: float | str, key: str, by: str = "load") -> float:
    """Over the seeds, of the runs at a load; nan where no run has a value (no query answered, say)."""
    values = [row[key] for row in undisturbed(row for row in rows if (row["contender"], row[by]) == (contender, at))]
    return statistics.median([value for value in values if value is not None] or [math.nan])


def _summary(
    rows: Sequence[dict[str, Any]], names: Sequence[str], factors: Sequence[float], seconds: float
) -> dict[str, float]:
    """Medians over the seeds. A run without answers in time counts as one query, so that a ratio is a lower bound."""
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
    table.title = "Answered within the SLO, as a share of the offered queries; medians over the seeds"
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
