"""Three real models here: blocks and compiled kernels against edf and overlap, at 0.8, 1.2 and 2 times capacity.

The models are ResNet-50, GoogLeNet and MobileNet-V2: of the paper's models those that a core runs in some 10 ms. They
have the zoo's SLOs, about five times the latency alone on one core. Each request is one query over HTTP, open loop,
Poisson; each tenant demands the same share of work. One repository runs on onnxruntime, its copy on the kernels that
`cotenant compile` chose; each is profiled as it is served. All drop by prediction. All servers are up all the time.
Contenders take turns with the same arrivals, in an order that changes from run to run. Capacity is the rate of fcfs
without drops in a closed loop on onnxruntime. Attainment is the share of offered queries answered within the SLO.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench._data import Headline
from bench._registry import BenchError
from bench._server import cache_folder
from bench._tenants import SAMPLES, Contender, Inputs, closed_loop, core_times, ours, send_load, warm_up
from bench.zoo.repository import build_repository
from cotenant.config import load_server_config
from cotenant.measure.sweep import served_shares
from cotenant.profiles.profile_file import load_profile
from cotenant.repository import SERVER_FILE, profile_path
from cotenant.techniques.layer_blocks.measure.compile_campaign import CompiledResult, CompileEffort, compile_repository
from cotenant.techniques.overlap.measure.measured_groups import GroupEffort, fit_groups, measure_groups
from cotenant.workload import for_capacity

NAME = "veltair-real"
MODELS, QUICK_MODELS = ("resnet50", "googlenet", "mobilenet_v2"), ("googlenet", "mobilenet_v2")
FACTORS, QUICK_FACTORS = (0.8, 1.2, 2.0), (1.2,)
SEEDS, QUICK_SEEDS = (1, 2, 3, 4), (1,)
SECONDS, QUICK_SECONDS, WARM_UP_S = 5.0, 2.0, 1.0
_SATURATE_S, _QUICK_SATURATE_S = 4.0, 1.0
_SERVER = '[device]\nlanes = "single"\n\n[policy]\nname = "overlap"\n'
_GROUPS, _QUICK_GROUPS = GroupEffort(count=400, runs=5, budget_s=90.0), GroupEffort(count=60, runs=3, budget_s=30.0)
_COMPILED = "compiled "
CONTENDERS = ("edf", "overlap", _COMPILED + "edf", _COMPILED + "layer_block", _COMPILED + "slack_blocks")
HEADLINES = (
    Headline(
        "more answered in time than by edf on onnxruntime, by the best policy of blocks on compiled kernels",
        "attainment_gain_vs_edf_points",
        "points",
        "measured on the cores of this machine, real models over HTTP; the paper has 64 cores and TVM's kernels",
    ),
)


def run(quick: bool, data_dir: Path) -> dict[str, object]:
    """Measure. `data_dir` is not used; models and kernels are kept in the user's cache folder."""
    console = Console(width=150)
    models = QUICK_MODELS if quick else MODELS
    folder = cache_folder() / (NAME + "-quick" if quick else NAME)
    root = _repository(folder / "onnxruntime", models)
    service_ns = core_times(root, models, quick)
    compiled = _repository(folder / "compiled", models)
    results = _compile(compiled, quick, console)
    faster_ns = core_times(compiled, models, quick)
    _groups(root, quick)
    inputs = _samples(models)
    share = for_capacity(service_ns, 1, 1.0)
    mix = {name: rate / sum(share.values()) for name, rate in share.items()}
    factors, seeds = (QUICK_FACTORS, QUICK_SEEDS) if quick else (FACTORS, SEEDS)
    seconds = QUICK_SECONDS if quick else SECONDS
    rows: list[dict[str, Any]] = []
    with ExitStack() as servers, Progress(console=console) as progress:
        task = progress.add_task("runs", total=len(factors) * len(seeds) * len(CONTENDERS))
        urls: dict[str, str] = {}
        contenders = [_contender(name, root, compiled) for name in CONTENDERS]
        for each in contenders:
            urls[each.name] = servers.enter_context(each.start())
            asyncio.run(warm_up(urls[each.name], each.prefix, inputs, strict=False))
        everything = ours("capacity", root, "--policy", "fcfs", "--drop", "none", "--no-trace")
        with everything.start() as url:
            asyncio.run(warm_up(url, "", inputs))
            saturate_s = _QUICK_SATURATE_S if quick else _SATURATE_S
            capacity = max(uvloop.run(closed_loop(url, "", mix, inputs, saturate_s)) for _ in range(2))
        console.print(f"capacity: {capacity:.1f} queries/s")
        for seed in seeds:
            for factor in factors:
                turn = seed % len(contenders)
                for each in (*contenders[turn:], *contenders[:turn]):
                    rates = {name: capacity * factor * part for name, part in mix.items()}
                    row = send_load(root, each, urls[each.name], rates, inputs, seed, seconds, WARM_UP_S)
                    rows.append({"load": factor, "seed": seed, "capacity_per_s": capacity, **row})
                    progress.advance(task)
    summary = _summary(rows)
    summary |= {f"core_time_{name}_compiled_over_ort": faster_ns[name] / service_ns[name] for name in models}
    _show(console, rows, summary)
    layers = [{"model": name, "ratios": dict(each.ratios), "error": each.error} for name, each in results.items()]
    return {"summary": summary, "rows": [*rows, *layers], "seeds": list(seeds)}


def _repository(root: Path, models: Sequence[str]) -> Path:
    """The models with the zoo's SLOs; existing files stay."""
    build_repository({"onnx": root}, models)
    (root / SERVER_FILE).write_text(_SERVER, encoding="utf-8")
    return root


def _samples(models: Sequence[str]) -> Inputs:
    """Some pictures of noise: what a picture shows changes nothing here."""
    rng = np.random.default_rng(1)
    return {
        name: [{"input": rng.standard_normal((1, 3, 224, 224), np.float32)} for _ in range(SAMPLES)] for name in models
    }


def _compile(root: Path, quick: bool, console: Console) -> dict[str, CompiledResult]:
    settings = load_server_config(root / SERVER_FILE)
    effort = CompileEffort(3, 20.0) if quick else CompileEffort()
    with Progress(console=console) as progress:
        task = progress.add_task("compiling")
        results, errors = compile_repository(
            root, served_shares(settings), effort, lambda done, of, _: progress.update(task, completed=done, total=of)
        )
    if errors:
        raise BenchError(f"models cannot be compiled: {errors}")
    return results


def _groups(root: Path, quick: bool) -> None:
    settings, profile = load_server_config(root / SERVER_FILE), load_profile(profile_path(root))
    effort = _QUICK_GROUPS if quick else _GROUPS
    _, errors = measure_groups(root, settings, profile, effort, fresh=not quick, on_step=lambda *_: None)
    if errors:
        raise BenchError(f"groups cannot be measured: {errors}")
    fit_groups(root, profile)


def _contender(name: str, root: Path, compiled: Path) -> Contender:
    is_compiled = name.startswith(_COMPILED)
    policy = name.removeprefix(_COMPILED)
    return ours(name, compiled if is_compiled else root, "--policy", policy, "--drop", "hopeless", "--no-trace")


def _gains(rows: Sequence[Mapping[str, Any]], name: str, other: str) -> list[tuple[float, float]]:
    """Load, and attainment of one contender less that of another, in points, run by run."""
    found = {(row["seed"], row["load"], row["contender"]): row["attainment"] for row in rows}
    places = [(seed, load) for seed, load, contender in found if contender == name]
    return [(load, 100 * (found[seed, load, name] - found[seed, load, other])) for seed, load in places]


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    means = {
        name: statistics.mean(gain for _, gain in _gains(rows, name, "edf")) for name in CONTENDERS if name != "edf"
    }
    best = max((name for name in means if name.endswith(("blocks", "block"))), key=lambda name: means[name])
    gains = _gains(rows, best, "edf")
    summary = {
        "attainment_gain_vs_edf_points": means[best],
        **{f"{name.replace(' ', '_')}_vs_edf_points": gain for name, gain in means.items()},
        "blocks_vs_compiled_edf_points": means[best] - means[_COMPILED + "edf"],
    }
    if len(gains) > 1:
        deviation = statistics.stdev(gain for _, gain in gains)
        summary["attainment_gain_vs_edf_standard_error_points"] = deviation / math.sqrt(len(gains))
    for load in dict.fromkeys(load for load, _ in gains):
        label = f"{load:g}x".replace(".", "_")
        summary[f"attainment_gain_vs_edf_{label}_points"] = statistics.mean(g for at, g in gains if at == load)
    return summary


def _show(console: Console, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]) -> None:
    table = Table("load", "contender", "attainment", "goodput/s", "p99 ms", "of each tenant")
    table.title = "Answered within the SLO, as a share of the offered queries: means over the runs"
    for load in dict.fromkeys(row["load"] for row in rows):
        for name in CONTENDERS:
            mine = [row for row in rows if (row["load"], row["contender"]) == (load, name)]
            attainment, goodput, p99 = (
                statistics.mean(row[key] or 0.0 for row in mine) for key in ("attainment", "goodput_per_s", "p99_ms")
            )
            tenants = [key for key in mine[0] if key.startswith("attainment_")]
            of_each = ", ".join(f"{statistics.mean(row[key] or 0.0 for row in mine):.3f}" for key in tenants)
            table.add_row(f"{load:g} x", name, f"{attainment:.3f}", f"{goodput:.1f}", f"{p99:.0f}", of_each)
    console.print(table)
    for key, value in summary.items():
        console.print(f"{key}: {value:+.3f}", highlight=False)
